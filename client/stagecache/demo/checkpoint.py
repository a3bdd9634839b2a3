"""A tiny causal language model with real random weights, written in a second and without a download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model.

    Attributes:
        hidden: width of a hidden row, a multiple of 64.
        layers: transformer layers.
        vocab: rows of the embedding.
        max_len: longest sequence in tokens.
        std: standard deviation of the weights. 0.15 gives hidden rows of order 1 to 10 that depend on the whole
            context, so that a row of another position or request never passes for the right one.
    """

    hidden: int = 256
    layers: int = 2
    vocab: int = 2048
    max_len: int = 2048
    std: float = 0.15

    def __post_init__(self) -> None:
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of 64, so that it divides into heads")

    @property
    def head_dim(self) -> int:
        """Width of an attention head: one of those that the engine's CPU attention knows."""
        return 64 if self.hidden % 128 == 0 else 32

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key and value heads, each shared by two attention heads."""
        return self.heads // 2


def write_checkpoint(directory: Path, shape: ModelShape, *, seed: int = 0) -> None:
    """Write config.json and model.safetensors (float32, Llama layout) of a model with the given shape and seed."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_weights(shape, seed), directory / "model.safetensors", {"format": "pt"})


def _weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Normal weights of the shape's deviation; norms are ones. float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * shape.std

    hidden, inner = shape.hidden, 2 * shape.hidden
    weights = {"model.embed_tokens.weight": normal(shape.vocab, hidden)}
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "self_attn.q_proj.weight": normal(shape.heads * shape.head_dim, hidden),
            name + "self_attn.k_proj.weight": normal(shape.kv_heads * shape.head_dim, hidden),
            name + "self_attn.v_proj.weight": normal(shape.kv_heads * shape.head_dim, hidden),
            name + "self_attn.o_proj.weight": normal(hidden, shape.heads * shape.head_dim),
            name + "mlp.gate_proj.weight": normal(inner, hidden),
            name + "mlp.up_proj.weight": normal(inner, hidden),
            name + "mlp.down_proj.weight": normal(hidden, inner),
            name + "input_layernorm.weight": torch.ones(hidden),
            name + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = normal(shape.vocab, hidden)
    return weights
