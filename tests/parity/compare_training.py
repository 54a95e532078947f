#!/usr/bin/env python3
"""Compares two trainings of one adapter on the same rows: weact's run and train_parquet.py's.

usage: compare_training.py START_DIR WEACT_RUN_DIR PEFT_DIR PEFT_LOSSES.jsonl
       needs: pip install -r tests/parity/requirements.txt

Both begin at the adapter in START_DIR. The exit status is 1 if a step's losses differ by more than 1e-4 nats per token, if the
factors are farther from each other than a fiftieth of the way that they went, or if they went nowhere.

Factors can't be equal: at its first steps Adam divides a gradient by its own size, so that where a gradient is zero but for rounding
its sign is chance. The way is over all factors together.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

LOSS_TOLERANCE = 1e-4
WAY_TOLERANCE = 0.02
TENSORS = "adapter_model.safetensors"


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    start, ours, theirs, losses = (Path(argument) for argument in sys.argv[1:])
    ok = compare_losses(steps(ours / "log.jsonl"), steps(losses))
    ok &= compare_factors(*(load_file(folder / TENSORS) for folder in (start, ours, theirs)))
    sys.exit(0 if ok else 1)


def steps(path):
    """The loss of each step in a file of events."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if "loss" in event and event.get("event", "step") == "step"}


def compare_losses(ours, theirs):
    if not ours or ours.keys() != theirs.keys():
        print(f"losses of the steps {sorted(ours)} and {sorted(theirs)}")
        return False
    worst = max(abs(ours[step] - theirs[step]) for step in ours)
    print(f"losses of {len(ours)} steps: max |difference| {worst:.3e} nats per token (tolerance {LOSS_TOLERANCE})")
    return worst <= LOSS_TOLERANCE


def compare_factors(start, ours, theirs):
    if not start.keys() == ours.keys() == theirs.keys():
        print("the adapters have different tensors")
        return False
    way = norm(start, ours)
    apart = norm(ours, theirs)
    print(f"factors went {way:.3e} and are {apart:.3e} apart, a share of {apart / way:.3e} (tolerance {WAY_TOLERANCE})")
    return way > 0 and apart <= WAY_TOLERANCE * way


def norm(one, other):
    return torch.sqrt(sum(((one[name] - other[name]) ** 2).sum() for name in one)).item()


if __name__ == "__main__":
    main()
