# What k3 does with files that are not what they should be.

.PHONY: fuzz

#: fuzz          every parser against mutated input, two at a time: [TIME=600 TARGETS='plan trace']; needs cargo-fuzz and a C++ compiler
fuzz:
	@TIME='$(or $(TIME),600)' TARGETS='$(TARGETS)' scripts/fuzz.sh
