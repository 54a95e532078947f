#!/usr/bin/env bash
# Checks weact on a machine with a CUDA device and no network, with binaries that were built on one that may have neither device nor
# CUDA.
#
#   tests/gpu.sh --build     here: builds target/gpu and packs it into target/gpu.tar.gz (about twenty minutes on two cores)
#   gpu/run.sh               there: device_check and `weact doctor` in at most six minutes; run.sh is this file
#
# What they say also goes to the folder RESULTS, by default gpu/results. Exit status: 0 if all passed, 1 if not, 2 if the machine
# lacks something.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
limit_s=360

needs() {
    cat <<'NEEDS'
A machine that runs this needs
- an NVIDIA device and its driver: libcuda.so.1 where the loader finds it
- NVRTC of CUDA 13 or 12, which compiles the kernels: libnvrtc.so.13 or .12, from the CUDA toolkit's lib64 or the Python package
  nvidia-cuda-nvrtc; name its folder in LD_LIBRARY_PATH
- CUDA's headers, which the kernels include: cuda_fp16.h and cuda_bf16.h in $CUDA_PATH/include, by default /usr/local/cuda, from the
  same toolkit or the Python package nvidia-cuda-runtime
- x86-64 and a C library no older than the one of the machine that built this
NEEDS
}

build() {
    cd "$here/.."
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
    # Where cudarc finds no nvcc it takes the newest CUDA that it knows, whose calls an older driver lacks.
    export CUDARC_CUDA_VERSION=${CUDARC_CUDA_VERSION:-13000}
    .ci/cuda/check.sh build --bin weact --example device_check
    local release=$CARGO_TARGET_DIR/release folder=$CARGO_TARGET_DIR/gpu golden
    rm -rf "$folder" "$folder.tar.gz"
    mkdir -p "$folder/golden"
    strip -o "$folder/weact" "$release/weact"
    strip -o "$folder/device_check" "$release/examples/device_check"
    for golden in weact-core/tests/golden/*/golden.safetensors; do
        cp -r "$(dirname "$golden")" "$folder/golden"
    done
    cp "$here/gpu.sh" "$folder/run.sh"
    tar -C "$CARGO_TARGET_DIR" -czf "$folder.tar.gz" gpu
    du -h "$folder.tar.gz"
    echo "There: tar -xzf gpu.tar.gz && gpu/run.sh"
    echo "$release/weact is now the build with CUDA, until the next cargo build."
    needs
}

# The folder of the first of these libraries that the loader or a usual place has; empty if none does.
folder_of() { # NAME ...
    local name folder
    local -a folders
    IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
    folders+=("${CUDA_PATH:-/usr/local/cuda}/lib64" /usr/local/cuda/lib64 /opt/cuda/lib64 /usr/local/nvidia/lib64)
    for name in "$@"; do
        for folder in "${folders[@]}"; do
            if [ -n "$folder" ] && [ -e "$folder/$name" ]; then
                echo "$folder"
                return
            fi
        done
        folder=$( (ldconfig -p 2>/dev/null || true) | awk -v name="$name" '$1 == name { print $NF; exit }')
        if [ -n "$folder" ]; then
            dirname "$folder"
            return
        fi
    done
}

lacks() { # WHAT
    echo "missing: $1" >&2
    needs >&2
    exit 2
}

# Checks what the machine has and tells the loader where.
prepare() {
    local cuda nvrtc
    [ -x "$here/device_check" ] && [ -x "$here/weact" ] || lacks "the binaries: build them with tests/gpu.sh --build"
    [ "$(uname -m)" = x86_64 ] || lacks "an x86-64 processor"
    "$here/device_check" --help >/dev/null || lacks "what device_check needs to start (said above)"
    cuda=$(folder_of libcuda.so.1 libcuda.so)
    [ -n "$cuda" ] || lacks "libcuda.so.1, the driver"
    nvrtc=$(folder_of libnvrtc.so libnvrtc.so.13 libnvrtc.so.12)
    [ -n "$nvrtc" ] || lacks "libnvrtc"
    export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}
    [ -e "$CUDA_PATH/include/cuda_bf16.h" ] || lacks "$CUDA_PATH/include/cuda_bf16.h"
    export LD_LIBRARY_PATH=$cuda:$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    echo "libcuda: $cuda, libnvrtc: $nvrtc, headers: $CUDA_PATH/include"
    if command -v nvidia-smi >/dev/null; then nvidia-smi -L; fi
}

# Runs a command for at most so many seconds. Data goes to a file, the rest to the terminal and another; its status to `status`.
limited() { # SECONDS NAME COMMAND [ARG ...]
    local seconds=$1 name=$2
    shift 2
    status=0
    timeout --kill-after=5 "$seconds" "$@" 2>&1 >"$results/$name.out" | tee "$results/$name.log" || status=$?
    case $status in
        0) summary+=("$name: passed") ;;
        124 | 137) summary+=("$name: stopped after $seconds s") ;;
        *) summary+=("$name: failed, status $status") ;;
    esac
}

check() {
    results=${RESULTS:-$here/results}
    mkdir -p "$results"
    results=$(cd "$results" && pwd)
    prepare
    cd "$here"
    summary=()
    local failed=0
    # It ends by itself after 280 s and says what it did not reach.
    limited 290 device_check ./device_check --device cuda --golden golden --seconds 280
    [ "$status" -eq 0 ] || failed=1
    limited $((limit_s - SECONDS - 5)) doctor ./weact doctor --device cuda
    [ "$status" -eq 0 ] || failed=1
    cat "$results/doctor.out"
    printf '%s\n' "" "${summary[@]}" "$SECONDS s; results in $results"
    return "$failed"
}

case ${1:-} in
    --build) build ;;
    "") check ;;
    *)
        echo "usage: gpu.sh [--build]" >&2
        exit 2
        ;;
esac
