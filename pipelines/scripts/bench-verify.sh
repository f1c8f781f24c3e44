#!/bin/sh
# What checking digests costs: decoded tokens of a slice with no check, each piece checked when first loaded (the default), and on
# every load, in turns, streamed and resident. Experts have digests too.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/slice.sh

[ "$GEN" -ge 6 ] || die "VERIFY_GEN=$GEN: at least 6, of which the first two count for nothing"
make_slice "$SLICE"
ids=163,5,17,300,42,7
digests=$d/model/k3-experts.sha256
[ -f "$digests" ] || run k3-census -q "$d/model" --hash --experts "$digests" -o "$d/census.json"

# tokens: seconds of the decode steps of the report but the first two, one a line.
tokens() {
    awk '
        /^  "totals"/ { exit }
        $1 == "\"mode\":" { decode = ($2 ~ /decode/); step += decode }
        decode && step > 2 && $1 == "\"seconds\":" { gsub(/,/, "", $2); print $2 }' "$d/run.json"
}

title 'Seconds of a decoded token by when digests are checked: medians'
printf '%10s %12s %12s %8s %12s %8s\n' budget 'no check' 'first load' ratio 'every load' ratio
for budget in $BUDGETS; do
    k3-plan -q --budget "$budget" --model "$d/model" --trunk "$d/trunk" --context 64 --prefill-chunk 6 --probe-cache none -o "$d/plan.json"
    rm -f "$d"/tokens.*
    expected=
    round=0
    while [ "$round" -lt "$ROUNDS" ]; do
        for check in none first always; do
            case $check in
            none) flag=--no-verify ;;
            *) flag="--verify $check" ;;
            esac
            # shellcheck disable=SC2086 # one word or two
            got=$(k3-run -q --plan "$d/plan.json" --ids "$ids" --gen "$GEN" --no-stop $flag --json "$d/run.json")
            [ "$got" = "${expected:=$got}" ] || fail "$budget, $flag: other tokens than without a check"
            [ "$check" = none ] || grep -q '"experts_verified": true' "$d/run.json" || fail "$budget, $flag: experts were not checked"
            tokens >>"$d/tokens.$check"
        done
        round=$((round + 1))
    done
    none=$(median <"$d/tokens.none")
    first=$(median <"$d/tokens.first")
    always=$(median <"$d/tokens.always")
    awk -v budget="$budget" -v none="$none" -v first="$first" -v always="$always" 'BEGIN {
        printf "%10s %10.3f s %10.3f s %8.3f %10.3f s %8.3f\n", budget, none, first, first / none, always, always / none
    }'
done
rm -f "$d"/tokens.*
drop_slice
