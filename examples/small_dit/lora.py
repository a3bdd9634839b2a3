"""Low-rank adapters of the attention's projections."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import torch

from examples.small_dit.config import SmallDiTConfig


@dataclass(frozen=True, eq=False)
class Lora:
    """W becomes W + scale * up @ down, for the query-key-value projection of every layer.

    down: [layers, rank, width]; up: [layers, 3 * width, rank].
    """

    name: str
    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0

    @classmethod
    def random(cls, name: str, config: SmallDiTConfig, seed: int, rank: int = 4, scale: float = 1.0) -> Lora:
        """An adapter with random weights."""
        draw = torch.Generator().manual_seed(seed)
        down = torch.randn(config.layers, rank, config.width, generator=draw) / config.width**0.5
        up = torch.randn(config.layers, 3 * config.width, rank, generator=draw) / rank**0.5
        return cls(name, down, up, scale)

    def digest(self) -> bytes:
        """sha256 over the weights."""
        state = sha256()
        for tensor in (self.down, self.up):
            state.update(repr(tuple(tensor.shape)).encode())
            state.update(tensor.contiguous().numpy().data)
        return state.digest()

    def delta(self, layer: int) -> torch.Tensor:
        """[3 * width, width]: what is added to a layer's projection."""
        return self.scale * (self.up[layer] @ self.down[layer])
