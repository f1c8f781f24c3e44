#!/bin/sh
# How weights go from disk through memory into the arithmetic, as SVG, with the figures of a plan of the whole release.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

PICTURE=${PICTURE#"$root"/}
mkdir -p "$WORK"
plan=$WORK/picture.plan.json
run k3-plan -q --census kimi-k3 --budget "$BUDGET" --threads 8 -o "$plan"

# line NAME: bytes of a line of the ledger.
line() {
    awk -v name="\"$1\"," '$1 == "\"name\":" { found = $2 == name } found && $1 == "\"bytes\":" { sub(",", "", $2); print $2; exit }' "$plan"
}

total=$(json_number "$plan" total_bytes)
pinned=$(json_number "$plan" pinned_trunk_bytes)
ring=$(line stream_buffers)
slots=$(line expert_slots)
rest=$(awk -v t="$total" -v p="$pinned" -v r="$ring" -v s="$slots" 'BEGIN { printf "%.0f\n", t - p - r - s }')
trunk=$(awk -v a="$(json_number "$plan" trunk_bytes_per_token)" -v b="$(json_number "$plan" head_bytes_per_token)" \
    'BEGIN { printf "%.0f\n", a + b }')
experts=$(json_number "$plan" expert_bytes_per_token)
num_slots=$(json_number "$plan" expert_slots)

# box X Y WIDTH HEIGHT FILL TITLE [LINE...]
box() {
    x=$1 y=$2 w=$3 h=$4 fill=$5
    shift 5
    printf '<rect x="%s" y="%s" width="%s" height="%s" rx="6" fill="%s" stroke="#475569"/>\n' "$x" "$y" "$w" "$h" "$fill"
    ty=$((y + 24)) class=' font-weight="600"'
    for text in "$@"; do
        printf '<text x="%s" y="%s"%s>%s</text>\n' $((x + 14)) "$ty" "$class" "$text"
        ty=$((ty + 20)) class=' class="small"'
    done
}

# arrow PATH COLOUR X Y LINE...: a path with a head, and its label.
arrow() {
    printf '<path d="%s" fill="none" stroke="%s" stroke-width="2.5" marker-end="url(#%s)"/>\n' "$1" "$2" "head-${2#\#}"
    x=$3 y=$4
    shift 4
    for text in "$@"; do
        printf '<text x="%s" y="%s" class="small" text-anchor="middle">%s</text>\n' "$x" "$y" "$text"
        y=$((y + 17))
    done
}

head_of() {
    printf '<marker id="head-%s" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">' "${1#\#}"
    printf '<path d="M0 0L8 4L0 8z" fill="%s"/></marker>\n' "$1"
}

title_at() {
    printf '<text x="%s" y="34" font-size="17" font-weight="600">%s</text>\n' "$1" "$2"
}

draw() {
    blue='#1d4ed8' red='#b45309' grey='#475569'
    printf '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 430" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#0f172a">\n'
    printf '<style>.small { font-size: 12.5px; fill: #334155 }</style>\n<defs>\n'
    head_of $blue
    head_of $red
    head_of $grey
    printf '</defs>\n<rect width="1000" height="430" fill="#ffffff"/>\n'
    title_at 24 'Disk'
    title_at 402 "Memory: $(human "$total") planned"
    title_at 784 'One token, 93 layers'
    box 24 54 190 188 '#dbeafe' 'trunk.bin' '108.81 GB in tiles,' 'in order of use,' 'a digest each' '+ 2.35 GB output head'
    box 24 254 190 140 '#fef3c7' 'shards' '82,432 experts,' '17.5 MB each,' '1.45 TB in all'
    box 402 54 200 108 '#bfdbfe' 'pinned tiles' "$(human "$pinned")" 'read once, kept'
    box 402 174 200 68 '#dbeafe' 'ring of tiles' "$(human "$ring"), read ahead"
    box 402 254 200 68 '#fef3c7' "$num_slots expert slots" "$(human "$slots")"
    box 402 334 200 60 '#f1f5f9' 'everything else' "$(human "$rest"): state, buffers"
    box 784 54 192 44 '#dbeafe' 'KDA or MLA mixer'
    box 784 118 192 44 '#dbeafe' 'router: 16 of 896'
    box 784 182 192 44 '#dbeafe' 'shared experts'
    box 784 278 192 44 '#fef3c7' '16 routed experts'
    box 784 350 192 44 '#f1f5f9' 'sum, next layer'
    arrow 'M214 92H396' $blue 305 82 'the first step only'
    arrow 'M214 208H396' $blue 308 198 "$(human "$trunk") a token"
    arrow 'M214 304H396' $red 308 294 "$(human "$experts") a token"
    arrow 'M602 76H778' $blue 0 0
    arrow 'M602 208H778' $blue 672 198 'tile by tile'
    arrow 'M602 304H778' $red 690 322 'each as it lands'
    arrow 'M784 140H742V272H608' $grey 676 264 'which experts'
    for y in 98 162 226 322; do
        case $y in
        226) to=272 ;;
        322) to=344 ;;
        *) to=$((y + 14)) ;;
        esac
        arrow "M880 ${y}V$to" $grey 0 0
    done
    printf '</svg>\n'
}

draw >"$PICTURE.partial"
mv "$PICTURE.partial" "$PICTURE"
say "$PICTURE"
