#!/usr/bin/env python3
"""Trains an adapter on rows that `weact data export` wrote, with transformers and peft alone, in float32 on the CPU.

usage: train_parquet.py MODEL_DIR ROWS.parquet OUT_DIR --steps N --batch-rows B --lr RATE [--adapter DIR | --rank R --alpha A]
       needs: pip install -r tests/parity/requirements.txt

An update is weact's: the sum of the supervised tokens' losses divided by their number in the whole batch, gradients clipped to a
norm of 1, AdamW without weight decay at a constant rate. Rows are padded on the right and masked, a few at a time. It begins at the
adapter in DIR, or at a fresh one on the seven projections of a block. Prints one {"step", "loss", "n_tokens"} a line, in nats per
supervised token.
"""

import argparse
import json
import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers

import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100
MICRO_TOKENS = 2048  # padded ones, computed at a time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-rows", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--adapter", help="where to begin")
    parser.add_argument("--rank", type=int, default=16, help="of a fresh adapter")
    parser.add_argument("--alpha", type=float, default=32, help="of a fresh adapter")
    arguments = parser.parse_args()

    logging.disable_progress_bar()
    torch.manual_seed(0)
    rows = read_rows(arguments.rows)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="eager")
    if arguments.adapter:
        model = PeftModel.from_pretrained(model, arguments.adapter, is_trainable=True)
    else:
        config = LoraConfig(
            r=arguments.rank, lora_alpha=arguments.alpha, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    batches = shuffled(rows, arguments.batch_rows)
    for step in range(1, arguments.steps + 1):
        loss, n_tokens = update(model, next(batches), trained, optimizer)
        print(json.dumps({"step": step, "loss": loss, "n_tokens": n_tokens}), flush=True)
    model.save_pretrained(arguments.out)


def read_rows(path):
    """(ids, labels) of each row."""
    table = pyarrow.parquet.read_table(path).to_pydict()
    rows = list(zip(table["input_ids"], table["labels"]))
    for ids, labels in rows:
        if len(ids) != len(labels) or any(label not in (IGNORED, token) for token, label in zip(ids, labels)):
            sys.exit(f"{path}: a row's labels are not its ids")
    return rows


def shuffled(rows, batch_rows):
    """Batches without end; each epoch has every row once, in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(rows), batch_rows):
            yield [rows[i] for i in order[start : start + batch_rows]]


def update(model, batch, trained, optimizer):
    """One step of the optimizer; the loss before it, and the tokens that count."""
    n_tokens = sum(label != IGNORED for _, labels in batch for label in labels[1:])
    total = 0.0
    for part in parts(sorted(batch, key=lambda row: len(row[0]))):
        width = max(len(ids) for ids, _ in part)
        padded = [(ids + [0] * (width - len(ids)), labels + [IGNORED] * (width - len(labels))) for ids, labels in part]
        ids, labels = (torch.tensor(column) for column in zip(*padded))
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in part])
        causal = model.get_base_model()
        hidden = causal.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        counts = labels[:, 1:] != IGNORED
        logits = causal.lm_head(hidden[counts])  # only where a token counts
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][counts], reduction="sum")
        (loss / n_tokens).backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total / n_tokens, n_tokens


def parts(rows):
    """Rows, short ones first, in lists of at most MICRO_TOKENS padded tokens or one row."""
    part = []
    for row in rows:
        if part and (len(part) + 1) * len(row[0]) > MICRO_TOKENS:
            yield part
            part = []
        part.append(row)
    yield part


if __name__ == "__main__":
    main()
