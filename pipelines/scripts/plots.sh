#!/bin/sh
# Tables and pictures of the rows that ladders wrote.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

ROWS=${ROWS#"$root"/}
PLOTS=${PLOTS#"$root"/}
set -- "$ROWS"/*.jsonl
[ -f "$1" ] || die "$ROWS: no rows; make -C pipelines ladder writes some"
run k3-rows table "$@"
run k3-rows plot "$ROWS" "$PLOTS"
