# Getting the checkpoint, and giving the tools to others.

REPO ?= moonshotai/Kimi-K3
REVISION ?=
DIST ?= $(WORK)/dist
override DIST := $(call from_caller,$(DIST))

.PHONY: fetch dist

#: fetch         download the checkpoint with the official client `hf`, going on where an earlier fetch stopped, then check it:
#:               MODEL=DIR [REVISION=commit REPO=moonshotai/Kimi-K3]. Without REVISION the newest is taken, said, and kept
fetch: build
	@test -n '$(MODEL)' || { echo 'pipelines: say where to: make -C pipelines fetch MODEL=DIR' >&2; exit 2; }
	@MODEL='$(call from_caller,$(MODEL))' REPO='$(REPO)' REVISION='$(REVISION)' scripts/fetch.sh

#: dist          a tarball with the five tools, manual pages, shell completions, licence and README: DIST=DIR (now WORK/dist)
dist: build
	@DIST='$(DIST)' scripts/dist.sh
