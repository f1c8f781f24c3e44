#!/bin/sh
# A slice at many budgets from the smallest to all resident: the same bits, the planned bytes, and no more memory than planned.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

make_slice "$SLICE"
prompt=13,5,17,300,42

# total BUDGET: what its plan takes.
total() {
    k3-plan -q --budget "$1" --model "$d/model" --trunk "$d/trunk" -o "$d/plan.json"
    json_number "$d/plan.json" total_bytes
}

# decode FILE KEY: the values of a key in the decode steps of a report.
decode() {
    awk -v key="\"$2\":" '
        /"mode": / { decode = ($2 ~ /decode/) }
        /^  "totals"/ { exit }
        decode && $1 == key { gsub(/,/, "", $2); print $2 }' "$1"
}

# must TEXT A B: two numbers have to be equal.
must() {
    [ "$2" = "$3" ] || fail "budget $budget: $1: $2, not $3 (see $d/run.json, $d/plan.json)"
}

floor=$(total floor)
all=$(total 64G)
title "$COUNT budgets from $(human "$floor") to $(human "$all")"
printf '%12s %12s %12s %14s %12s %10s\n' budget planned peak 'trunk+head' experts 's/token'
last=
n=0
while [ "$n" -lt "$COUNT" ]; do
    # The ends, and between them one of each of equal stretches, its place in it random.
    budget=$(awk -v seed="$SEED" -v n="$n" -v count="$COUNT" -v floor="$floor" -v all="$all" 'BEGIN {
        srand(seed + n); r = rand()
        at = n == 0 ? 0 : n == count - 1 ? 1 : (n - 1 + r) / (count - 2)
        printf "%.0f\n", floor + (all - floor) * at
    }')
    k3-plan -q --budget "$budget" --model "$d/model" --trunk "$d/trunk" --prefill-chunk 3 -o "$d/plan.json"
    k3-run -q --plan "$d/plan.json" --ids "$prompt" --gen 3 --no-stop --no-verify \
        --json "$d/run.json" --trace "$d/run.trace" --dump-logits "$d/logits.$n" >"$d/ids.$n"
    cmp -s "$d/logits.$n" "$d/logits.0" && cmp -s "$d/ids.$n" "$d/ids.0" ||
        fail "budget $budget: other bits than budget $floor; compare $d/logits.$n and $d/logits.0"
    [ "$n" = 0 ] || rm "$d/logits.$n" "$d/ids.$n"

    planned=$(json_number "$d/run.json" planned_peak_bytes)
    peak=$(json_number "$d/run.json" peak_rss_bytes)
    awk -v p="$peak" -v l="$planned" 'BEGIN { exit !(p <= l) }' ||
        fail "budget $budget: peak $(human "$peak") of $(human "$planned") planned"
    trunk=$(json_number "$d/plan.json" trunk_bytes_per_token)
    head=$(json_number "$d/plan.json" head_bytes_per_token)
    for read in $(decode "$d/run.json" trunk_bytes_read); do must 'trunk bytes of a token' "$read" "$trunk"; done
    for read in $(decode "$d/run.json" head_bytes_read); do must 'head bytes of a token' "$read" "$head"; done
    k3-simcache -q "$d/run.trace" --slots "$(json_number "$d/plan.json" expert_slots)" \
        --policy "$(sed -n 's/^ *"cache_policy": "\(.*\)",$/\1/p' "$d/plan.json")" --format json -o "$d/simcache.json"
    must 'expert bytes of the run' "$(json_total "$d/run.json" expert_bytes_read)" "$(json_number "$d/simcache.json" bytes_read)"
    awk -v now="$((trunk + head))" -v last="${last:-inf}" 'BEGIN { exit !(last == "inf" || now <= last) }' ||
        fail "budget $budget: reads more of the trunk than a smaller one"
    last=$((trunk + head))
    printf '%12s %12s %12s %14s %12s %10.3f\n' "$(human "$budget")" "$(human "$planned")" "$(human "$peak")" \
        "$(human "$last")" "$(human "$(json_total "$d/run.json" expert_bytes_read)")" "$(decode "$d/run.json" seconds | tail -n 1)"
    n=$((n + 1))
done
rm "$d/logits.0" "$d/ids.0"
must 'trunk and head bytes of a token with all resident' "$last" 0
say ''
say 'The same ids and logits to the bit; every step read the planned bytes and every run the experts of its replay.'
drop_slice
