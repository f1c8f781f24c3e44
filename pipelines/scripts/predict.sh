#!/bin/sh
# A slice at several budgets: the seconds and bytes a plan predicts against those of the run, the machine measured before each.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

[ "$GEN" -ge 4 ] || die "BENCH_GEN=$GEN: the median needs at least 4 tokens"
make_slice "$SLICE"
ids=$(awk 'BEGIN { for (n = 0; n < 24; n++) printf "%s%d", (n ? "," : ""), (n * 7919 + 13) % 20000 }')

# plan FLAGS...: into $d/plan.json, for the budget.
plan() {
    k3-plan -q --budget "$budget" --model "$d/model" --trunk "$d/trunk" --context 512 --prefill-chunk 24 "$@" -o "$d/plan.json"
}

# decode KEY: its values in the decode steps of the report.
decode() {
    awk -v key="\"$1\":" '
        /"mode": / { decode = ($2 ~ /decode/) }
        /^  "totals"/ { exit }
        decode && $1 == key { gsub(/,/, "", $2); print $2 }' "$d/run.json"
}

# generate: what the plan says, with a report and a trace.
generate() {
    k3-run -q --plan "$d/plan.json" --ids "$ids" --gen "$GEN" --no-stop --no-verify --json "$d/run.json" --trace "$d/run.trace" >/dev/null
}

title 'Predicted and measured, of a decoded token'
printf '%10s %12s %12s %10s %10s %8s %10s\n' budget 'trunk+head' experts predicted measured off 'bound by'
problems=
for budget in $BUDGETS; do
    plan --probe-cache none
    generate
    plan --probe --probe-cache none --trace "$d/run.trace"
    # The policy and the slots may be others by the trace: what is asked for is the same.
    generate
    trunk=$(json_number "$d/plan.json" trunk_bytes_per_token)
    head=$(json_number "$d/plan.json" head_bytes_per_token)
    experts=$(json_number "$d/plan.json" expert_bytes_per_token)
    for read in $(decode trunk_bytes_read); do
        [ "$read" = "$trunk" ] || problems="$problems$newline  $budget: a token read $read bytes of the trunk, not $trunk"
    done
    for read in $(decode head_bytes_read); do
        [ "$read" = "$head" ] || problems="$problems$newline  $budget: a token read $read bytes of the head, not $head"
    done
    mean=$(decode expert_bytes_read | awk '{ sum += $1 } END { printf "%.0f\n", sum / NR }')
    [ "$mean" = "$experts" ] || problems="$problems$newline  $budget: a token read $mean bytes of experts, not $experts"
    predicted=$(json_number "$d/plan.json" seconds_per_token)
    measured=$(decode seconds | sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }')
    off=$(awk -v p="$predicted" -v m="$measured" 'BEGIN { printf "%+.1f", 100 * (p - m) / m }')
    printf '%10s %12s %12s %8.3f s %8.3f s %6s %% %10s\n' "$budget" "$(human $((trunk + head)))" "$(human "$experts")" \
        "$predicted" "$measured" "$off" "$(decode bound_by | tail -n 1 | tr -d '"')"
    awk -v off="$off" 'BEGIN { exit !(off <= 15 && off >= -15) }' ||
        problems="$problems$newline  $budget: predicted $predicted s, measured $measured s"
done
[ -z "$problems" ] || fail "$problems"
say ''
say 'Bytes are exact, seconds within 15 %.'
drop_slice
