#!/bin/sh
# A tiny checkpoint through all five tools, at the smallest budget and with everything resident.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

d=$WORK/demo
prompt='The world said hello,'

need_disk 40000000 'the demo'
rm -rf "$d"
mkdir -p "$d"
say "Commands are run at the top of the repository, after: PATH=$bin_dir:\$PATH"

title 'A checkpoint: every structure of Kimi K3 in 6.5 MB of random weights'
run k3-synth -q tiny "$d/model"

title 'census: what the checkpoint holds, and whether it is whole'
run k3-census "$d/model" -o "$d/census.json"

title 'pack: the always-used weights, in the order they are read'
run k3-pack -q "$d/model" "$d/trunk"

title 'plan | run: everything resident'
run k3-plan --budget 64M --model "$d/model" --trunk "$d/trunk" -o "$d/resident.json"
set -- k3-run --plan "$d/resident.json" --prompt "$prompt" --gen 24 --no-stop --json "$d/resident.run.json"
show "$@"
"$@" >"$d/resident.txt"

title 'plan | run: the smallest budget; trunk and experts stream'
set -- --prompt "$prompt" --gen 24 --no-stop --json "$d/run.json" --trace "$d/run.trace"
printf '%s | ' "$(show k3-plan --budget floor --model "$d/model" --trunk "$d/trunk")"
show k3-run "$@" | sed 's/^\$ //'
k3-plan -q --budget floor --model "$d/model" --trunk "$d/trunk" | k3-run "$@" >"$d/run.txt"

title 'simcache: what other cache sizes and policies would have hit'
run k3-simcache "$d/run.trace" --slots 8,36,72,108,144 --policy lru,layer-distance,reuse-odds,belady

title 'The text (of random weights, so it means nothing)'
printf '%s%s\n' "$prompt" "$(cat "$d/run.txt")"

title 'The report'
say "$d/run.json: read $(human "$(json_total "$d/run.json" bytes_requested)"), peak memory" \
    "$(human "$(json_number "$d/run.json" peak_rss_bytes)") of $(human "$(json_number "$d/run.json" planned_peak_bytes)") planned"
cmp -s "$d/resident.txt" "$d/run.txt" || fail "the text depends on the budget: compare $d/resident.txt and $d/run.txt"
say 'The two budgets gave the same text.'
