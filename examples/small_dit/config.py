"""Sizes of the small DiT."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class SmallDiTConfig:
    """width: of a token's hidden state. patch: pixels a side of a token. latent: channels that the VAE makes of one.

    target: rows and columns of tokens of the image to make. tile: tokens that pass through a layer together; a multiple
    of it is the block size (see transformer.py).
    """

    layers: int = 4
    width: int = 64
    heads: int = 2
    mlp_ratio: int = 4
    patch: int = 4
    latent: int = 8
    target: tuple[int, int] = (4, 4)
    tile: int = 16

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """Numbers of one patch of an RGB image."""
        return 3 * self.patch * self.patch

    @property
    def text(self) -> str:
        """All sizes, for fingerprints."""
        return repr(astuple(self))
