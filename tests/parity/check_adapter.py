#!/usr/bin/env python3
"""Compares logits that `weact score --logits` wrote with those of transformers and peft in float32 on the CPU.

usage: check_adapter.py MODEL_DIR ADAPTER_DIR SCORES.safetensors INPUT.jsonl [BASE_SCORES.safetensors]
       needs: pip install -r tests/parity/requirements.txt

INPUT.jsonl is what `weact score` read: one {"id", "ids": [..]} a line. SCORES holds one tensor [n, vocab] float32 per id, computed
with the adapter; BASE_SCORES the same without it. The exit status is 1 if a logit differs by more than 1e-4, if an id is missing or
left over, or if the adapter moves no logit by more than that, because the comparison would then show nothing.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

TOLERANCE = 1e-4


def main():
    if len(sys.argv) not in (5, 6):
        sys.exit(__doc__)
    model_dir, adapter_dir, scores, rows = sys.argv[1:5]
    rows = read_rows(rows)
    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    without = logits(base, rows)
    adapted = logits(PeftModel.from_pretrained(base, adapter_dir).eval(), rows)

    ok = compare("with the adapter", adapted, load_file(scores))
    if len(sys.argv) == 6:
        ok &= compare("without the adapter", without, load_file(sys.argv[5]))
    effect = max((adapted[name] - without[name]).abs().max().item() for name in rows)
    print(f"effect of the adapter: {effect:.3e}")
    if effect <= TOLERANCE:
        print(f"the adapter moves no logit by more than {TOLERANCE}: train it longer or with a larger rate")
        ok = False
    sys.exit(0 if ok else 1)


def read_rows(path):
    """Row id -> token ids."""
    rows = {}
    for line in Path(path).read_text().splitlines():
        if line.strip():
            row = json.loads(line)
            rows[row["id"]] = row["ids"]
    if not rows:
        sys.exit(f"{path}: no rows")
    return rows


@torch.no_grad()
def logits(model, rows):
    """Row id -> [n, vocab] float32."""
    return {name: model(torch.tensor([ids])).logits[0].float() for name, ids in rows.items()}


def compare(what, expected, found):
    """Prints the largest difference and says whether it is within the tolerance."""
    if expected.keys() != found.keys():
        print(f"{what}: expected the ids {sorted(expected)}, found {sorted(found)}")
        return False
    worst = 0.0
    for name, reference in expected.items():
        if found[name].shape != reference.shape or found[name].dtype != torch.float32:
            print(f"{what}: {name} is {found[name].dtype} {list(found[name].shape)}, expected {list(reference.shape)}")
            return False
        difference = (found[name] - reference).abs().max().item()
        worst = difference if difference != difference else max(worst, difference)  # a NaN stays
    n_tokens = sum(len(reference) for reference in expected.values())
    print(f"{what}: max |difference| {worst:.3e} over {n_tokens} tokens (tolerance {TOLERANCE})")
    return worst <= TOLERANCE


if __name__ == "__main__":
    main()
