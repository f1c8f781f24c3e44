# What the README shows that a program knows better.

PICTURE ?= $(CURDIR)/picture.svg
override PICTURE := $(call from_caller,$(PICTURE))
PICTURE_BUDGET ?= 32G

.PHONY: picture readme

#: picture       draw pipelines/picture.svg: the way of the weights, with the figures of a plan of the release. PICTURE_BUDGET=32G
picture: build
	@PICTURE='$(PICTURE)' BUDGET='$(PICTURE_BUDGET)' scripts/picture.sh

#: readme        write the README's tables again: flags from the command lines, the planner's figures, rows in pipelines/results
readme:
	cd .. && $(CARGO) run -q --locked -p k3-tests --example pages -- --readme README.md
