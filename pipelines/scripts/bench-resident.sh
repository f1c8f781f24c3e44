#!/bin/sh
# A slice with everything in memory: what a step takes, part by part, against what this machine's memory and arithmetic allow.
#
# Limits come from `k3-plan --probe`, made a moment before the runs. Medians are over steps whose weights were all there: the
# first steps of a run read them.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

[ "$GEN" -ge 21 ] || die "BENCH_GEN=$GEN: the median needs at least 21 tokens"
make_slice "$SLICE"
threads=$(getconf _NPROCESSORS_ONLN)
warm=128

# ids COUNT: so many different tokens, comma-separated.
ids() {
    awk -v count="$1" 'BEGIN { for (n = 0; n < count; n++) printf "%s%d", (n ? "," : ""), (n * 7919 + 13) % 20000 }'
}

# plan CHUNK: everything resident, the machine measured.
plan() {
    run k3-plan -q --budget "$BUDGET" --model "$d/model" --trunk "$d/trunk" --prefill-chunk "$1" --probe -o "$d/plan.json"
    for key in trunk_bytes_per_token head_bytes_per_token expert_bytes_per_token; do
        [ "$(json_number "$d/plan.json" "$key")" = 0 ] ||
            die "$d/plan.json: $key is not 0; give a BENCH_BUDGET that holds slice $SLICE whole"
    done
}

# steps MODE ROWS: of $d/run.json, the medians of the whole steps of this kind, and of each of their parts.
steps() {
    awk -v mode="$1" -v rows="$2" \
        -v memory="$(json_number "$d/plan.json" memory_bytes_per_second)" \
        -v arithmetic="$(json_number "$d/plan.json" flops_per_second)" '
        function median(values, count,   i, j, v) {
            for (i = 2; i <= count; i++) {
                v = values[i]
                for (j = i - 1; j >= 1 && values[j] > v; j--) values[j + 1] = values[j]
                values[j + 1] = v
            }
            return (values[int((count + 1) / 2)] + values[int((count + 2) / 2)]) / 2
        }
        function of(key,   i, list) {
            for (i = 1; i <= count; i++) list[i] = value[i, key]
            return median(list, count)
        }
        function flush() {
            if (step["mode"] == "\"" mode "\"" && step["rows"] == rows && step["expert_bytes_read"] == 0 && step["trunk_bytes_read"] == 0) {
                count++
                for (key in step) value[count, key] = step[key]
            }
            split("", step)
        }
        /^  "steps": \[/ { inside = 1 }
        inside && /^  \]/ { inside = 0 }
        inside && /^    }/ { flush() }
        inside && /^ +"[a-z_]+": [^{\[]/ {
            key = $1; gsub(/[":]/, "", key)
            number = $2; sub(/,$/, "", number)
            step[key] = number
            # The parts are an object within the step.
            if (/^        / && !(key in known)) { known[key] = 1; part[++parts] = key }
        }
        END {
            if (!count) exit 1
            seconds = of("seconds"); touched = of("touched_bytes"); flops = of("flops")
            printf "%s, %d row%s: median of %d steps %.4f s\n", mode, rows, (rows == 1 ? "" : "s"), count, seconds
            limit = touched / memory
            printf "  memory      %.3f GB touched, %.1f GB/s of %.1f: limit %.4f s, ratio %.2f\n", touched / 1e9, \
                touched / seconds / 1e9, memory / 1e9, limit, seconds / limit
            limit = flops / arithmetic
            printf "  arithmetic  %.0f Gflop, %.1f Gflop/s of %.0f, %.1f %%: limit %.4f s\n", flops / 1e9, \
                flops / seconds / 1e9, arithmetic / 1e9, 100 * limit / seconds, limit
            for (p = 1; p <= parts; p++) {
                s = of(part[p])
                name = part[p]; sub(/_seconds$/, "", name); gsub(/_/, " ", name)
                if (s > 0) printf "  %-22s %10.3f ms %6.1f %%\n", name, 1000 * s, 100 * s / seconds
            }
        }' "$d/run.json"
}

# decode THREADS: some tokens after a prompt long enough for the experts to be in memory.
decode() {
    ids "$warm" >"$d/ids.txt"
    run k3-run -q --plan "$d/plan.json" --ids-file "$d/ids.txt" --gen "$GEN" --no-stop --no-verify --threads "$1" --json "$d/run.json"
    steps decode 1 | tee "$d/decode.$1"
    awk '/"generated_ids"/, /\]/' "$d/run.json" >"$d/generated.$1"
}

title "Decode on $threads threads and on 1"
plan 64
decode "$threads"
decode 1
cmp -s "$d/generated.1" "$d/generated.$threads" || fail "the ids depend on the threads: compare $d/generated.1 and $d/generated.$threads"
say "The same ids on 1 thread; $threads threads are $(awk '/median of/ { print $(NF - 1) }' "$d/decode.1" "$d/decode.$threads" |
    awk 'NR == 1 { one = $1 } NR == 2 { printf "%.2f", one / $1 }') times as fast."

for rows in $ROWS; do
    title "Prefill, $rows rows a step"
    plan "$rows"
    # The first step reads the trunk, and a few more of small steps the last experts.
    ids $((rows * 3 > 640 ? rows * 3 : 640)) >"$d/ids.txt"
    run k3-run -q --plan "$d/plan.json" --ids-file "$d/ids.txt" --gen 0 --no-stop --no-verify --json "$d/run.json"
    steps prefill "$rows" || fail "$d/run.json: every step of $rows rows read something"
done
say ''
say "Limits are those of k3-plan --probe, in $d/plan.json."
drop_slice
