#!/usr/bin/env bash
# Build an image: build.sh cpu|cpu-arm64|cuda|rocm|rocm-laif [OPTION OF apptainer build ...]   (make image VARIANT=...)
#
# A later --build-arg wins over the variant's: `build.sh rocm-laif --build-arg BASE=newer.sif`. OUT names the file.
# SingularityCE without user namespaces (LUMI) builds through PRoot, if it is on the PATH: `module load CrayEnv PRoot`.
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:-}
arguments=containers/variants/$variant.args
if [ -z "$variant" ] || [ ! -f "$arguments" ]; then
    echo "build.sh: no variant ${variant:-named}: cpu, cpu-arm64, cuda, rocm or rocm-laif" >&2 && exit 2
fi
shift
runtime=$(command -v apptainer || command -v singularity) ||
    { echo "build.sh: neither apptainer nor singularity is installed" >&2 && exit 2; }
rootless=(--fakeroot)
if [ "$(basename "$runtime")" = singularity ] && command -v proot >/dev/null; then rootless=(); fi

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
"$runtime" build "${rootless[@]}" --build-arg-file "$arguments" --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" "$@" "${OUT:-vitruvian-$variant.sif}" containers/vitruvian.def
