"""Tiny LoRA adapters for the checkpoint of these tests, as peft writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .conftest import SHAPE

RANK = 8


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of the query and value projections, whose rows are others than those of another seed or of none."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(SHAPE.layers):
        for name, heads in (("q_proj", SHAPE.heads), ("v_proj", SHAPE.kv_heads)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(RANK, SHAPE.hidden, generator=random) / 10
            weights[f"{base}.lora_B.weight"] = torch.randn(heads * SHAPE.head_dim, RANK, generator=random) / 10
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none", "task_type": "CAUSAL_LM"}))
