#!/bin/sh
# Run every fuzz target (or those in TARGETS) for TIME seconds, two at a time, beginning from the committed seeds.
# Nothing under tests/fuzz is written: what libFuzzer finds and what fails lands in WORK/fuzz.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

fuzz=tests/fuzz
work=$WORK/fuzz
targets=${TARGETS:-safetensors config trunk plan trace state tokenizer_files tokenizer_text}

if ! command -v cargo-fuzz >/dev/null; then
    die 'cargo-fuzz: not found; cargo install --locked cargo-fuzz'
fi
need_disk 2000000000 fuzz
# The instrumentation is an unstable flag of the compiler, which a stable one takes with this variable. Our parsers have no unsafe
# code, so no sanitizer is asked for.
case $CARGO_TARGET_DIR in
/*) built=$CARGO_TARGET_DIR/fuzz ;;
*) built=$root/$CARGO_TARGET_DIR/fuzz ;;
esac
RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$built cargo-fuzz build -s none --fuzz-dir "$fuzz"
host=$(rustc -vV | sed -n 's/^host: //p')

# One target, in a log of its own.
run() {
    target=$1
    mkdir -p "$work/corpus/$target"
    known=
    [ ! -d "$fuzz/regressions/$target" ] || known="$fuzz/regressions/$target"
    "$built/$host/release/$target" "$work/corpus/$target" "$fuzz/seeds/$target" $known \
        -max_total_time="$TIME" -rss_limit_mb=2048 -malloc_limit_mb=256 -timeout=10 -max_len=65536 \
        -print_final_stats=1 -artifact_prefix="$work/$target-" >"$work/$target.log" 2>&1
}

mkdir -p "$work"
failed=
set -- $targets
while [ $# -gt 0 ]; do
    first=$1; shift
    run "$first" & first_pid=$!
    second=
    if [ $# -gt 0 ]; then
        second=$1; shift
        run "$second" & second_pid=$!
    fi
    wait "$first_pid" || failed="$failed $first"
    [ -z "$second" ] || wait "$second_pid" || failed="$failed $second"
done

for target in $targets; do
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$target.log")
    say "$target: ${executions:-0} executions"
done
if [ -n "$failed" ]; then
    for target in $failed; do
        echo "fuzz: $target failed: see $work/$target.log; keep its input in $fuzz/regressions/$target" >&2
    done
    exit 1
fi
