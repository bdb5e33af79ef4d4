#!/usr/bin/env bash
# Resolve the packages of the images and write their hashes: lock.sh [cpu|cpu-arm64|cuda|rocm ...]   (needs uv; `make locks`)
# Each lock is for one Python, that of the base image, and has one torch, or none where the base image brings its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-uv}
EXTRAS=(train lora zstd trackers data eval plot)
read -ra cpu_index <<<"${CPU_INDEX:---extra-index-url https://download.pytorch.org/whl/cpu}"

lock() { # NAME PYTHON OVERRIDE [OPTION OF UV ...]
    local work name=$1 python=$2 override=$3 extras=()
    shift 3
    work=$(mktemp -d)
    grep -v '^torch==' constraints.txt >"$work/constraints"
    echo "$override" >"$work/override"
    echo "setuptools>=77,<85" >"$work/build.in" # builds our own wheel
    for extra in "${EXTRAS[@]}"; do extras+=(--extra "$extra"); done
    "$UV" pip compile --quiet --no-header --no-annotate --generate-hashes --only-binary :all: --no-binary rouge-score --no-binary deepspeed --python-version "$python" \
        --python-platform "$platform" --constraint "$work/constraints" --override "$work/override" "$@" \
        "${extras[@]}" pyproject.toml "$work/build.in" --output-file "containers/locks/$name.txt"
    rm -r "$work"
}

[ $# -gt 0 ] || set -- cpu cpu-arm64 cuda rocm
for name in "$@"; do
    platform=x86_64-manylinux_2_28
    case $name in
        # 2.10.0 is the last torch of the package index that is built for ARM64 without CUDA.
        cpu-arm64) platform=aarch64-manylinux_2_28 && lock cpu-arm64 3.11 'torch==2.10.0' ;;
        # Leonardo's driver is of CUDA 12: 2.10.0 is the last torch that the package index has for it.
        cuda) lock cuda 3.11 'torch==2.10.0' --extra liger ;;
        cpu) lock cpu 3.11 'torch==2.13.0+cpu' --index-strategy unsafe-best-match "${cpu_index[@]}" ;;
        # The base image brings torch and what torch needs for the GPU.
        rocm) lock rocm 3.12 "torch ; python_version < '3'" ;;
        *) echo "lock.sh: no lock $name: cpu, cpu-arm64, cuda or rocm" >&2 && exit 2 ;;
    esac
done
