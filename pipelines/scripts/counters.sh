#!/bin/sh
# A slice under every policy at eight cache sizes: what the run counts of its experts is what k3-simcache counts in the run's trace.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

make_slice "$SLICE"
# Two chunks of the prompt, then single tokens.
ids=163,5,17,300,42,7
k3-plan -q --budget 64G --model "$d/model" --trunk "$d/trunk" --probe-cache none -o "$d/plan.json"
most=$(json_number "$d/plan.json" expert_slots)

# count KEY: of the steps of a mode in the report, the sum.
count() {
    awk -v mode="\"$1\"," -v key="\"$2\":" '
        /^  "totals"/ { exit }
        $1 == "\"mode\":" { now = $2 }
        $1 == key && now == mode { gsub(/,/, "", $2); sum += $2 }
        END { printf "%.0f\n", sum }' "$d/run.json"
}

# replayed MODE KEY: the same of the only row of the replay.
replayed() {
    awk -v mode="\"$1\":" -v key="\"$2\":" '
        $1 == "\"rows\":" { rows = 1 }
        rows && $1 == mode { inside = 1 }
        inside && $1 == key { gsub(/,/, "", $2); print $2; exit }' "$d/simcache.json"
}

title "Every policy at 8 sizes, up to $most slots"
printf '%-16s %8s %10s %8s %10s %8s\n' policy slots prefill hits decode hits
for policy in $POLICIES; do
    for eighth in 1 2 3 4 5 6 7 8; do
        slots=$((20 + (most - 20) * (eighth - 1) / 7))
        k3-plan -q --budget 64G --model "$d/model" --trunk "$d/trunk" --probe-cache none --context 64 --prefill-chunk 4 \
            --queue-depth 4 --expert-slots "$slots" --cache-policy "$policy" -o "$d/plan.json"
        k3-run -q --plan "$d/plan.json" --ids "$ids" --gen 4 --no-stop --no-verify --json "$d/run.json" --trace "$d/run.trace" >/dev/null
        k3-simcache -q "$d/run.trace" --slots "$slots" --policy "$policy" --format json -o "$d/simcache.json"
        for mode in prefill decode; do
            for key in requests hits; do
                [ "$(count "$mode" "expert_$key")" = "$(replayed "$mode" "$key")" ] ||
                    fail "$policy, $slots slots: $(count "$mode" "expert_$key") $key in $mode steps, the replay has $(replayed "$mode" "$key")"
            done
        done
        printf '%-16s %8s %10s %8s %10s %8s\n' "$policy" "$slots" "$(count prefill expert_requests)" "$(count prefill expert_hits)" \
            "$(count decode expert_requests)" "$(count decode expert_hits)"
    done
done
say ''
say 'Requests and hits of every run are those of its replay.'
drop_slice
