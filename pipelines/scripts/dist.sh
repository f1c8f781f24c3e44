#!/bin/sh
# A tarball to unpack in a prefix such as /usr/local: tools, manual pages, completions, licence, README.
cd "$(dirname "$0")/../.." || exit 2
. pipelines/scripts/lib.sh

tools='k3-census k3-pack k3-plan k3-run k3-simcache'
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | sed 1q)
name=k3-$version-$(uname -m)-linux
DIST=${DIST#"$root"/}

need_disk 300000000 'the tarball'
w=$WORK/dist-tree
rm -rf "$w"
mkdir -p "$w/$name/bin" "$w/$name/share/doc/k3" "$DIST"
for tool in $tools; do cp "$bin_dir/$tool" "$w/$name/bin/"; done
cp LICENSE README.md "$w/$name/share/doc/k3/"
# The pages of the tools that were just built: the same profile, so that nothing is compiled twice.
case $PROFILE in
release) set -- --release ;;
*) set -- ;;
esac
run "$CARGO" run -q "$@" --locked -p k3-tests --example pages -- "$w/$name"
for tool in $tools; do
    [ -s "$w/$name/share/man/man1/$tool.1" ] || fail "$tool: no manual page in $w"
done

# The same tree gives the same bytes: names in order, no owner, the time of the last commit.
when=$(git log -1 --format=%ct 2>/dev/null || say 0)
tarball=$DIST/$name.tar.gz
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$when" -C "$w" -cf - "$name" | gzip -n9 >"$tarball.partial"
mv "$tarball.partial" "$tarball"
# What was packed runs from where it is unpacked.
rm -rf "$w"
mkdir "$w"
tar -xzf "$tarball" -C "$w" --strip-components=1
for tool in $tools; do run "$w/bin/$tool" --version; done
rm -rf "$w"
(cd "$DIST" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
tar -tzf "$tarball" | grep -v '/$'
say ''
say "$tarball: $(human "$(wc -c <"$tarball")")"
say "Install: tar -xzf $tarball -C /usr/local --strip-components=1"
