# Comparisons with the float64 reference in tests/reference. These need Python 3.

IDS ?= 1,2,3,5,8,13,21,34
SLICE ?= 5

.PHONY: conform slice-golden

#: conform       k3-run against the numpy reference, layer by layer, on any checkpoint:
#:               MODEL=DIR [BUDGET=8G IDS=1,2,3 CONFORM_GEN=3 EPS=1e-6 TOLERANCE=1e-4]
conform: build
	@test -n '$(MODEL)' || { echo 'pipelines: say which checkpoint: make conform MODEL=DIR' >&2; exit 2; }
	@MODEL='$(call from_caller,$(MODEL))' BUDGET='$(BUDGET)' IDS='$(IDS)' GEN='$(or $(CONFORM_GEN),3)' \
	    EPS='$(or $(EPS),1e-6)' TOLERANCE='$(or $(TOLERANCE),1e-4)' scripts/conform.sh

#: slice-golden  layers of the released widths against their published logits. SLICE=5 (or 2, 3)
slice-golden: build
	@SLICE='$(SLICE)' BUDGET='$(BUDGET)' scripts/slice-golden.sh
