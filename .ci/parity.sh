#!/usr/bin/env bash
# Trains two steps with `weact` on tiny random models and compares the adapter's logits with torch's and peft's. Then hands exported
# rows over: peft trains on them from the same adapter to the same losses and factors, TRL trains the toy's search adapter, and both
# results come back. Merged adapters load in peft, and from there here again, with the same logits.
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

echo "qwen3: the same two updates by weact and by peft"
model=$out/qwen3
start=$out/qwen3-search
# One batch of all rows: neither side's order matters then.
cat > "$out/more.toml" <<TOML
kind = "lora"
model = "$model"
data = ["$out/train.jsonl"]
capability = "search"
out = "$out/more"

[lora]
rank = 4
alpha = 8
continue_from = "$start"

[train]
steps = 2
batch_rows = 64
max_length = 1536
max_lost = 0.5
lr = 0.01
schedule = "constant"
warmup = 0

[context]
clip_tool_result = 16
tool_protocol = "text"
TOML
"$weact" train "$out/more.toml" --quiet
"$weact" data export "$out/train.jsonl" --model "$model" --capability search --out "$out/search.parquet" \
    --max-length 1536 --clip-tool-result 16 --tool-protocol text --allow-empty --quiet
"$python" tests/parity/train_parquet.py "$model" "$out/search.parquet" "$out/by-peft" \
    --adapter "$start" --steps 2 --batch-rows 64 --lr 0.01 > "$out/losses.jsonl"
"$python" tests/parity/compare_training.py "$start" "$out/more" "$out/by-peft" "$out/losses.jsonl"
"$weact" inspect "$out/by-peft" --json > "$out/by-peft.json"
"$weact" score --model "$model" --input "$model/rows.jsonl" --out "$out/by-peft.jsonl" --quiet --adapter "$out/by-peft" \
    --logits "$out/by-peft.safetensors"
"$python" tests/parity/check_adapter.py "$model" "$out/by-peft" "$out/by-peft.safetensors" "$model/rows.jsonl"

echo "qwen3: merged adapters in peft, and one saved again by peft"
# Another capability, rank and scale.
sed "s|^capability = .*|capability = \"plan\"|; s|^out = .*|out = \"$out/qwen3-plan\"|; s|^rank = .*|rank = 6|; s|^alpha = .*|alpha = 3|; s|^max_lost = .*|max_lost = 0.2|" \
    "$start.toml" > "$out/plan.toml"
"$weact" train "$out/plan.toml" --quiet
check_merge() { # ADAPTER
    "$weact" score --model "$model" --input "$model/rows.jsonl" --out "$out/merged.jsonl" --quiet --adapter "$1" \
        --logits "$out/merged.safetensors"
    "$python" tests/parity/check_adapter.py "$model" "$1" "$out/merged.safetensors" "$model/rows.jsonl"
}
for method in additive ties dare-ties; do
    "$weact" merge --method "$method" --out "$out/$method" --quiet "$start" "$out/qwen3-plan"
    check_merge "$out/$method"
done
"$python" tests/parity/save_again.py "$model" "$out/ties" "$out/ties-again"
check_merge "$out/ties-again"

echo "toy: search by TRL, run with the shipped plan and write"
toy=datasets/toy
cargo run --quiet --release --example toy_gold -- "$out/gold" 256
"$weact" data export "$out/gold/staged.jsonl" --model "$toy/backbone" --capability search --out "$out/toy.parquet" \
    --max-length 768 --keep-tool-result 16 --quiet
mkdir "$out/adapters"
cp -r "$toy/adapters/plan" "$toy/adapters/write" "$out/adapters/"
search=$out/adapters/search
# One thread: matrices this small are done before others have woken up.
OMP_NUM_THREADS=1 "$python" tests/parity/train_trl.py "$toy/backbone" "$out/toy.parquet" "$search" \
    --steps 60 --batch-rows 16 --lr 5e-3 --rank 16 --alpha 32
cat > "$out/toy.toml" <<TOML
kind = "eval"
out = "$out/toy"

[agent]
system = "research"
max_turns = 20
max_new = 64
keep_tool_result = 16
stage_turns = { plan = 2, search = 12, write = 2 }

[tools]
spec = "world"
world = {}

[[method]]
name = "WeAct-hard"
model = "$toy/backbone"
adapters = "$out/adapters"
policy = "hard"

[[benchmark]]
benchmark = "bamboogle"
file = "$toy/bench/bamboogle/bamboogle.csv"
grader = "world"
limit = 12
TOML
# Without a card it loads under its folder's name, with the texts that stand in for a card's: a warning says so.
"$weact" eval "$out/toy.toml" --quiet 2> "$out/warnings"
grep "search: no card.toml; loaded as search" "$out/warnings"
# With the shipped adapter's texts, which are those of its training data, it answers.
digest=$("$weact" inspect "$search" --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["digest"])')
sed "/^\[training\]/,\$d; s/^digest = .*/digest = \"$digest\"/" "$toy/adapters/search/card.toml" > "$search/card.toml"
"$weact" eval "$out/toy.toml" --quiet --overwrite --json > "$out/scores.json"
"$python" - "$out/scores.json" <<'PYTHON'
import json, sys

score = json.load(open(sys.argv[1]))["scores"][0]
correct = score["states"].get("correct", 0)
print(f"correct with the adapter that TRL trained: {correct} of {score['n']}")
sys.exit(correct == 0)
PYTHON
