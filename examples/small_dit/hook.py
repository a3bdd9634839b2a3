"""The small DiT's prefix hook: what KV of its prefix depends on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from examples.small_dit.layout import RowLayout, lay_out
from examples.small_dit.model import SmallDiT
from examples.small_dit.request import ImageRequest
from stagecache.diffusion import LoraContext, PrefixIdentity, ReferenceImage, register_prefix_hook
from stagecache.diffusion.identity import RandomState, digest, digest_array, generator_state, seeded, unrepeatable

MODEL_NAME = "small_dit"


class SmallDiTHook:
    """Made once a loaded model: the digest of the weights takes a while."""

    def __init__(self, model: SmallDiT) -> None:
        self._config = model.config
        # Another torch may sum in another order: its KV is as good, and not the same.
        self.fingerprint = f"{MODEL_NAME} {model.config.text} {model.weights_digest()} torch {torch.__version__}"

    def identify(self, request: ImageRequest) -> Sequence[PrefixIdentity]:
        """One identity a CFG row.

        The VAE draws for all images in turn from one generator, so what it draws for one depends on those before it:
        each image's random state covers the shapes of these.
        """
        random_state = _random_state(request)
        shapes = [tuple(image.shape) for image in request.images]
        states = [digest("vae-draw", random_state, tuple(shapes[:index])) for index in range(len(shapes))]
        contents = [digest_array(image) for image in request.images]
        lora = request.lora and LoraContext(request.lora.name, request.lora.digest(), request.lora.scale)
        layout = f"positions={request.positions}"
        return [
            PrefixIdentity(
                row.tokens[: row.prefix_len].tolist(), layout, self._images(row, contents, states), lora or None
            )
            for row in lay_out(request, self._config)
        ]

    @staticmethod
    def _images(row: RowLayout, contents: list[bytes], states: list[RandomState]) -> tuple[ReferenceImage, ...]:
        return tuple(
            ReferenceImage(span.start, span.length, span.grid, contents[span.index], states[span.index])
            for span in row.spans
        )


def _random_state(request: ImageRequest) -> RandomState:
    if request.generator is not None:
        return generator_state(request.generator)
    return unrepeatable() if request.vae_seed is None else seeded(request.vae_seed)


register_prefix_hook(MODEL_NAME, SmallDiTHook)
