#!/bin/sh
# A few layers of the released widths: k3-run's logits against the published ones, at both epsilons of MLA's low-rank norms.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/python.sh

# Bytes of the slice's files and of its trunk with the head.
case $SLICE in
2) bytes=7800000000 ;;
3) bytes=14300000000 ;;
5) bytes=18500000000 ;;
*) die "SLICE=$SLICE: 2, 3 or 5" ;;
esac
d=$WORK/slice-$SLICE
ids=1008,10484,318,15383,387,17,4096,20000

plain_python
if [ ! -f "$d/trunk/trunk.json" ]; then
    need_disk "$bytes" "slice $SLICE and its trunk"
    rm -rf "$d"
    mkdir -p "$d"
    run k3-synth -q slice "$d/model" --slice "$SLICE"
    run k3-pack -q "$d/model" "$d/trunk"
fi
run k3-plan --budget "$BUDGET" --model "$d/model" --trunk "$d/trunk" -o "$d/plan.json"

status=0
for eps in 1e-6 1e-5; do
    run k3-run --plan "$d/plan.json" --ids "$ids" --gen 1 --no-stop --mla-norm-eps "$eps" \
        --dump-logits "$d/logits.f32" --json "$d/run.json"
    run "$python" pipelines/scripts/check-slice.py "$SLICE" "$d/logits.f32" --mla-norm-eps "$eps" || status=1
done
[ "$status" -eq 0 ] || fail "logits differ; files are kept in $d"
if [ -n "${KEEP:-}" ]; then
    say "kept: $d ($(human "$(disk_bytes "$d")"))"
else
    rm -rf "$d"
fi
