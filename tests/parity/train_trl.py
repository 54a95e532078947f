#!/usr/bin/env python3
"""Trains a fresh adapter on rows that `weact data export` wrote, with TRL's SFTTrainer as it comes, in float32 on the CPU.

usage: train_trl.py MODEL_DIR ROWS.parquet OUT_DIR --steps N --batch-rows B --lr RATE --rank R --alpha A
       needs: pip install -r tests/parity/requirements.txt

TRL takes rows with input_ids and labels as they are: no template, no tokenizer, no packing.
"""

import argparse
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-rows", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--alpha", type=float, required=True)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            train_dataset=Dataset.from_parquet(arguments.rows, cache_dir=work).select_columns(["input_ids", "labels"]),
            peft_config=LoraConfig(
                r=arguments.rank, lora_alpha=arguments.alpha, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM"
            ),
            args=SFTConfig(
                output_dir=work,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch_rows,
                learning_rate=arguments.lr,
                lr_scheduler_type="cosine",
                warmup_steps=5,
                max_length=None,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
        )
        trainer.train()
        trainer.model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
