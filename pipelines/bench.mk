# Measurements on a slice of the released widths. They take the machine for themselves: run nothing beside them.

BENCH_ROWS ?= 64 256 512
BENCH_GEN ?= 24
BENCH_ROUNDS ?= 5
BUDGETS ?= 12
SEED ?= 1

POLICIES ?= lru lfu layer-distance layer-quota s3-fifo sieve w-tinylfu static-pin reuse-odds
PREDICT_BUDGETS ?= 1G 3G 6G 9G 16G
PREDICT_ROUNDS ?= 3

VERIFY_BUDGETS ?= 1G 16G
VERIFY_ROUNDS ?= 3
VERIFY_GEN ?= 8

.PHONY: bench-resident bench-streamed bench-verify budgets predict counters bench-simcache

#: bench-resident  everything in memory: seconds by part, bytes touched, the limit and the ratio, for prefill and decode,
#:               on 1 and on all threads. SLICE=5 BENCH_BUDGET=16G BENCH_ROWS='64 256 512' BENCH_GEN=24 (at least 21)
bench-resident: build
	@SLICE='$(SLICE)' BUDGET='$(or $(BENCH_BUDGET),16G)' ROWS='$(BENCH_ROWS)' GEN='$(BENCH_GEN)' scripts/bench-resident.sh

#: bench-streamed  the smallest plan: steps and a plain reader of the same files in turns, their ratio, and how much of the time a
#:               read is in flight. SLICE=5 BENCH_ROUNDS=5 (at least 5); REPLICA=1 adds the whole release with holes for weights
bench-streamed: build
	@SLICE='$(SLICE)' BUDGET='$(or $(BENCH_BUDGET),16G)' ROUNDS='$(BENCH_ROUNDS)' scripts/bench-streamed.sh

#: bench-verify  what checking digests costs a decoded token, as a ratio: never, at the first load, at every load; streamed and
#:               resident. SLICE=5 VERIFY_BUDGETS='1G 16G' VERIFY_ROUNDS=3 VERIFY_GEN=8
bench-verify: build
	@SLICE='$(SLICE)' BUDGETS='$(VERIFY_BUDGETS)' ROUNDS='$(VERIFY_ROUNDS)' GEN='$(VERIFY_GEN)' scripts/bench-verify.sh

#: budgets       a slice at many budgets between the smallest and all resident: the same bits, the planned bytes, and no more
#:               memory than planned. SLICE=5 BUDGETS=12 SEED=1
budgets: build
	@SLICE='$(SLICE)' COUNT='$(BUDGETS)' SEED='$(SEED)' scripts/budgets.sh

#: predict       a slice at several budgets: what plans predict, the machine measured before each, against the run; medians.
#:               SLICE=5 PREDICT_BUDGETS='1G 3G 6G 9G 16G' PREDICT_ROUNDS=3 BENCH_GEN=24
predict: build
	@SLICE='$(SLICE)' BUDGETS='$(PREDICT_BUDGETS)' ROUNDS='$(PREDICT_ROUNDS)' GEN='$(BENCH_GEN)' scripts/predict.sh

#: counters      a slice under every policy at 8 cache sizes: the run's requests and hits are those of its replay. SLICE=5
counters: build
	@SLICE='$(SLICE)' POLICIES='$(POLICIES)' scripts/counters.sh

#: bench-simcache  k3-simcache: its default table against 1 s, each policy's cost, ten million requests and their memory.
#:               K3_SHARED_DATA=DIR also times the recorded trace there
bench-simcache:
	@cd .. && $(CARGO) bench -p k3-simcache --bench replay
