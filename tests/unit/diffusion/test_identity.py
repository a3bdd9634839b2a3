"""What makes two prefix blocks the same, and what keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stagecache.diffusion.identity import (
    LoraContext,
    PrefixIdentity,
    ReferenceImage,
    digest_array,
    generator_state,
    hash_prefix,
    seeded,
    unrepeatable,
)

PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8)
IMAGE = ReferenceImage(20, 16, (4, 4), digest_array(PIXELS), seeded(42))
PREFIX = PrefixIdentity(list(range(50)), "grid", (IMAGE,))
LORA = LoraContext("oil", b"\x01" * 32, 1.0)
BLOCK = 8


def hashes(identity: PrefixIdentity = PREFIX, model: str = "m") -> list[bytes]:
    return hash_prefix(identity, model, BLOCK)


def common(one: list[bytes], other: list[bytes]) -> int:
    """Equal leading blocks; none is equal behind the first that differs."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    leading = equal.index(False) if False in equal else len(equal)
    assert not any(equal[leading:])
    return leading


def with_image(**changes: Any) -> PrefixIdentity:
    return replace(PREFIX, images=(replace(IMAGE, **changes),))


def test_only_complete_blocks_have_a_name_and_it_is_always_the_same() -> None:
    assert len(hashes()) == 50 // BLOCK
    assert hashes() == hashes(PrefixIdentity(tuple(range(50)), "grid", (replace(IMAGE),)))


def test_a_prompt_that_ends_otherwise_shares_the_blocks_before() -> None:
    other = replace(PREFIX, token_ids=[*range(41), 7, *range(42, 70)])
    assert common(hashes(), hashes(other)) == 41 // BLOCK


@pytest.mark.parametrize(
    "other",
    [
        with_image(content=digest_array(PIXELS ^ (np.arange(64).reshape(8, 8) == 63).astype(np.uint8))),
        with_image(random_state=seeded(43)),
        with_image(random_state=seeded(42, "cuda")),
        with_image(random_state=generator_state(b"42")),
        with_image(grid=(2, 8)),
        with_image(length=15),
        with_image(offset=21),
        replace(PREFIX, images=()),
    ],
    ids=["one pixel", "vae seed", "vae device", "vae generator", "grid", "length", "place", "no image"],
)
def test_an_image_that_differs_in_anything_is_another_from_its_first_block_on(other: PrefixIdentity) -> None:
    assert common(hashes(), hashes(other)) == IMAGE.offset // BLOCK


@pytest.mark.parametrize(
    ("other", "model"),
    [
        (replace(PREFIX, layout="raster"), "m"),
        (PREFIX, "m2"),
        (replace(PREFIX, lora=LORA), "m"),
    ],
    ids=["layout", "model", "lora"],
)
def test_another_model_layout_or_lora_shares_nothing(other: PrefixIdentity, model: str) -> None:
    assert common(hashes(), hashes(other, model)) == 0


def test_loras_differ_by_name_weights_and_scale() -> None:
    loras = [LORA, replace(LORA, name="ink"), replace(LORA, weights=b"\x02" * 32), replace(LORA, scale=0.5)]
    firsts = {hashes(replace(PREFIX, lora=lora))[0] for lora in loras}
    assert len(firsts) == len(loras)


def test_a_draw_that_nobody_can_repeat_equals_no_other() -> None:
    image = hashes(with_image(random_state=unrepeatable()))
    again = hashes(with_image(random_state=unrepeatable()))
    assert common(image, again) == IMAGE.offset // BLOCK


def test_an_array_is_named_by_dtype_shape_and_content() -> None:
    same_bytes = [PIXELS, PIXELS.reshape(4, 16), PIXELS.view(np.int8), PIXELS.view(np.uint16)]
    assert len({digest_array(array) for array in same_bytes}) == len(same_bytes)
    assert digest_array(PIXELS.T.copy().T) == digest_array(PIXELS)
    with pytest.raises(TypeError, match="plain numbers"):
        digest_array(np.array([object()]))


@pytest.mark.parametrize(
    "images",
    [
        (replace(IMAGE, offset=40),),
        (replace(IMAGE, length=0),),
        (IMAGE, replace(IMAGE, offset=30)),
        (replace(IMAGE, offset=36, length=4), IMAGE),
    ],
    ids=["beyond the prefix", "empty", "overlapping", "falling offsets"],
)
def test_images_that_cannot_lie_so_are_refused(images: tuple[ReferenceImage, ...]) -> None:
    with pytest.raises(ValueError, match="do not overlap and lie within"):
        replace(PREFIX, images=images)
