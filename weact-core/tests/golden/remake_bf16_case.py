"""Remakes golden.safetensors of qwen3-sharded-bf16 from the checkpoint on disk.

usage: remake_bf16_case.py            (in this folder; transformers 5.24, peft 0.21.2, torch 2.15, float32, CPU)

make_model_golden.py saved the model by `model.to(torch.bfloat16)` and went on with `model.float()`. That also rounded the
rotary frequencies, a buffer that is not in the checkpoint, to bfloat16; a model loaded from the files has them in float32.
The values here come from `from_pretrained(dtype=float32)` and are otherwise made as in make_model_golden.py.
"""
import os
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "qwen3-sharded-bf16")
old = load_file(os.path.join(here, "golden.safetensors"))
ids, labels = old["input_ids"], old["labels"]
model = AutoModelForCausalLM.from_pretrained(here, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(m):
    return m.generate(input_ids=ids[:1, :12], attention_mask=torch.ones(1, 12, dtype=torch.long), max_new_tokens=16,
                      do_sample=False, eos_token_id=None, pad_token_id=0)


new = {"input_ids": ids, "labels": labels}
with torch.no_grad():
    new["logits.base"], new["greedy.base"] = model(ids).logits, greedy(model)
adapted = PeftModel.from_pretrained(model, os.path.join(here, "adapter"), is_trainable=True)
with torch.no_grad():
    new["logits.adapter"], new["greedy.adapter"] = adapted(ids).logits, greedy(adapted)
loss = adapted(ids, labels=labels).loss
loss.backward()
new["loss.adapter"] = loss.detach().reshape(1)
for name, p in adapted.named_parameters():
    if p.grad is not None:
        new["grad." + name.replace("base_model.model.", "").replace(".default", "")] = p.grad.clone()
params = [p for p in adapted.parameters() if p.requires_grad]
optim = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
losses, norms = [], []
for _ in range(5):
    optim.zero_grad()
    step = adapted(ids, labels=labels).loss
    step.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
    optim.step()
    losses.append(step.item())
new["adamw.losses"], new["adamw.grad_norms"] = torch.tensor(losses), torch.tensor(norms)
for name in ("logits.base", "logits.adapter", "loss.adapter"):
    print(name, "differs from the old value by", (new[name] - old[name]).abs().max().item())
save_file({k: v.detach().contiguous() for k, v in new.items()}, os.path.join(here, "golden.safetensors"))
