#!/usr/bin/env bash
# Trains two steps with `weact` on tiny random models and compares the adapter's logits with torch's and peft's.
# usage: .ci/parity.sh      needs: .venv with tests/parity/requirements.txt, and `cargo build --release`
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
weact=${CARGO_TARGET_DIR:-target}/release/weact
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

"$weact" data import --from hermes datasets/webdancer/sample_traj.jsonl --out "$out/imported.jsonl" --quiet
"$weact" data label "$out/imported.jsonl" --weave --out "$out/train.jsonl" --quiet

for family in qwen3 qwen2 llama; do
    echo "$family"
    model=$out/$family
    run=$out/$family-search
    "$python" tests/parity/make_tiny.py "$family" "$model"
    cat > "$run.toml" <<TOML
kind = "lora"
model = "$model"
data = ["$out/train.jsonl"]
capability = "search"
out = "$run"

[lora]
rank = 4
alpha = 8

[train]
steps = 2
batch_rows = 1
max_length = 2048
max_lost = 0.1
lr = 0.01
seed = 1
dtype = "f32"

[context]
clip_tool_result = 128
tool_protocol = "text"
TOML
    "$weact" train "$run.toml" --quiet
    score() { "$weact" score --model "$model" --input "$model/rows.jsonl" --dtype f32 --quiet "$@"; }
    score --out "$out/base.jsonl" --logits "$out/base.safetensors"
    score --out "$out/adapter.jsonl" --logits "$out/adapter.safetensors" --adapter "$run"
    "$python" tests/parity/check_adapter.py "$model" "$run" "$out/adapter.safetensors" "$model/rows.jsonl" "$out/base.safetensors"
done
