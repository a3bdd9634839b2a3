"""What a user asks the small DiT for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from examples.small_dit.lora import Lora

Positions = Literal["grid", "raster"]
"""How image tokens are placed: by row and column, or one behind the other as text is."""


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """One image to make.

    images: reference images, uint8 [height, width, 3], sides multiples of the patch. guidance: of classifier-free
    guidance; 1.0 runs one row. seed: of the noise. vae_seed: of the VAE's draw; None: an own draw for each request that
    nobody can repeat. generator: bytes of a torch CPU generator's state, in place of vae_seed.
    """

    prompt: str
    images: tuple[NDArray[np.uint8], ...] = ()
    guidance: float = 2.5
    steps: int = 8
    seed: int = 42
    vae_seed: int | None = 42
    generator: bytes | None = field(default=None, repr=False)
    lora: Lora | None = None
    positions: Positions = "grid"
    system: str = "Paint what is asked for, and keep what the reference shows."
