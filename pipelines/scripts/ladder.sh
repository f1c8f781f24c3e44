#!/bin/sh
# ladder.sh TARGET: run the rows of a ladder in turns, round after round, and keep each as a line of ROWS/TARGET.jsonl.
#
# A row is a plan and a run under a memory cap of the plan's budget. Rounds take turns so that a machine that grows slower while a
# ladder runs slows every row alike; the machine's speeds are measured anew at the start of each round.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

target=$1
ROWS=${ROWS#"$root"/}
rows=$ROWS/$target.jsonl
prompt_rows=24
: "${DEPTHS:=1 4 16}"
read_size=4Mi
queue_depth=4

[ "$ROUNDS" -ge 1 ] && [ "$REPEATS" -ge 1 ] || die 'ROUNDS and REPEATS are at least 1'
[ "$GEN" -ge 3 ] || die "LADDER_GEN=$GEN: at least 3, of which the first comes with the prompt"

# The model and where its trunk is; plans and reports of the row that runs lie in $w.
find_model() {
    if [ -n "$MODEL$TRUNK" ]; then
        [ -n "$MODEL" ] && [ -n "$TRUNK" ] || die 'give both MODEL=DIR and TRUNK=DIR, or neither for a slice'
        model=$MODEL
        trunk=$TRUNK
        [ -f "$model/config.json" ] || die "$model: no config.json; MODEL is a checkpoint folder"
        [ -f "$trunk/trunk.json" ] || die "$trunk: no trunk.json; k3-pack $model $trunk makes it"
    else
        make_slice "$SLICE"
        model=$d/model
        trunk=$d/trunk
    fi
    need_disk 10000000 'the ladder'
    w=$WORK/ladders/$target
    rm -rf "$w"
    mkdir -p "$w" "$ROWS"
}

# ids COUNT: so many different tokens of the vocabulary, comma-separated.
ids() {
    awk -v count="$1" -v vocabulary="$vocabulary" \
        'BEGIN { for (n = 0; n < count; n++) printf "%s%d", (n ? "," : ""), (n * 7919 + 13) % vocabulary }'
}

# plan FLAGS...: into $w/plan.json.
plan() {
    k3-plan -q --model "$model" --trunk "$trunk" --probe-cache "$w/probe" "$@" -o "$w/plan.json"
}

# total FLAGS...: what a plan with these takes.
total() {
    plan --context "$((prompt_rows + GEN))" --prefill-chunk "$prompt_rows" "$@"
    json_number "$w/plan.json" total_bytes
}

# Sizes that the defaults are chosen from: the smallest plan (and a little, so that the prompt is one step), the trunk resident,
# all resident, and what this machine can give.
measure_model() {
    low=$(($(total --budget floor) + 64000000))
    slots=$(json_number "$w/plan.json" expert_slots)
    tiny=0
    all=$(total --budget 1000T)
    knee=$(total --budget 1000T --expert-slots "$slots")
    host=$(json_number "$w/plan.json" limit_bytes)
    host=$((host * 95 / 100))
    # A model smaller than the allowance has nothing to divide.
    if [ "$low" -gt "$all" ]; then
        low=$(total --budget floor)
        tiny=1
    fi
    [ "$low" -le "$host" ] || die "the smallest plan takes $(human "$low"), this machine can give $(human "$host")"
    top=$((all < host ? all : host))
    [ "$knee" -le "$top" ] || knee=$top
}

# between A B COUNT: so many sizes from A to B, equally far apart.
between() {
    awk -v a="$1" -v b="$2" -v count="$3" 'BEGIN { for (n = 0; n < count; n++) printf "%.0f\n", a + (b - a) * n / (count - 1) }'
}

budgets() {
    if [ -n "$LADDER_BUDGETS" ]; then
        printf '%s\n' "$LADDER_BUDGETS" | tr ' ' '\n'
    elif [ "$knee" -lt "$top" ]; then
        { between "$low" "$knee" 5; between "$knee" "$top" 4; } | sort -nu
    else
        between "$low" "$top" 8 | sort -nu
    fi
}

# name BUDGET: a size as a row is called.
name() {
    case $1 in
    *[!0-9]*) say "$1" ;;
    *) human "$1" ;;
    esac
}

# A line a row: name|tokens of the prompt|tokens to generate|flags of k3-plan|flags of k3-run.
list_rows() {
    case $target in
    ladder)
        for budget in $(budgets); do
            say "$(name "$budget")|$prompt_rows|$GEN|--budget $budget|"
        done
        ;;
    split)
        budget=${SPLIT_BUDGET:-$((low + (knee - low) * 4 / 5))}
        total --budget "$budget" >/dev/null
        most=$(json_number "$w/plan.json" pinned_trunk_bytes)
        for pin in ${SPLIT_PINS:-$(between 0 "$most" 6)}; do
            say "pin $(name "$pin")|$prompt_rows|$GEN|--budget $budget --pin $pin|"
        done
        ;;
    threads)
        cores=$(getconf _NPROCESSORS_ONLN)
        for budget in ${THREAD_BUDGETS:-$low $top}; do
            for threads in ${THREADS:-$(doublings "$cores")}; do
                say "$(name "$budget"), threads $threads|$prompt_rows|$GEN|--budget $budget|--threads $threads"
            done
        done
        ;;
    depth)
        # Slots for the reads of the deepest row, in every row, so that they differ in nothing else.
        deepest=$(printf '%s\n' "$DEPTHS" | tr ' ' '\n' | sort -n | tail -n 1)
        for size in ${READ_SIZES:-256Ki 1Mi 4Mi}; do
            for deep in $DEPTHS; do
                say "$size x $deep|4|$((GEN < 4 ? GEN : 4))|--budget $((low + 512000000)) --pin 0 --expert-slots $((slots + deepest)) --read-size $size --queue-depth $deep|"
            done
        done
        ;;
    context)
        for rows_before in ${CONTEXTS:-32 512 2048}; do
            # As much as holds everything at this length, so that only the length differs.
            plan --budget 1000T --context "$((rows_before + GEN))" --prefill-chunk 64
            budget=$(json_number "$w/plan.json" total_bytes)
            say "$rows_before positions|$rows_before|$GEN|--budget $((budget < host ? budget : host)) --prefill-chunk 64|"
        done
        ;;
    replicate)
        say "$(name "$low")|$prompt_rows|$GEN|--budget $low|"
        say "$(name "$top")|$prompt_rows|$GEN|--budget $top|"
        ;;
    *) die "$target: not a ladder" ;;
    esac
}

# 1 2 4 ... and the number itself.
doublings() {
    awk -v most="$1" 'BEGIN { for (n = 1; n < most; n *= 2) print n; print most }'
}

# measure: the machine's speeds, for the plans of a round.
measure() {
    if [ -n "${PROBE:-}" ] && [ "$PROBE" = none ]; then return; fi
    show k3-plan --probe
    plan --budget "$low" --probe
}

# row: run the row of $name, $prompt, $gen, $plan_flags, $run_flags.
row() {
    # Flags of the row come last, and win.
    # shellcheck disable=SC2086 # several words
    set -- --context "$((prompt + gen))" $plan_flags
    case " $plan_flags " in *' --read-size '*) ;; *) set -- "$@" --read-size "$read_size" --queue-depth "$queue_depth" ;; esac
    case " $plan_flags " in *' --prefill-chunk '*) ;; *) set -- "$@" --prefill-chunk "$prompt" ;; esac
    plan "$@"
    ids "$prompt" >"$w/ids"
    budget=$(json_number "$w/plan.json" budget_bytes)
    # shellcheck disable=SC2086 # several words
    if ! pipelines/scripts/capped.sh "$budget" k3-run -q --plan "$w/plan.json" --ids-file "$w/ids" --gen "$gen" --no-stop --no-verify \
        --json "$w/run.json" $run_flags </dev/null >"$w/out" 2>"$w/err"; then
        cat "$w/err" >&2
        fail "$target \"$name\": the run failed; its plan is $w/plan.json"
    fi
    # What the cap was, without what is another in every row.
    cap=$(sed -n 's/^capped: //p' "$w/err" | sed 's|^at most [0-9]* bytes by /.*/|cgroup, |; s/^at most [0-9]* bytes/the budget/; s/to [0-9]* bytes/to the budget/')
    k3-rows add "$rows" --target "$target" --row "$name" --round "$round" --date "$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
        --tree "$tree" --cap "$cap" --plan "$w/plan.json" --report "$w/run.json"
}

find_model
vocabulary=$(awk -F'[:,]' '/"vocab_size"/ { gsub(/[^0-9]/, "", $2); print $2; exit }' "$model/config.json")
[ -n "$vocabulary" ] || die "$model/config.json: no vocab_size"
tree=$(git rev-parse --short=12 HEAD 2>/dev/null || say unknown)
[ -z "$(git status --porcelain -- Cargo.lock bins shared tests/src 2>/dev/null)" ] || tree=$tree+
measure_model
[ -z "$FRESH" ] || rm -f "$rows"
list_rows >"$w/list"
[ "$target" != replicate ] || ROUNDS=$REPEATS

title "$target: $(wc -l <"$w/list" | tr -d ' ') rows, $ROUNDS rounds, into $rows"
[ "$tiny" = 0 ] || say 'This model is so small that its rows hardly differ.'
round=1
while [ "$round" -le "$ROUNDS" ]; do
    measured=
    while IFS='|' read -r name prompt gen plan_flags run_flags; do
        status=0
        k3-rows has "$rows" --row "$name" --round "$round" || status=$?
        case $status in
        0)
            say "$target \"$name\", round $round: there already"
            continue
            ;;
        1) ;;
        *) exit "$status" ;;
        esac
        [ -n "$measured" ] || measure </dev/null
        measured=1
        row
    done <"$w/list"
    round=$((round + 1))
done

title "$target: medians of seconds a token, from $model"
k3-rows table "$rows" || fail "rows of $rows generated different tokens"
say ''
say "The same tokens in every row. Pictures: make -C pipelines plots"
[ -n "$MODEL" ] || say "Kept for other ladders: $d ($(human "$(disk_bytes "$d")")); make -C pipelines clean removes it"
