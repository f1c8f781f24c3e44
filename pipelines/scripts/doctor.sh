#!/bin/sh
# Can this machine build k3, hold its files and read past the page cache?
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

bad=0
ok() { printf '  ok    %s\n' "$*"; }
note() { printf '  note  %s\n' "$*"; }
wrong() {
    printf '  WRONG %s\n' "$*"
    bad=1
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
            wrong "$found is older than $want: rustup update"
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
}

check_processor() {
    title 'Processor'
    ok "$(getconf _NPROCESSORS_ONLN) cores online"
    if grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo; then
        ok 'AVX2 and FMA'
    else
        note 'no AVX2 with FMA: k3-run uses its scalar kernels, with the same results, many times slower'
    fi
}

# The smallest memory limit of the control groups above us, in bytes, or nothing.
cgroup_limit() {
    dir=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null)
    while [ -n "$dir" ] && [ "$dir" != /sys/fs ]; do
        cat "$dir/memory.max" "$dir/memory.high" 2>/dev/null || :
        dir=${dir%/*}
    done | grep '^[0-9]' | sort -n | sed 1q
}

check_memory() {
    title 'Memory'
    available=$(awk '/^MemAvailable:/ { printf "%.0f\n", $2 * 1024 }' /proc/meminfo)
    limit=$(cgroup_limit)
    ok "$(human "$available") available"
    if [ -n "$limit" ]; then note "a control group limits this to $(human "$limit")"; fi
    if awk -v m="$available" -v l="${limit:-$available}" 'BEGIN { exit !((m < l ? m : l) < 1500000000) }'; then
        wrong 'the whole model needs about 1.2 GB for k3-run; the demo needs 40 MB'
    fi
}

check_disk() {
    title "Disk at $WORK"
    need_disk 1000000 'this check' >/dev/null
    probe=$(mktemp -d "$WORK/doctor.XXXXXX")
    trap 'rm -rf "$probe"' EXIT
    free=$(free_bytes "$WORK")
    ok "$(human "$free") free"
    note 'disk needed: demo 40 MB, rehearsal 1 GB, slice-golden 8 GB (SLICE=2) to 19 GB (SLICE=5), the release and its trunk 1.7 TB'
    if dd if=/dev/zero of="$probe/direct" bs=4096 count=4 oflag=direct 2>/dev/null &&
        dd if="$probe/direct" of=/dev/null bs=4096 iflag=direct 2>/dev/null; then
        ok 'direct I/O (O_DIRECT)'
    else
        note 'no direct I/O on this file system: the tools read through the page cache instead, slower, and say so'
    fi
    dd if=/dev/zero of="$probe/sparse" bs=1 count=0 seek=17179869184 2>/dev/null || :
    apparent=$(wc -c <"$probe/sparse" 2>/dev/null || echo 0)
    if [ "$apparent" -eq 17179869184 ] && [ "$(du -k "$probe/sparse" | cut -f 1)" -lt 1024 ]; then
        ok 'files of 16 GiB with holes'
    else
        wrong 'no files of 16 GiB with holes: rehearsal cannot work here, and shards of the release are up to 17 GB'
    fi
}

check_tools
check_processor
check_memory
check_disk
say ''
[ "$bad" -eq 0 ] || fail 'see WRONG above'
say 'Ready: make -C pipelines demo'
