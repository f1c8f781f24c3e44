# Ladders: what a setting buys, a row a run. Rows go to WORK/rows/TARGET.jsonl; an interrupted ladder goes on where it stopped.
# They take the machine for themselves: run nothing beside them. On any model with MODEL=DIR TRUNK=DIR, else on a slice.

ROUNDS ?= 3
REPEATS ?= 6
LADDER_GEN ?= 6
ROWS ?= $(WORK)/rows
override ROWS := $(call from_caller,$(ROWS))
PLOTS ?= $(ROWS)/plots
override PLOTS := $(call from_caller,$(PLOTS))
LADDERS := ladder split threads depth context replicate

.PHONY: $(LADDERS) plots results
# Nothing beside a measurement, with `make -j` too.
.NOTPARALLEL:

#: ladder        seconds a token at budgets from the smallest to all resident, each under a memory cgroup of its own, swap off.
#:               ROUNDS=3 LADDER_GEN=6 LADDER_BUDGETS='1G 2G ...' (else eight by the model and the machine)
#: split         one budget: trunk pinned against expert slots. SPLIT_BUDGET=5G SPLIT_PINS='0 1G ...'
#: threads       compute threads, streamed and resident. THREADS='1 2 ...' THREAD_BUDGETS='1G 12G'
#: depth         size of reads against reads in flight. READ_SIZES='256Ki 1Mi 4Mi' DEPTHS='1 4 16'
#: context       tokens after prompts of different lengths. CONTEXTS='32 512 2048'
#: replicate     the same rows REPEATS=6 times: how much of a difference is noise
#:               All of them: MODEL=DIR TRUNK=DIR or SLICE=5; ROWS=DIR (now WORK/rows); rows in the file are not run again
#:               unless FRESH=1. Ids are compared over all rows: a row that differs fails its ladder.
$(LADDERS): build
	@MODEL='$(if $(MODEL),$(call from_caller,$(MODEL)))' TRUNK='$(if $(TRUNK),$(call from_caller,$(TRUNK)))' SLICE='$(SLICE)' \
	    ROWS='$(ROWS)' ROUNDS='$(ROUNDS)' REPEATS='$(REPEATS)' GEN='$(LADDER_GEN)' FRESH='$(FRESH)' \
	    LADDER_BUDGETS='$(LADDER_BUDGETS)' SPLIT_BUDGET='$(SPLIT_BUDGET)' SPLIT_PINS='$(SPLIT_PINS)' \
	    THREADS='$(THREADS)' THREAD_BUDGETS='$(THREAD_BUDGETS)' READ_SIZES='$(READ_SIZES)' DEPTHS='$(DEPTHS)' \
	    CONTEXTS='$(CONTEXTS)' PROBE='$(PROBE)' scripts/ladder.sh $@

#: plots         draw every ladder that has rows: ROWS=DIR PLOTS=DIR (now ROWS/plots)
plots: build
	@ROWS='$(ROWS)' PLOTS='$(PLOTS)' scripts/plots.sh

#: results       draw the rows kept in pipelines/results again, and print their tables
results: build
	@ROWS='$(CURDIR)/results' PLOTS='$(CURDIR)/results' scripts/plots.sh
