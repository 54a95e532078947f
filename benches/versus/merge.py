#!/usr/bin/env python3
"""TIES at rank 64 of three adapters (ranks 32, 64, 32) on the projections of Qwen3-0.6B, by `weact merge` and by PEFT's ties_svd, one
after the other on the same files. Prints seconds, peak memory and the Frobenius distance of each result to the merged update.

usage: run.sh merge [--layers 28] [--check-layers 3] [--weact target/release/weact] [--out FILE.json]

The adapters are random; the base is a random model with the blocks of Qwen3-0.6B and a small vocabulary, which only PEFT has to
load. Each side runs in a process of its own: ours whole (reading, merging, writing), PEFT's seconds are those of
add_weighted_adapter alone, without loading. The exact truncation is LAPACK's in float64, on the layers that are checked. The exit
status is 1 if our distance is more than 0.1 % above the exact one anywhere.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MADE = ROOT / "target" / "versus"
RANKS = {"plan": (32, 64), "search": (64, 64), "write": (32, 96)}  # rank, alpha
RANK, DENSITY = 64, 0.2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    parser = argparse.ArgumentParser(prog="run.sh merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="blocks of the model (28)")
    parser.add_argument("--check-layers", type=int, default=3, help="layers whose distances are compared (3)")
    parser.add_argument("--weact", type=Path, default=ROOT / "target" / "release" / "weact", help="the binary, already built")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where every number goes")
    parser.add_argument("--side", choices=["make", "peft", "check"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = MADE / f"merge-{arguments.layers}"
    if arguments.side == "make":
        return make(folder, arguments.layers)
    if arguments.side == "peft":
        return peft_side(folder)
    if arguments.side == "check":
        return check(folder, arguments.layers, arguments.check_layers)

    if not (folder / "write").exists():
        measured(arguments, "make")
    adapters = [str(folder / name) for name in RANKS]
    merge = ["merge", "--method", "ties", "--rank", str(RANK), "--density", str(DENSITY), "--overwrite", "--quiet", "--out"]
    ours = run([arguments.weact, *merge, folder / "weact", *adapters])
    theirs = measured(arguments, "peft")
    theirs["s"] = json.loads((folder / "peft.json").read_text())["s"]
    measured(arguments, "check")
    errors = json.loads((folder / "errors.json").read_text())
    report = {"layers": arguments.layers, "cores": os.cpu_count(), "weact": ours, "peft": theirs, "errors": errors}
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    worst = max(row["weact"] / row["exact"] for row in errors)
    print("| | s | peak GiB | distance to the merged update, over the exact truncation's |\n| --- | --- | --- | --- |")
    for name, side in (("weact", ours), ("peft", theirs)):
        ratios = [row[name] / row["exact"] for row in errors]
        print(f"| {name} | {side['s']:.1f} | {side['peak_bytes'] / 2**30:.2f} | {min(ratios):.6f} to {max(ratios):.6f} |")
    speed, memory = theirs["s"] / ours["s"], ours["peak_bytes"] / theirs["peak_bytes"]
    print(f"\n{speed:.1f} times as fast, {100 * memory:.0f} % of the memory; {len(errors)} modules compared")
    sys.exit(worst > 1.001)


def measured(arguments, side):
    return run([sys.executable, __file__, "--side", side, "--layers", arguments.layers, "--check-layers", arguments.check_layers])


def run(command):
    """Seconds and the largest resident memory of one process."""
    start = time.perf_counter()
    child = subprocess.Popen([str(part) for part in command], stderr=sys.stderr)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return {"s": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}


def make(folder, layers):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    base = Qwen3ForCausalLM(config)
    base.save_pretrained(folder / "base")
    for name, (rank, alpha) in RANKS.items():
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, task_type="CAUSAL_LM"))
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if "lora_B" in parameter:
                    weight.normal_(0.0, 0.02)
        model.save_pretrained(folder / name)
        base = model.unload()


def peft_side(folder):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count())
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    first, *others = RANKS
    model = PeftModel.from_pretrained(base, folder / first, adapter_name=first)
    for name in others:
        model.load_adapter(folder / name, adapter_name=name)
    start = time.perf_counter()
    model.add_weighted_adapter(
        list(RANKS), [1.0] * len(RANKS), "peft", combination_type="ties_svd", svd_rank=RANK, density=DENSITY,
    )
    (folder / "peft.json").write_text(json.dumps({"s": time.perf_counter() - start}))
    model.save_pretrained(folder / "merged", selected_adapters=["peft"])


def check(folder, layers, n_layers):
    import torch
    from peft.utils.merge_utils import ties
    from safetensors import safe_open

    files = {name: safe_open(folder / name / "adapter_model.safetensors", "pt") for name in RANKS}
    results = {
        "weact": safe_open(folder / "weact" / "adapter_model.safetensors", "pt"),
        "peft": safe_open(folder / "merged" / "peft" / "adapter_model.safetensors", "pt"),
    }
    checked = sorted({round(i * (layers - 1) / max(n_layers - 1, 1)) for i in range(n_layers)})
    errors = []
    for key in sorted(k for k in files["plan"].keys() if "lora_A" in k and int(k.split("layers.")[1].split(".")[0]) in checked):
        product = lambda file: file.get_tensor(key.replace("lora_A", "lora_B")) @ file.get_tensor(key)  # noqa: E731
        updates = [product(files[name]) * (alpha / rank) for name, (rank, alpha) in RANKS.items()]
        merged = ties(updates, torch.ones(len(updates)), DENSITY)
        singular = torch.linalg.svdvals(merged.double())
        row = {"module": key.split(".lora_A")[0], "exact": singular[RANK:].square().sum().sqrt().item()}
        row |= {name: (merged - product(file)).double().norm().item() for name, file in results.items()}
        errors.append(row)
    (folder / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
