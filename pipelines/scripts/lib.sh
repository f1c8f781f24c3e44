# shellcheck shell=sh
# What the pipelines share. Sourced with the repository as the current folder.

set -eu

# Commands are echoed as they would be typed at the top of the repository, so paths below it lose their prefix.
root=$(pwd)
case ${WORK:=pipelines/work} in
"$root"/*) WORK=${WORK#"$root"/} ;;
esac
case ${CARGO_TARGET_DIR:=target} in
"$root"/*) CARGO_TARGET_DIR=${CARGO_TARGET_DIR#"$root"/} ;;
esac
bin_dir=$CARGO_TARGET_DIR/${PROFILE:=release}
case $bin_dir in
/*) PATH=$bin_dir:$PATH ;;
*) PATH=$root/$bin_dir:$PATH ;;
esac
export PATH

say() {
    printf '%s\n' "$*"
}

# A usage or environment error.
die() {
    printf 'pipelines: %s\n' "$*" >&2
    exit 2
}

# The answer is no.
fail() {
    printf 'pipelines: FAIL: %s\n' "$*" >&2
    exit 1
}

title() {
    printf '\n== %s\n' "$*"
}

# A word as a shell needs it.
shell_word() {
    case $1 in
    *[!A-Za-z0-9_./,=:+-]* | '') printf "'%s'\n" "$(printf '%s\n' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s\n' "$1" ;;
    esac
}

# Echo a command, quoted where a shell needs it.
show() {
    printf '$'
    for word in "$@"; do
        printf ' %s' "$(shell_word "$word")"
    done
    printf '\n'
}

# Echo a command and run it.
run() {
    show "$@"
    "$@"
}

# Bytes free for us on the file system of a folder.
free_bytes() {
    df -Pk "$1" | awk 'NR == 2 { printf "%.0f\n", $4 * 1024 }'
}

# 108811877376 as 108.81 GB.
human() {
    awk -v n="$1" 'BEGIN {
        split("B kB MB GB TB", unit)
        for (u = 1; n >= 1000 && u < 5; u++) n /= 1000
        printf (u == 1 ? "%d %s\n" : "%.2f %s\n"), n, unit[u]
    }'
}

# need_disk BYTES WHAT: claim WORK, and refuse before writing what does not fit.
#
# Folders in WORK are removed without asking, so it must be new, empty or ours.
need_disk() {
    if [ ! -f "$WORK/.k3-pipelines" ]; then
        [ -z "$(ls -A "$WORK" 2>/dev/null)" ] || die "$WORK: holds files of others; give an empty folder as WORK"
        mkdir -p "$WORK"
        : >"$WORK/.k3-pipelines"
    fi
    free=$(free_bytes "$WORK")
    if awk -v f="$free" -v n="$1" 'BEGIN { exit !(f < n) }'; then
        die "$WORK: $2 needs $(human "$1") of disk, $(human "$free") are free; free some or give WORK=DIR on another disk"
    fi
    say "$2: needs up to $(human "$1") of disk; $(human "$free") are free"
}

# Bytes on disk of a folder, holes not counted.
disk_bytes() {
    du -sk "$1" | awk '{ printf "%.0f\n", $1 * 1024 }'
}

newline='
'

# Numbers under a key, in the file's order. Our JSON has one member a line.
json_numbers() {
    values=$(sed -n 's/^ *"'"$2"'": *\([0-9][0-9.e+-]*\),\{0,1\}$/\1/p' "$1")
    [ -n "$values" ] || die "$1: no number \"$2\""
    say "$values"
}

# json_number FILE KEY: the first number under this key, the outermost where the key is also in a nested list.
json_number() {
    values=$(json_numbers "$1" "$2")
    say "${values%%"$newline"*}"
}

# json_total FILE KEY: the last; in a report of k3-run, "totals" follow the steps.
json_total() {
    values=$(json_numbers "$1" "$2")
    say "${values##*"$newline"}"
}

# median: of the numbers on standard input, one a line.
median() {
    sort -g | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int((NR + 2) / 2)]) / 2 }'
}
