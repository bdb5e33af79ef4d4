#!/usr/bin/env bash
# Make a small Debian with Python as one squashfs file, for builds where no registry of images is reached:
# make_base.sh OUT.sqsh [FOLDER ...]   (root; mmdebstrap, squashfs-tools)
#
# A definition takes it with BOOTSTRAP=localimage, BASE=OUT.sqsh. FOLDERs are made in it: a bind needs an existing place.
# DEBIAN_MIRROR: a Debian archive (the one that apt uses).
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: make_base.sh OUT.sqsh [FOLDER ...]" >&2 && exit 2; }
out=$(realpath -m "$1")
shift
# shellcheck disable=SC2016  # apt fills in REPO_URI
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | sed -n 1p)}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mmdebstrap --quiet --variant=apt --include=python3-minimal,python3-venv,ca-certificates bookworm "$tree/root" "$mirror"
for folder in "$@"; do mkdir -p "$tree/root$folder"; done
rm -f "$out"
# Without /dev: a build without root cannot make device nodes. -e is last, as it takes every word that follows.
mksquashfs "$tree/root" "$out" -all-root -no-xattrs -comp zstd -Xcompression-level 3 -no-progress -quiet -e dev
