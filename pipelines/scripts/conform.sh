#!/bin/sh
# Pack, plan and run a checkpoint, then compare every layer with the numpy reference.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh
. pipelines/scripts/python.sh

MODEL=${MODEL#"$root"/}
[ -f "$MODEL/config.json" ] || die "$MODEL: no config.json; MODEL is a checkpoint folder"
d=$WORK/conform/$(basename "$MODEL")

need_disk 50000000 'the comparison'
numpy_python
rm -rf "$d"
mkdir -p "$d"

run k3-census -q "$MODEL" -o "$d/census.json"
# The trunk is what the checkpoint holds besides experts, and a little padding.
trunk_bytes=$(awk -v all="$(json_number "$d/census.json" total_bytes)" -v each="$(json_number "$d/census.json" expert_bytes)" \
    -v experts="$(json_number "$d/census.json" num_experts_total)" 'BEGIN { printf "%.0f\n", all - each * experts + 50000000 }')
need_disk "$trunk_bytes" 'the trunk'
run k3-pack -q "$MODEL" "$d/trunk"
run k3-plan -q --budget "$BUDGET" --model "$MODEL" --trunk "$d/trunk" -o "$d/plan.json"
show k3-run --plan "$d/plan.json" --ids "$IDS" --gen "$GEN" --no-stop --mla-norm-eps "$EPS" \
    --dump-hidden "$d/hidden.f32" --dump-logits "$d/logits.f32" --json "$d/run.json"
k3-run --plan "$d/plan.json" --ids "$IDS" --gen "$GEN" --no-stop --mla-norm-eps "$EPS" \
    --dump-hidden "$d/hidden.f32" --dump-logits "$d/logits.f32" --json "$d/run.json" >"$d/text.txt"

# What was fed, step by step, as the report has it.
fed=$("$python" -c '
import json, sys
run = json.load(open(sys.argv[1]))
join = lambda numbers: ",".join(map(str, numbers))
prompt, steps = run["prompt_ids"], [step["rows"] for step in run["steps"]]
print("--ids", join(prompt + run["generated_ids"][:-1]), "--steps", join(steps), "--prompt-rows", len(prompt))
' "$d/run.json")
# shellcheck disable=SC2086 # `fed` is several words
run "$python" tests/reference/conform.py "$MODEL" "$d/hidden.f32" $fed --logits "$d/logits.f32" \
    --mla-norm-eps "$EPS" --tolerance "$TOLERANCE"
[ -n "${KEEP:-}" ] || rm -rf "$d"
