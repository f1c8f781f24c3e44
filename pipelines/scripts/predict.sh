#!/bin/sh
# A slice at several budgets: the seconds and bytes a plan predicts against those of the run. Probes and runs alternate, round
# after round, and the medians of a budget are compared: on a shared machine memory can halve its speed from one minute to the next.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

[ "$GEN" -ge 4 ] || die "BENCH_GEN=$GEN: the median needs at least 4 tokens"
[ "$ROUNDS" -ge 1 ] || die "PREDICT_ROUNDS=$ROUNDS: at least one"
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

# generate FLAGS...: what the plan says, with a report.
generate() {
    k3-run -q --plan "$d/plan.json" --ids "$ids" --gen "$GEN" --no-stop --no-verify --json "$d/run.json" "$@" >/dev/null
}

# one BUDGET: probe, plan and run once; a line "budget predicted measured trunk+head experts bound" to $d/rounds.
one() {
    budget=$1
    plan --probe --probe-cache none --trace "$d/run.trace"
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
    echo "$budget $(json_number "$d/plan.json" seconds_per_token) $(decode seconds | median) $((trunk + head)) $experts" \
        "$(decode bound_by | tail -n 1 | tr -d '"')" >>"$d/rounds"
}

title "Predicted and measured, of a decoded token: medians of $ROUNDS rounds"
problems=
# What is asked for does not depend on the budget.
for budget in $BUDGETS; do
    plan --probe-cache none
    generate --trace "$d/run.trace"
    break
done
rm -f "$d/rounds"
round=0
while [ "$round" -lt "$ROUNDS" ]; do
    for budget in $BUDGETS; do
        one "$budget"
    done
    round=$((round + 1))
done
printf '%10s %12s %12s %10s %10s %8s   %-18s %s\n' budget 'trunk+head' experts predicted measured off 'of each round' 'bound by'
for budget in $BUDGETS; do
    rows=$(grep "^$budget " "$d/rounds")
    predicted=$(echo "$rows" | awk '{ print $2 }' | median)
    measured=$(echo "$rows" | awk '{ print $3 }' | median)
    off=$(awk -v p="$predicted" -v m="$measured" 'BEGIN { printf "%+.1f", 100 * (p - m) / m }')
    each=$(echo "$rows" | awk '{ printf "%+.0f ", 100 * ($2 - $3) / $3 }')
    # shellcheck disable=SC2046 # two numbers
    set -- $(echo "$rows" | awk 'NR == 1 { print $4, $5, $6 }')
    printf '%10s %12s %12s %8.3f s %8.3f s %6s %%   %-18s %s\n' "$budget" "$(human "$1")" "$(human "$2")" \
        "$predicted" "$measured" "$off" "$each" "$3"
    awk -v off="$off" 'BEGIN { exit !(off <= 15 && off >= -15) }' ||
        problems="$problems$newline  $budget: predicted $predicted s, measured $measured s"
done
rm -f "$d/rounds"
[ -z "$problems" ] || fail "$problems"
say ''
say 'Bytes are exact, seconds within 15 %.'
drop_slice
