# What this machine can do, and what to type next.

.PHONY: doctor

#: doctor        processor, memory, disks, what is there of the model and its trunk, seconds a token at budgets that fit, and the next
#:               command: MODEL=DIR TRUNK=DIR (else K3_MODEL, K3_TRUNK, else ~/k3model, ~/k3trunk), CENSUS=FILE instead of a model,
#:               DOCTOR_BUDGETS=floor,8G,auto PROBE=none (do not measure)
doctor:
	@MODEL='$(if $(MODEL),$(call from_caller,$(MODEL)))' TRUNK='$(if $(TRUNK),$(call from_caller,$(TRUNK)))' \
	    CENSUS='$(if $(CENSUS),$(call from_caller,$(CENSUS)))' BUDGETS='$(DOCTOR_BUDGETS)' PROBE='$(PROBE)' scripts/doctor.sh
