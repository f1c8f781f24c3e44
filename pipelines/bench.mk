# Measurements on a slice of the released widths. They take the machine for themselves: run nothing beside them.

BENCH_ROWS ?= 64 256 512
BENCH_GEN ?= 24

.PHONY: bench-resident

#: bench-resident  everything in memory: seconds by part, bytes touched, the limit and the ratio, for prefill and decode,
#:               on 1 and on all threads. SLICE=5 BENCH_BUDGET=16G BENCH_ROWS='64 256 512' BENCH_GEN=24 (at least 21)
bench-resident: build
	@SLICE='$(SLICE)' BUDGET='$(or $(BENCH_BUDGET),16G)' ROWS='$(BENCH_ROWS)' GEN='$(BENCH_GEN)' scripts/bench-resident.sh
