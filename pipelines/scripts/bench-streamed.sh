#!/bin/sh
# A slice at its smallest plan: whether the disk ever waits. Steps and a plain reader of the same files take turns.
#
# REPLICA=1 adds the whole release with holes for weights: a disk about as fast as memory, with all 93 layers to walk.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

[ "$ROUNDS" -ge 5 ] || die "BENCH_ROUNDS=$ROUNDS: the median needs at least 5 rounds"
make_slice "$SLICE"

title 'Smallest plan, read size and depth from a sweep of this disk'
run k3-plan -q --budget floor --model "$d/model" --trunk "$d/trunk" --probe -o "$d/plan.json"
run k3-plan -q --budget "$BUDGET" --model "$d/model" --trunk "$d/trunk" -o "$d/resident.json"

title 'Steps and plain reads in turns'
# Cargo runs a benchmark in its package's folder.
case $d in
/*) at=$d ;;
*) at=$root/$d ;;
esac
run "$CARGO" bench -q --locked -p k3-run --bench streamed -- "$at/plan.json" "$at/resident.json" "$ROUNDS"
drop_slice

if [ -n "${REPLICA:-}" ]; then
    title 'The whole release with holes for weights'
    d=$WORK/replica
    need_disk 1000000000 'the replica'
    rm -rf "$d"
    mkdir -p "$d"
    run k3-synth -q replica "$d/model"
    run k3-pack -q "$d/model" "$d/trunk"
    run k3-plan -q --budget 8G --model "$d/model" --trunk "$d/trunk" --disk-speed 10G --probe -o "$d/plan.json"
    run k3-run -q --plan "$d/plan.json" --ids 163584,5 --gen 4 --no-stop --no-verify --json "$d/run.json"
    awk -v memory="$(json_number "$d/plan.json" memory_bytes_per_second)" '
        /"mode": "decode"/ { decode = 1 }
        decode && /^      "seconds"/ { gsub(/[^0-9.e-]/, "", $2); total += $2; count++; decode = 0 }
        END {
            limit = 137e9 / memory
            printf "decode: %.2f s a token; 137 GB at the %.1f GB/s of memory take %.2f s: ratio %.2f\n", \
                total / count, memory / 1e9, limit, total / count / limit
        }' "$d/run.json"
    [ -n "${KEEP:-}" ] || rm -rf "$d"
fi
