"""The workloads: requests for the small DiT, the same for every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from examples.small_dit import ImageRequest, SmallDiTConfig

WARM_UPS, MEASURED = 2, 8
GUIDANCE, STEPS, SEED = 2.5, 8, 42

MODEL = SmallDiTConfig(layers=4, width=192, heads=4, target=(8, 8), tile=32)
BLOCK_SIZE = 32
IMAGE_PIXELS = 64
"""A reference image of 64 x 64 pixels is 256 tokens."""

_PROMPT = "a red boat on a lake in the early morning fog, oil on canvas"


@dataclass(frozen=True)
class Workload:
    """name. what: one line. requests(round): warm-ups, then the measured ones; another round shares nothing with it."""

    name: str
    what: str
    requests: Callable[[int], Iterator[ImageRequest]]


def _request(number: int, image: int) -> ImageRequest:
    picture = np.random.default_rng(image).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
    return ImageRequest(
        f"{number:08d} {_PROMPT}",
        (picture,),
        guidance=GUIDANCE,
        steps=STEPS,
        seed=SEED,
        vae_seed=SEED,
        system=f"{image:08d}. Paint what is asked for, and keep what the reference shows.",
    )


def _identical(turn: int) -> Iterator[ImageRequest]:
    for _ in range(WARM_UPS + MEASURED):
        yield _request(turn, turn)


def _same_image(turn: int) -> Iterator[ImageRequest]:
    for number in range(WARM_UPS + MEASURED):
        yield _request(1000 * turn + number, turn)


def _distinct(turn: int) -> Iterator[ImageRequest]:
    for number in range(WARM_UPS + MEASURED):
        yield _request(1000 * turn + number, 1000 * turn + number)


WORKLOADS = (
    Workload("full prefix", "ten identical requests", _identical),
    Workload("same image", "ten prompts for one system text and image", _same_image),
    Workload("distinct prompts", "ten requests that share no block", _distinct),
)
