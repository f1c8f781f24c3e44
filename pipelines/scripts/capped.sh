#!/bin/sh
# capped.sh BYTES COMMAND...: run a command that may not take more memory than so many bytes, swap included.
#
# A memory cgroup of its own is the cap: version 2, version 1, or one that systemd makes. Where none can be had, the address
# space is limited to 1 GiB more, which memory without use also counts for. Says on stderr which it was; exits as the command did.
set -u

bytes=$1
shift

tell() {
    printf 'capped: %s\n' "$*" >&2
}

# The folder of this process's own cgroup: of the unified hierarchy, or of version 1's memory controller.
mount_of() {
    awk -v kind="$1" '$3 == kind && (kind == "cgroup2" || "," $4 "," ~ /,memory,/) { print $2; exit }' /proc/self/mounts
}
own_group() {
    awk -F: -v kind="$1" '(kind == "cgroup2" && $1 == 0) || (kind == "cgroup" && "," $2 "," ~ /,memory,/) {
        sub(/^[^:]*:[^:]*:/, ""); print; exit }' /proc/self/cgroup
}

# make_group KIND FILE: a group below our own, or below the root, that has FILE; its folder in $group.
make_group() {
    mount=$(mount_of "$1")
    [ -n "$mount" ] || return 1
    for parent in "$mount$(own_group "$1")" "$mount"; do
        group=${parent%/}/k3-capped-$$
        mkdir "$group" 2>/dev/null || continue
        if [ -w "$group/$2" ] && printf '%s\n' "$bytes" 2>/dev/null >"$group/$2"; then return 0; fi
        rmdir "$group"
    done
    return 1
}

# in_group COMMAND...: run it as a member of $group, then remove the group.
in_group() {
    (
        # Of a shell's child, the first field of its stat is its own number.
        read -r self _ </proc/self/stat
        printf '%s\n' "$self" >"$group/cgroup.procs" 2>/dev/null || exit 125
        exec "$@"
    )
    status=$?
    rmdir "$group" 2>/dev/null
    exit "$status"
}

if make_group cgroup2 memory.max; then
    printf '0\n' 2>/dev/null >"$group/memory.swap.max"
    tell "at most $bytes bytes by $group/memory.max"
    in_group "$@"
elif make_group cgroup memory.limit_in_bytes; then
    printf '%s\n' "$bytes" 2>/dev/null >"$group/memory.memsw.limit_in_bytes"
    tell "at most $bytes bytes by $group/memory.limit_in_bytes"
    in_group "$@"
elif systemd-run --version >/dev/null 2>&1 &&
    systemd-run -q --user --scope -p MemoryMax="$bytes" -p MemorySwapMax=0 true 2>/dev/null; then
    tell "at most $bytes bytes by a scope of systemd"
    exec systemd-run -q --user --scope -p MemoryMax="$bytes" -p MemorySwapMax=0 -- "$@"
elif prlimit --version >/dev/null 2>&1; then
    tell "no memory cgroup can be made here; the address space is limited to $bytes bytes and 1 GiB instead"
    exec prlimit --as=$((bytes + 1073741824)) -- "$@"
else
    tell 'neither a memory cgroup nor prlimit is to be had here'
    exit 125
fi
