"""Writes an adapter (LoRA) of the model of `tiny.py` with random weights: tests/vllm/adapter.py FOLDER SEED. Needs safetensors and torch."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, HIDDEN, HEADS_WIDTH = 4, 128, {"q_proj": 128, "v_proj": 64}
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
torch.manual_seed(int(sys.argv[2]))
tensors = {}
for layer in range(2):
    for name, width in HEADS_WIDTH.items():
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
        tensors[f"{place}.lora_B.weight"] = torch.randn(width, RANK)
save_file(tensors, folder / "adapter_model.safetensors")
config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": list(HEADS_WIDTH), "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps(config))
