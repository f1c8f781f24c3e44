#!/bin/sh
# Will it run here, how fast, and what to type next?
#
# Exit 0 when nothing is wrong, with or without a model; 1 when something here needs mending first. Either way the last line is the
# next command.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

release_shards=manifests/kimi-k3.shard_sizes.txt
# Trunk, output head and digests of the release.
release_trunk=111300000000

bad=0
next=
ok() { printf '  ok    %s\n' "$*"; }
note() { printf '  note  %s\n' "$*"; }
wrong() {
    printf '  WRONG %s\n' "$*"
    bad=1
}

# then COMMAND...: the next thing to type; the first one named counts.
then_type() {
    [ -n "$next" ] || next=$*
}

check_tools() {
    title 'Tools'
    want=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    if found=$(rustc --version 2>/dev/null); then
        if printf '%s\n' "$found" | awk -v want="$want" '{
            split($2, have, "."); split(want, need, ".")
            exit !(have[1] > need[1] || (have[1] == need[1] && have[2] + 0 >= need[2] + 0))
        }'; then
            ok "$found (at least $want)"
        else
            wrong "$found is older than $want"
            then_type rustup update
        fi
    else
        wrong 'rustc: not found; install Rust from https://rustup.rs'
    fi
    for tool in cargo cc make awk; do
        if path=$(command -v "$tool"); then ok "$path"; else wrong "$tool: not found"; fi
    done
    if path=$(command -v python3); then
        ok "$path (for conform and slice-golden only)"
    else
        note 'python3: not found; conform and slice-golden need it, nothing else does'
    fi
    built=1
    for tool in k3-census k3-pack k3-plan k3-run; do
        [ -x "$bin_dir/$tool" ] || built=
    done
    if [ -n "$built" ]; then
        ok "the tools are built: $bin_dir"
    else
        note "the tools are not built yet, so nothing below is measured"
        then_type make -C pipelines build doctor
    fi
}

# A number of the plan that was made for this host.
host_number() {
    json_number "$scratch/host.json" "$1"
}

check_processor() {
    title 'Processor'
    flags=$(sed -n 's/^flags[[:space:]]*: //p' /proc/cpuinfo | sed 1q)
    has() { for flag in "$@"; do case " $flags " in *" $flag "*) ;; *) return 1 ;; esac; done; }
    ok "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | sed 1q), $(getconf _NPROCESSORS_ONLN) processors online"
    if has avx512f avx512bw avx512vl avx2 fma; then
        ok 'AVX-512: the widest kernels'
    elif has avx2 fma; then
        ok 'AVX2 and FMA'
    else
        note 'no AVX2 with FMA: k3-run uses its scalar kernels, with the same results, many times slower'
    fi
    has sha_ni || note 'no SHA instructions: digests take several times as long; k3-run --no-verify leaves them out'
    if [ -n "$built" ]; then
        ok "$(host_number cores) to compute with (hyper-threads counted once; affinity and CPU quota included)"
    fi
}

check_memory() {
    title 'Memory'
    available=$(awk '/^MemAvailable:/ { printf "%.0f\n", $2 * 1024 }' /proc/meminfo)
    can_give=$available
    ok "$(human "$available") available of $(human "$(awk '/^MemTotal:/ { printf "%.0f\n", $2 * 1024 }' /proc/meminfo)")"
    if [ -n "$built" ]; then
        can_give=$(host_number limit_bytes)
        by=$(sed -n 's/^ *"limited_by": "\(.*\)",$/\1/p' "$scratch/host.json")
        [ "$by" = MemAvailable ] || note "this process may take $(human "$can_give"): $by"
    fi
    if awk -v m="$can_give" 'BEGIN { exit !(m < 1300000000) }'; then
        wrong 'the whole model needs 1.2 GB for k3-run; the demo needs 40 MB'
    fi
}

# The folder itself, or the nearest one above it that exists.
existing() {
    path=$1
    while [ ! -d "$path" ]; do path=$(dirname "$path"); done
    say "$path"
}

# Direct reads, and their speed in bytes a second, on the disk of WORK; nothing where it cannot be told.
plain_read() {
    dd if=/dev/urandom of="$scratch/plain" bs=4M count=64 conv=fsync 2>/dev/null || return 0
    dd if="$scratch/plain" of=/dev/null bs=4M iflag=direct 2>"$scratch/dd" || return 0
    LC_ALL=C awk '/copied/ { for (i = 2; i <= NF; i++) if ($i ~ /^s,?$/) { printf "%.0f\n", 268435456 / $(i - 1); exit } }' "$scratch/dd"
}

check_disk() {
    title "Disk of the pipelines: $WORK"
    ok "$(human "$(free_bytes "$WORK")") free"
    note 'disk needed: demo 40 MB, rehearsal 1 GB, slices 8 GB (SLICE=2) to 19 GB (SLICE=5), the release and its trunk 1.7 TB'
    plain=
    [ "${PROBE:-}" = none ] || plain=$(plain_read)
    if dd if=/dev/zero of="$scratch/direct" bs=4096 count=4 oflag=direct 2>/dev/null &&
        dd if="$scratch/direct" of=/dev/null bs=4096 iflag=direct 2>/dev/null; then
        ok "direct I/O (O_DIRECT)${plain:+, one read after the other $(human "$plain")/s}"
    else
        note 'no direct I/O on this file system: the tools read through the page cache instead, slower, and say so'
    fi
    dd if=/dev/zero of="$scratch/sparse" bs=1 count=0 seek=17179869184 2>/dev/null || :
    apparent=$(wc -c <"$scratch/sparse" 2>/dev/null || echo 0)
    if [ "$apparent" -eq 17179869184 ] && [ "$(du -k "$scratch/sparse" | cut -f 1)" -lt 1024 ]; then
        ok 'files of 16 GiB with holes'
    else
        wrong 'no files of 16 GiB with holes: rehearsal cannot work here, and shards of the release are up to 17 GB'
    fi
}

# What a download takes, and whether it would fit.
tell_download() {
    shards=$(awk '{ sum += $2 } END { printf "%.0f\n", sum }' "$release_shards")
    both=$((shards + release_trunk))
    place=$(existing "$(dirname "$MODEL")")
    free=$(free_bytes "$place")
    note "the release takes $(human "$shards") in $(awk 'END { print NR }' "$release_shards") files, its trunk and head $(human "$release_trunk") more; k3-run 1.2 GB of memory or more"
    if awk -v f="$free" -v n="$both" 'BEGIN { exit !(f >= n) }'; then
        ok "$(human "$free") free at $place: room for both"
    else
        note "$(human "$free") free at $place: $(human "$((both - free))") too little for both; MODEL and TRUNK may lie on other disks"
    fi
    command -v hf >/dev/null 2>&1 || note 'the client hf is not installed yet; make fetch says how'
}

# The census in $scratch/census.json, and whether the checkpoint is `whole`, `damaged`, or `absent`.
check_model() {
    title "Model: ${CENSUS:-$MODEL}"
    state=absent
    if [ -n "$CENSUS" ]; then
        grep -q '"schema": "k3.census/' "$CENSUS" 2>/dev/null || die "$CENSUS: not a census; k3-census MODEL_DIR -o FILE makes one"
        cp "$CENSUS" "$scratch/census.json"
        state=listed
        ok "$(json_number "$CENSUS" num_shards) shards, $(human "$(json_number "$CENSUS" total_bytes)"), by this census"
        return
    fi
    if [ ! -f "$MODEL/config.json" ]; then
        if [ -d "$MODEL" ]; then note 'no checkpoint here (no config.json)'; else note 'no checkpoint here (no such folder)'; fi
        tell_download
        then_type make -C pipelines fetch "MODEL=$(shell_word "$MODEL")"
        return
    fi
    [ -n "$built" ] || return 0
    status=0
    k3-census -q "$MODEL" -o "$scratch/census.json" 2>"$scratch/problems" || status=$?
    if [ "$status" -eq 0 ]; then
        state=whole
        ok "whole: $(json_number "$scratch/census.json" num_shards) shards, $(json_number "$scratch/census.json" num_tensors) tensors, $(human "$(json_number "$scratch/census.json" total_bytes)"), $(json_number "$scratch/census.json" num_experts_total) experts"
        [ -f "$MODEL/tiktoken.model" ] || note 'no tiktoken.model: prompts are token ids (--ids) until it is there'
        return
    fi
    state=damaged
    wrong "not whole; k3-census says:"
    sed -n '1,3s/^/          /p' "$scratch/problems"
    more=$(($(wc -l <"$scratch/problems") - 3))
    if [ "$more" -gt 0 ]; then say "          and $more more lines"; fi
    if grep -q missing "$scratch/problems" || [ -f "$MODEL/k3-fetch" ]; then
        then_type make -C pipelines fetch "MODEL=$(shell_word "$MODEL")"
    else
        then_type "$bin_dir/k3-census" "$(shell_word "$MODEL")"
    fi
}

# Whether the trunk can be used: `ready`, `absent`, or `unfit`.
check_trunk() {
    trunk_state=absent
    case $state in whole | damaged) ;; *) return 0 ;; esac
    title "Trunk: $TRUNK"
    if [ ! -f "$TRUNK/trunk.json" ]; then
        need=$(awk -v all="$(json_number "$scratch/census.json" total_bytes)" -v each="$(json_number "$scratch/census.json" expert_bytes)" \
            -v experts="$(json_number "$scratch/census.json" num_experts_total)" 'BEGIN { printf "%.0f\n", all - each * experts }')
        place=$(existing "$TRUNK")
        free=$(free_bytes "$place")
        if [ -d "$TRUNK" ] && [ -n "$(ls -A "$TRUNK")" ]; then
            note 'not finished: no trunk.json; pack again'
        else
            note 'not packed yet'
        fi
        if awk -v f="$free" -v n="$need" 'BEGIN { exit !(f >= n) }'; then
            ok "it takes $(human "$need"); $(human "$free") are free at $place"
            then_type "$bin_dir/k3-pack" "$(shell_word "$MODEL")" "$(shell_word "$TRUNK")"
        else
            wrong "it takes $(human "$need"); only $(human "$free") are free at $place"
            then_type "$bin_dir/k3-pack" "$(shell_word "$MODEL")" DIR_ON_ANOTHER_DISK
        fi
        return
    fi
    if k3-plan -q --probe-cache none --budget floor --model "$MODEL" --trunk "$TRUNK" -o "$scratch/floor.json" 2>"$scratch/problems"; then
        trunk_state=ready
        ok "$(human "$(json_number "$TRUNK/trunk.json" stored_bytes)"), made from this model; k3-pack --verify checks every tile"
    else
        trunk_state=unfit
        wrong "$(sed -n '1s/^k3-plan: //p' "$scratch/problems")"
        then_type "$bin_dir/k3-pack" --force "$(shell_word "$MODEL")" "$(shell_word "$TRUNK")"
    fi
}

# disks: what each disk was found to do, from the plans' record of the measuring.
disks() {
    awk '/"devices": \[/ { inside = 1; next }
        inside && /^ *\]/ { exit }
        inside { gsub(/^ *|,$/, "") }
        inside && /^"folder"/ { gsub(/^"folder": "|"$/, ""); folder = $0 }
        inside && /^"kind"/ { kind = /sequential/ ? "trunk, in order" : "experts, anywhere" }
        inside && /^"bytes_per_second"/ { printf "%.0f|%s|%s\n", $2, kind, folder }' "$scratch/plans.json" |
        while IFS='|' read -r speed kind folder; do
            ok "$kind: $(human "$speed")/s from $folder"
        done
}

# useful SOURCE...: of the usual budgets, those that this model can fill, and what holds all of it.
useful() {
    k3-plan -q --probe-cache none --budget 1000T "$@" -o "$scratch/all.json" 2>/dev/null || return 0
    all=$(json_number "$scratch/all.json" total_bytes)
    list=floor
    for gigabytes in 2 4 8 16 32 64 128 224; do
        if [ "$((gigabytes * 1000000000))" -lt "$all" ]; then list=$list,${gigabytes}G; fi
    done
    # What holds the whole release is no machine's memory.
    if [ "$all" -lt 224000000000 ]; then list=$list,$all; fi
    say "$list"
}

# show_table SOURCE...: budgets with what they pin and how long a token takes; SOURCE is how k3-plan is told of the model.
show_table() {
    say ''
    show k3-plan --budget "$budgets" "$@"
    k3-plan --budget "$budgets" "$@" -o "$scratch/plans.json" 2>"$scratch/table" ||
        { cat "$scratch/table"; return 0; }
    disks
    # The measuring's own lines, and the table; warnings of budgets that are meant for more memory are said once.
    grep -v '^warn: the plan takes\|^prefill chunk lowered\|^measuring' "$scratch/table" || :
    if grep -q '^warn: the plan takes' "$scratch/table"; then
        say "Budgets over $(human "$can_give") are more than this machine can give now; k3-run would refuse them."
    fi
}

check_fit() {
    [ -n "$built" ] || return 0
    # Of a checkpoint that is not whole, only the release is known beforehand.
    if [ "$state" = damaged ] && [ ! -f "$MODEL/model-00001-of-000096.safetensors" ]; then return 0; fi
    title 'What fits'
    probe=--probe
    [ "${PROBE:-}" != none ] || probe=
    case $trunk_state in
    ready)
        # What is measured is kept, so that plans made later know it.
        budgets=${BUDGETS:-$(useful --model "$MODEL" --trunk "$TRUNK")}
        show_table $probe --model "$MODEL" --trunk "$TRUNK"
        then_type "$bin_dir/k3-plan" --budget auto --model "$(shell_word "$MODEL")" --trunk "$(shell_word "$TRUNK")" '|' \
            "$bin_dir/k3-run" "$(prompt_flag)" --gen 64
        ;;
    *)
        case $state in
        listed | whole) set -- --census "$scratch/census.json" ;;
        *) set -- --census kimi-k3 ;;
        esac
        if [ "$state" = listed ]; then set -- --census "$CENSUS"; fi
        budgets=${BUDGETS:-$(useful "$@")}
        if [ -n "$plain" ]; then set -- "$@" --disk-speed "$plain"; fi
        show_table "$@"
        if [ -n "$plain" ]; then
            note "at the $(human "$plain")/s of one read after the other on this disk; k3-plan --probe measures trunk and experts once there is a trunk"
        fi
        ;;
    esac
}

# A prompt in words needs a vocabulary.
prompt_flag() {
    if [ -f "$MODEL/tiktoken.model" ]; then say "--prompt 'The world said hello,'"; else say '--ids 1,2,3'; fi
}

need_disk 300000000 'this check' >/dev/null
scratch=$(mktemp -d "$WORK/doctor.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
MODEL=${MODEL:-${K3_MODEL:-${HOME:-}/k3model}}
TRUNK=${TRUNK:-${K3_TRUNK:-${HOME:-}/k3trunk}}

check_tools
if [ -n "$built" ]; then k3-plan -q --probe-cache none --census kimi-k3 --budget floor -o "$scratch/host.json" || built=; fi
check_processor
check_memory
check_disk
check_model
check_trunk
check_fit
if [ "$state" = listed ]; then then_type make -C pipelines fetch "MODEL=$(shell_word "$MODEL")"; fi
title 'Next'
[ "$bad" -eq 0 ] || say 'See WRONG above.'
[ "$state" != absent ] || say 'To try it without a download: make -C pipelines demo'
say 'At the top of the repository:'
say "${next:-make -C pipelines demo}"
[ "$bad" -eq 0 ]
