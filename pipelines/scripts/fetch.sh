#!/bin/sh
# The checkpoint by the publisher's client, then every byte read and hashed.
#
# The client keeps what it has and goes on from there. The first fetch asks which commit the revision is and keeps the answer beside
# the shards, so that a download of many days cannot mix two revisions. Credentials are the client's own business: none is read,
# passed or printed here.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

MODEL=${MODEL#"$root"/}
pin=$MODEL/k3-fetch
log=$MODEL/.k3-fetch.log

if ! client=$(command -v hf); then
    die "hf: not found. It is the official client of the Hugging Face Hub; install it with
    python3 -m pip install --user 'huggingface_hub>=1.0'
then, once, if the repository asks for it: hf auth login
and again: make -C pipelines fetch MODEL=$(shell_word "$MODEL")"
fi

# hide: standard input without what looks like a token, and without the one that the environment holds. The client's progress bars
# become lines. Line by line in the shell: no other process is told the token.
hide() {
    while IFS= read -r line || [ -n "$line" ]; do
        for secret in "${HF_TOKEN:-}" "${HUGGING_FACE_HUB_TOKEN:-}"; do
            [ -n "$secret" ] || continue
            while :; do
                case $line in
                *"$secret"*) line=${line%%"$secret"*}'(hidden)'${line#*"$secret"} ;;
                *) break ;;
                esac
            done
        done
        printf '%s\n' "$line"
    done | sed -u 's/hf_[A-Za-z0-9]\{8,\}/hf_(hidden)/g; s/\([Bb]earer \)[^ ]*/\1(hidden)/g'
}

# lines: carriage returns as line ends, passed on at once where that can be had.
lines() {
    if command -v stdbuf >/dev/null 2>&1; then stdbuf -oL tr '\r' '\n'; else tr '\r' '\n'; fi
}

# client_run ARGS...: echo and run the client; what it says goes through `hide`. Fails if the client did.
client_run() {
    show hf "$@"
    { "$client" "$@" 2>&1 && printf '0\n' >"$log" || printf '%s\n' $? >"$log"; } </dev/null | lines | hide >&2
    read -r status <"$log"
    rm -f "$log"
    return "$status"
}

# again WHAT: the client failed.
again() {
    fail "$1; what is there is kept. Again: make -C pipelines fetch MODEL=$(shell_word "$MODEL")"
}

# resolve: the commit that REVISION is, by the client's own record of one small file.
resolve() {
    client_run download "$REPO" config.json --revision "${REVISION:-main}" --local-dir "$MODEL" ||
        again "$REPO: the client could not get config.json"
    record=$MODEL/.cache/huggingface/download/config.json.metadata
    commit=$(sed -n '1s/^\([0-9a-f]\{40\}\)$/\1/p' "$record" 2>/dev/null) || commit=
    [ -n "$commit" ] || die "$record: no commit in it; say which: REVISION=commit"
}

mkdir -p "$MODEL"
if [ -f "$pin" ]; then
    read -r repo commit <"$pin"
    [ "$repo" = "$REPO" ] || die "$pin: this folder holds $repo, not $REPO; give another MODEL"
    case $REVISION in
    '' | "$commit") ;;
    *) die "$pin: this folder holds revision $commit, not $REVISION; give another MODEL" ;;
    esac
else
    case $REVISION in
    *[!0-9a-f]* | '') commit= ;;
    *) commit=$REVISION ;;
    esac
    [ "${#commit}" -eq 40 ] || resolve
    printf '%s %s\n' "$REPO" "$commit" >"$pin"
fi
say "$REPO at revision $commit"

# What is still to come, by the published sizes of the shards; others' checkpoints are not measured beforehand.
need=0
if [ "$REPO" = moonshotai/Kimi-K3 ]; then
    need=$(while read -r file bytes; do
        [ -f "$MODEL/$file" ] || printf '%s\n' "$bytes"
    done <manifests/kimi-k3.shard_sizes.txt | awk '{ sum += $1 } END { printf "%.0f\n", sum }')
fi
free=$(free_bytes "$MODEL")
say "to download: $(human "$need"); $(human "$free") are free at $MODEL"
awk -v f="$free" -v n="$need" 'BEGIN { exit !(f >= n) }' ||
    die "$MODEL: $(human "$need") are still to come and $(human "$free") are free; free some, or give a MODEL on another disk"

title 'Download'
client_run download "$REPO" --revision "$commit" --local-dir "$MODEL" || again "$REPO: the download stopped"

title 'Check: every byte of every shard'
run k3-census "$MODEL" --hash -o "$MODEL/k3-census.json" || again "$MODEL: not whole"
say ''
say "Whole. Next: make -C pipelines doctor MODEL=$(shell_word "$MODEL")"
