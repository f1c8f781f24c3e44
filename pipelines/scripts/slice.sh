# shellcheck shell=sh
# Sourced after lib.sh by the targets that work on a slice: a few layers of the released widths.

# make_slice SLICE: its checkpoint in $d/model and its trunk in $d/trunk, made unless they are there. Sets `d`.
make_slice() {
    # Bytes of the slice's files and of its trunk with the head.
    case $1 in
    2) slice_bytes=7800000000 ;;
    3) slice_bytes=14300000000 ;;
    5) slice_bytes=18500000000 ;;
    *) die "SLICE=$1: 2, 3 or 5" ;;
    esac
    d=$WORK/slice-$1
    if [ ! -f "$d/trunk/trunk.json" ]; then
        need_disk "$slice_bytes" "slice $1 and its trunk"
        rm -rf "$d"
        mkdir -p "$d"
        run k3-synth -q slice "$d/model" --slice "$1"
        run k3-pack -q "$d/model" "$d/trunk"
    fi
}

# drop_slice: remove what make_slice made, unless KEEP=1.
drop_slice() {
    if [ -n "${KEEP:-}" ]; then
        say "kept: $d ($(human "$(disk_bytes "$d")"))"
    else
        rm -rf "$d"
    fi
}
