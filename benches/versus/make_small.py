#!/usr/bin/env python3
"""Makes what both sides load: a random model of four layers, and an adapter for a model. The same numbers every time.

usage: make_small.py model OUT
       make_small.py adapter MODEL_DIR OUT
       needs: pip install -r benches/versus/requirements.txt
"""

import os
import shutil
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

SEED = 1
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    logging.disable_progress_bar()
    match sys.argv[1:]:
        case ["model", out]:
            made = make_model()
        case ["adapter", model_dir, out]:
            made = make_adapter(model_dir)
        case _:
            sys.exit(__doc__)
    unfinished = f"{out}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    made.save_pretrained(unfinished)
    os.rename(unfinished, out)


def make_model():
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(config).float()


def make_adapter(model_dir):
    """B is not zero as in a fresh adapter: with B = 0 the gradient of A is zero, and a fault in it would not show."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    torch.manual_seed(SEED)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.02)
    return model


if __name__ == "__main__":
    main()
