#!/usr/bin/env python3
"""One job on PyTorch's side, driven by compare.py over stdin and stdout.

usage: torch_worker.py JOB MODEL_DIR [ADAPTER_DIR]
       needs: pip install -r benches/versus/requirements.txt

JOB is lora-BxS or full-BxS (one training step on B rows of S tokens), prefill-N, or decode-N (N tokens after a prompt of 64).
Each line `go` is answered by {"s": seconds, "loss": number or null, "tokens": chosen ids or null}; `end` by the largest
resident memory before the model is loaded, after that, and at the end, and by the versions. worker.rs is the same in Rust.

What PyTorch gets: float32, every core, transformers' default attention (sdpa), AdamW with fused=True (the quickest of its three
forms here), no checkpointing of activations, inference_mode and a DynamicCache.
"""

import json
import os
import sys
import time
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

PROMPT = 64


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    job, model_dir, *adapter_dir = sys.argv[1:]
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    kind, size = job.split("-")
    if kind == "lora":
        import peft  # only here, so that the other jobs don't pay for its memory

        versions["peft"] = peft.__version__
    start_bytes = peak_bytes()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    if kind in ("lora", "full"):
        rows, length = map(int, size.split("x"))
        if kind == "lora":
            model = peft.PeftModel.from_pretrained(model, adapter_dir[0], is_trainable=True)
        step = training(model, token_ids(model, rows, length))
    elif kind == "prefill":
        step = prefill(model.eval(), token_ids(model, 1, int(size)))
    elif kind in ("decode", "decodebf16"):
        step = decode(model.eval(), token_ids(model, 1, PROMPT), int(size))
    else:
        sys.exit(f"unknown job {job}")

    load_peak_bytes = peak_bytes()
    for line in sys.stdin:
        if line.strip() == "end":
            peaks = {"start_bytes": start_bytes, "load_peak_bytes": load_peak_bytes, "peak_bytes": peak_bytes()}
            answer({**peaks, "versions": versions})
            return
        answer(step())


def token_ids(model, rows, length):
    """The same ids on both sides, `[rows, length]`."""
    vocab = model.config.vocab_size
    return torch.tensor([(i * 7919 + 13) % vocab for i in range(rows * length)]).reshape(rows, length)


def training(model, ids):
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [  # matrices decay, norms and biases don't
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def step():
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        loss = loss.item()
        return {"s": time.perf_counter() - begun, "loss": loss, "tokens": None}

    return step


@torch.inference_mode()
def last_token(model, ids, cache):
    """The most likely next id, `[1, 1]`, once `cache` holds `ids` too."""
    logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits  # [1, 1, vocab]
    return logits.argmax(-1)


def prefill(model, ids):
    def step():
        begun = time.perf_counter()
        token = last_token(model, ids, DynamicCache(config=model.config)).item()
        return {"s": time.perf_counter() - begun, "loss": None, "tokens": [token]}

    return step


def decode(model, prompt, n_steps):
    def step():
        cache = DynamicCache(config=model.config)
        token = last_token(model, prompt, cache)
        tokens = []
        begun = time.perf_counter()
        for _ in range(n_steps):
            token = last_token(model, token, cache)
            tokens.append(token.item())
        return {"s": time.perf_counter() - begun, "loss": None, "tokens": tokens}

    return step


def peak_bytes():
    """The largest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def answer(fields):
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
