#!/bin/sh
# Compile every tool.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

command -v "$CARGO" >/dev/null 2>&1 || die "$CARGO: not found; install Rust from https://rustup.rs"
case $PROFILE in
release) run "$CARGO" build --release --workspace --bins --locked ;;
debug) run "$CARGO" build --workspace --bins --locked ;;
*) die "PROFILE=$PROFILE: release or debug" ;;
esac
