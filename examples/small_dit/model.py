"""The small DiT: what stagecache.diffusion asks of a model, from a request to pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray

from examples.small_dit.config import SmallDiTConfig
from examples.small_dit.layout import VOCABULARY, RowLayout, lay_out
from examples.small_dit.request import ImageRequest
from examples.small_dit.transformer import Transformer
from examples.small_dit.vae import SmallVae
from stagecache.diffusion import KVShape, RowLengths, RowQuery


@dataclass(frozen=True)
class SmallImage:
    """pixels: uint8 [height, width, 3]. latents: float32 [tokens, latent], what the last step left."""

    pixels: NDArray[np.uint8]
    latents: torch.Tensor


class SmallDiT:
    """Weights and sizes. The same ``seed`` gives the same weights."""

    def __init__(self, config: SmallDiTConfig, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        width = config.width
        self.config = config
        self.vae = SmallVae(config, draw)
        self.embedding = torch.randn(VOCABULARY, width, generator=draw)
        self.from_latent = torch.randn(config.latent, width, generator=draw) / config.latent**0.5
        self.to_latent = torch.randn(width, config.latent, generator=draw) / width**0.5
        self.transformer = Transformer(config, draw)
        self.kv_shape = KVShape(config.layers, config.heads, config.head_dim)
        self.encoded_images = 0
        """Reference images that went through the VAE so far."""

    def start(self, request: ImageRequest) -> SmallDenoising:
        """Lay a request out."""
        return SmallDenoising(self, request)

    def weights_digest(self) -> str:
        """Hex sha256 over all weights that KV depends on."""
        state = sha256()
        tensors = [self.embedding, self.from_latent, self.vae.to_latent]
        for layer in self.transformer.layers:
            tensors += [layer.qkv, layer.out, layer.up, layer.down]
        for tensor in tensors:
            state.update(tensor.contiguous().numpy().data)
        return state.hexdigest()


class SmallDenoising:
    """One request. Flow matching: latents move from noise (t = 1) to the image (t = 0) in equal steps."""

    def __init__(self, model: SmallDiT, request: ImageRequest) -> None:
        self._model = model
        self._request = request
        self.layouts = lay_out(request, model.config)
        self.rows = [RowLengths(row.prefix_len, row.seq_len - row.prefix_len) for row in self.layouts]
        self.num_steps = request.steps
        self._qkv = model.transformer.adapted(request.lora)
        tokens = model.config.target[0] * model.config.target[1]
        noise = torch.Generator().manual_seed(request.seed)
        self.latents = torch.randn(tokens, model.config.latent, generator=noise)

    def step(self, index: int, queries: Sequence[RowQuery]) -> int:
        """One Euler step with classifier-free guidance."""
        with torch.inference_mode():
            return self._step(index, queries)

    def _step(self, index: int, queries: Sequence[RowQuery]) -> int:
        time = 1.0 - index / self.num_steps
        transformer, before = self._model.transformer, self._model.transformer.computed_tokens
        rows = [
            (transformer.tiles(layout, query.start), self._embed(layout, query.start, time), query)
            for layout, query in zip(self.layouts, queries, strict=True)
        ]
        tokens = len(self.latents)
        velocities = [hidden[-tokens:] @ self._model.to_latent for hidden in transformer.forward(self._qkv, rows)]
        velocity = velocities[0]
        if len(velocities) > 1:
            velocity = velocities[1] + self._request.guidance * (velocities[0] - velocities[1])
        self.latents = self.latents - velocity / self.num_steps
        return transformer.computed_tokens - before

    def result(self) -> SmallImage:
        return SmallImage(self._model.vae.decode(self.latents, self._model.config.target), self.latents)

    def _embed(self, layout: RowLayout, start: int, time: float) -> torch.Tensor:
        """Tokens from ``start`` on, [seq_len - start, width]. Images that end before it are not looked at."""
        model = self._model
        hidden = model.embedding[layout.tokens[start:]]
        if any(span.end > start for span in layout.spans):
            for span, latents in zip(layout.spans, self._encoded(), strict=True):
                low = max(span.start, start)
                if low < span.end:
                    hidden[low - start : span.end - start] += latents[low - span.start :] @ model.from_latent
        target = layout.prefix_len - start
        hidden[target] += _time_embedding(time, model.config.width)
        hidden[target + 1 :] += self.latents @ model.from_latent
        return hidden

    def _encoded(self) -> list[torch.Tensor]:
        """Latents of all reference images, drawn in their order from one generator."""
        request, draw = self._request, torch.Generator()
        if request.generator is not None:
            draw.set_state(torch.frombuffer(bytearray(request.generator), dtype=torch.uint8))
        elif request.vae_seed is not None:
            draw.manual_seed(request.vae_seed)
        else:
            draw.seed()
        self._model.encoded_images += len(request.images)
        return [self._model.vae.encode(image, draw) for image in request.images]


def _time_embedding(time: float, width: int) -> torch.Tensor:
    """Sines and cosines of the timestep, [width]."""
    half = width // 2
    angles = 1000.0 * time * torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
    return torch.cat([angles.sin(), angles.cos()])
