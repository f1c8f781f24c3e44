#!/bin/sh
# The whole release, its weights as holes: every stage at full size, with time and peak memory.
#
# Headers, sizes, offsets and reads are those of the release; only the values are zero. What it cannot show is the speed of a
# disk, because holes are read from memory.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

d=$WORK/rehearsal
table=$d/stages

# stage NAME COMMAND...: echo, run and measure a command.
stage() {
    name=$1
    shift
    show "$@"
    pipelines/scripts/measure.sh "$d/measured" "$@"
    printf '%s %s\n' "$name" "$(cat "$d/measured")" >>"$table"
}

peak_of() {
    awk -v name="$1" '$1 == name { print $3 }' "$table"
}

# within NAME LIMIT WHY: the stage's peak must not be over the limit.
within() {
    if awk -v p="$(peak_of "$1")" -v l="$2" 'BEGIN { exit !(p > l) }'; then
        problems="$problems
  k3-$1 peaked at $(human "$(peak_of "$1")"), over the $(human "$2") of $3"
    fi
    printf '%s %s\n' "$1" "$2" >>"$d/limits"
}

# equals FILE KEY WANT: a number of a report must be the published one.
equals() {
    found=$(json_number "$1" "$2")
    if [ "$found" != "$3" ]; then
        problems="$problems
  $1: $2 is $found, not $3"
    fi
}

# The census's classes must have the release's tensors, parameters and bytes.
class_totals() {
    awk '
        /^  "classes"/ { inside = 1 }
        inside && /^    "/ { gsub(/[":{ ]/, ""); class = $0 }
        inside && /^      "/ { gsub(/[^0-9]/, ""); line = line " " $0 }
        inside && /^    }/ { print class line; line = "" }
        inside && /^  }/ { exit }
    ' "$d/census.json" | sort >"$d/totals"
    if ! grep -v '^#' pipelines/scripts/release-totals.txt | sort | cmp -s - "$d/totals"; then
        problems="$problems
  $d/census.json: classes differ from pipelines/scripts/release-totals.txt; compare with $d/totals"
    fi
}

# The plan's ledger and what the kernel says was resident at most.
ledger() {
    planned=$(json_number "$d/run.json" planned_peak_bytes)
    peak=$(json_number "$d/run.json" peak_rss_bytes)
    say ''
    awk '/^  "ledger"/ { inside = 1 }
        inside && /"name"/ { gsub(/[",]/, "", $2); name = $2 }
        inside && /"bytes"/ { gsub(/,/, "", $2); printf "%-18s %14s\n", name, $2 }
        inside && /^  \]/ { exit }' "$d/plan.json"
    printf '%-18s %14s\n%-18s %14s  %s of the plan\n' planned "$planned" 'measured peak' "$peak" \
        "$(awk -v a="$peak" -v b="$planned" 'BEGIN { printf "%.1f %%", 100 * a / b }')"
    # What is planned is what is used: within 3 % or 8 MB, whichever is more.
    awk -v a="$peak" -v b="$planned" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= 0.03 * b || d <= 8e6) }' ||
        problems="$problems
  k3-run peaked at $(human "$peak"), not within 3 % of the $(human "$planned") planned"
}

print_table() {
    title 'Stages'
    printf '%-10s %10s %12s %12s\n' stage seconds 'peak memory' 'limit'
    while read -r name seconds peak; do
        limit=$(awk -v name="$name" '$1 == name { print $2 }' "$d/limits")
        printf '%-10s %10s %12s %12s\n' "$name" "$seconds" "$(human "$peak")" "$([ -z "$limit" ] || human "$limit")"
    done <"$table"
}

need_disk 1000000000 'the rehearsal'
rm -rf "$d"
mkdir -p "$d"
: >"$table"
: >"$d/limits"
problems=
say "Commands are run at the top of the repository, after: PATH=$bin_dir:\$PATH"

title 'The release: 96 files of the published sizes, real headers, holes for weights'
stage synth k3-synth -q replica "$d/model"

title 'census'
stage census k3-census "$d/model" -o "$d/census.json"
within census 60000000 'its allowance'
# Specification 2.5.
equals "$d/census.json" num_tensors 497220
equals "$d/census.json" num_shards 96
equals "$d/census.json" total_bytes 1560860324864
equals "$d/census.json" total_file_bytes 1560936091448
equals "$d/census.json" total_params 2779931837184
equals "$d/census.json" num_experts_total 82432
class_totals

title 'pack'
stage pack k3-pack -q "$d/model" "$d/trunk"
equals "$d/trunk/trunk.json" trunk_bytes 108811877376

title 'plan'
# The prompt fills its chunk, and tokens are drawn, so that what is planned for both is used.
chunk=$(printf '%s' "$PROMPT" | tr ',' '\n' | awk 'END { print NR }')
stage plan k3-plan --budget "$BUDGET" --context 2048 --prefill-chunk "$chunk" \
    --model "$d/model" --trunk "$d/trunk" -o "$d/plan.json"

budget=$(json_number "$d/plan.json" budget_bytes)
title "run: $GEN tokens through all layers, the kernel allowing $(human "$budget")"
stage run pipelines/scripts/capped.sh "$budget" \
    k3-run --plan "$d/plan.json" --ids "$PROMPT" --gen "$GEN" --no-stop --temperature 0.7 --json "$d/run.json" --trace "$d/run.trace"
within run "$(json_number "$d/plan.json" total_bytes)" 'the plan'
ledger

title 'simcache'
stage simcache k3-simcache -q "$d/run.trace" --capacity 8G,32G,128G -o "$d/simcache.txt"

print_table
say ''
say "on disk: checkpoint $(human "$(disk_bytes "$d/model")"), trunk $(human "$(disk_bytes "$d/trunk")")"
say "run read $(human "$(json_total "$d/run.json" bytes_requested)") for $GEN tokens; step by step in $d/run.json"
[ -z "$problems" ] || fail "$problems"
say 'Counts and sizes are those of the release, and every stage stayed inside its limit.'
