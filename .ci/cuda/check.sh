#!/usr/bin/env bash
# Type-checks the feature `cuda` on a machine that has no CUDA and can't download the LLVM bundle of burn's CUDA backend.
# usage: .ci/cuda/check.sh [CARGO_SUBCOMMAND [ARG ...]]     default: check; `build` gives a binary that compiles its kernels by NVRTC
#
# The stub replaces cubecl-llvm by a patch on cargo's command line. A patch rewrites Cargo.lock, so this works on a copy of the tree.
# The copy has a fixed place below the target folder: a new path each time would make cargo check burn anew each time.
set -euo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$top/target}
mkdir -p "$CARGO_TARGET_DIR"
copy=$(cd "$CARGO_TARGET_DIR" && pwd)/cuda-tree

[ $# -gt 0 ] || set -- check
rm -rf "$copy"
mkdir -p "$copy"
cd "$top"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --null --files-from - --create | tar --extract --directory "$copy"

cd "$copy"
cargo "$@" --release --features cuda --config 'patch.crates-io.cubecl-llvm.path=".ci/cuda/cubecl-llvm-stub"'
