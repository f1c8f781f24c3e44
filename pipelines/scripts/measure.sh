#!/bin/sh
# measure.sh FILE COMMAND...: run a command, then write "seconds peak-bytes" to FILE. Exits as the command did.
#
# GNU time asks the kernel at the end. Without it, the peak of resident memory is read from /proc every 50 ms, so growth in
# the last moment may be missed.

out=$1
shift

now() {
    read -r up _ </proc/uptime
    printf '%s\n' "$up"
}

watch() {
    peak=0
    while :; do
        seen=
        while read -r key value _; do
            if [ "$key" = VmHWM: ]; then seen=$value; fi
        done 2>/dev/null <"/proc/$1/status"
        # A process that ended has no memory, or no status at all.
        [ -n "$seen" ] || break
        peak=$seen
        sleep 0.05
    done
    printf '%s\n' "$peak"
}

start=$(now)
if time=$(command -v time) && "$time" -f %M -o "$out.peak" true 2>/dev/null; then
    "$time" -q -f %M -o "$out.peak" "$@"
    status=$?
else
    "$@" <&0 &
    child=$!
    trap 'kill -INT "$child"' INT
    trap 'kill -TERM "$child"' TERM
    watch "$child" >"$out.peak"
    wait "$child"
    status=$?
fi
awk -v start="$start" -v end="$(now)" -v kib="$(tail -n 1 "$out.peak")" \
    'BEGIN { printf "%.2f %.0f\n", end - start, kib * 1024 }' >"$out"
rm -f "$out.peak"
exit "$status"
