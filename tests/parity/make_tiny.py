#!/usr/bin/env python3
"""Makes a random two-layer model with SmolLM2's tokenizer, and a few rows of ids to score.

usage: make_tiny.py qwen3|qwen2|llama OUT_DIR          needs: pip install -r tests/parity/requirements.txt

The families differ where loaders go wrong: qwen3 has a head_dim that is not hidden / heads and ties its head to the embedding, qwen2
has biases on q, k and v and a head of its own, llama has neither.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

TOKENIZER = Path(__file__).resolve().parents[2] / "datasets" / "smollm2-135m"
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
}


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in FAMILIES:
        sys.exit(__doc__)
    model_class, config_class, extra = FAMILIES[sys.argv[1]]
    out = Path(sys.argv[2])
    torch.manual_seed(1)
    model = model_class(config_class(**SHAPE, **extra)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.12)
            else:
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(out)
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        shutil.copyfile(TOKENIZER / name, out / name)
    with open(out / "rows.jsonl", "w") as rows:
        for n_ids in [2, 7, 40]:
            ids = torch.randint(3, SHAPE["vocab_size"], (n_ids,)).tolist()
            rows.write(json.dumps({"id": f"row-{n_ids}", "ids": ids}) + "\n")


if __name__ == "__main__":
    main()
