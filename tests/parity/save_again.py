#!/usr/bin/env python3
"""Loads an adapter in peft and saves it again.

usage: save_again.py MODEL_DIR ADAPTER_DIR OUT_DIR
       needs: pip install -r tests/parity/requirements.txt
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model_dir, adapter_dir, out_dir = sys.argv[1:]
    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    PeftModel.from_pretrained(base, adapter_dir).save_pretrained(out_dir)


if __name__ == "__main__":
    main()
