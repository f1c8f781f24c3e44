# The whole release by its real headers, without its weights.

BUDGET ?= 8G
GEN ?= 2
PROMPT ?= 163584,5,17,300,42,7,8,9

.PHONY: rehearsal

#: rehearsal     the 1.56 TB release with holes for weights through census, pack, plan and run;
#:               time and peak memory of each stage. BUDGET=8G GEN=2 PROMPT=id,id,...
rehearsal: build
	@BUDGET='$(BUDGET)' GEN='$(GEN)' PROMPT='$(PROMPT)' scripts/rehearsal.sh
