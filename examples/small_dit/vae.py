"""The small DiT's VAE: one linear map a patch, and a real draw from the latent's distribution."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from examples.small_dit.config import SmallDiTConfig


class SmallVae:
    """encode: uint8 [height, width, 3] to latents [tokens, latent]. decode: latents to uint8."""

    def __init__(self, config: SmallDiTConfig, draw: torch.Generator) -> None:
        self._config = config
        self.to_latent = torch.randn(config.pixels, 2 * config.latent, generator=draw) / config.pixels**0.5
        self._to_pixels = torch.randn(config.latent, config.pixels, generator=draw) / config.latent**0.5

    def encode(self, image: NDArray[np.uint8], draw: torch.Generator) -> torch.Tensor:
        """Latents [tokens, latent], drawn: mean and spread of each come from the pixels."""
        config, (height, width, _) = self._config, image.shape
        pixels = torch.from_numpy(image.astype(np.float32)) / 127.5 - 1.0
        patches = pixels.reshape(height // config.patch, config.patch, width // config.patch, config.patch, 3)
        moments = patches.permute(0, 2, 1, 3, 4).reshape(-1, config.pixels) @ self.to_latent
        mean, log_variance = moments.chunk(2, dim=-1)
        noise = torch.randn(mean.shape, generator=draw)
        return mean + torch.exp(0.5 * log_variance.clamp(-8.0, 2.0)) * noise

    def decode(self, latents: torch.Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """uint8 [rows * patch, columns * patch, 3] of latents [rows * columns, latent]."""
        side = self._config.patch
        pixels = torch.tanh(latents @ self._to_pixels).reshape(*grid, side, side, 3).permute(0, 2, 1, 3, 4)
        image = ((pixels.reshape(grid[0] * side, grid[1] * side, 3) + 1.0) * 127.5).round()
        pixels8: NDArray[np.uint8] = image.to(torch.uint8).numpy()
        return pixels8
