#!/bin/sh
# A few layers of the released widths: k3-run's logits against the published ones, at both epsilons of MLA's low-rank norms.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/python.sh
. pipelines/scripts/slice.sh

ids=1008,10484,318,15383,387,17,4096,20000

plain_python
make_slice "$SLICE"
run k3-plan --budget "$BUDGET" --model "$d/model" --trunk "$d/trunk" -o "$d/plan.json"

status=0
for eps in 1e-6 1e-5; do
    run k3-run --plan "$d/plan.json" --ids "$ids" --gen 1 --no-stop --mla-norm-eps "$eps" \
        --dump-logits "$d/logits.f32" --json "$d/run.json"
    run "$python" pipelines/scripts/check-slice.py "$SLICE" "$d/logits.f32" --mla-norm-eps "$eps" || status=1
done
[ "$status" -eq 0 ] || fail "logits differ; files are kept in $d"
drop_slice
