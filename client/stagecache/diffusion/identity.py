"""What makes two prefix blocks the same, on top of the block index's chain of hashes.

A block's hash chains, from the first block on: token ids; every reference image that reaches into the block, by the
digest of the pixels as the model gets them, the random state that its VAE draws with, its grid, its length and where
it lies; the LoRA; and, in the first block, the model and its layout. A chain says nothing about what comes behind, so
the same leading content gives the same leading hashes whatever the prompt's end is.

An image attends to itself in both directions, so KV inside its span depends on all of it. That is why the identifier
of a span covers the whole image and its length, though only a part of it lies in the block.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import cbor
from stagecache_wire.identity import BlockHasher, ExtraKeys, MultiModalSpan

# Part of every digest: raise it when the meaning of a field changes.
_VERSION = 1

HASH_SEED = "stagecache-diffusion"
"""Hashed into the parent of the first block: diffusion's chains begin elsewhere than an engine's."""

RandomState: TypeAlias = bytes
"""Digest of what a VAE draws from."""


def digest(kind: str, *fields: cbor.Value) -> bytes:
    """sha256 of labelled fields, each framed by its type and length, so that no two field lists are alike."""
    return sha256(cbor.encode((f"stagecache.diffusion.{kind}", _VERSION, *fields))).digest()


def digest_array(array: NDArray[np.generic]) -> bytes:
    """Digest of an array's dtype, shape and bytes: one element differing in one bit differs here.

    Raises:
        TypeError: the dtype has objects or fields, whose bytes are no content.
    """
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise TypeError(f"an array of dtype {array.dtype} has no content that could be digested; pass plain numbers")
    contiguous = np.ascontiguousarray(array)
    body = sha256(contiguous.reshape(-1).view(np.uint8).data).digest()
    return digest("array", array.dtype.str, tuple(array.shape), body)


def seeded(seed: int, device: str = "cpu") -> RandomState:
    """A VAE that draws from a generator seeded for this request alone. device: generators differ by device."""
    return digest("seed", str(seed), device)


def generator_state(state: bytes, device: str = "cpu") -> RandomState:
    """A VAE that draws from a generator handed in: its whole state, taken before the draw."""
    return digest("generator", state, device)


def unrepeatable() -> RandomState:
    """A VAE that draws from what nobody can repeat: equal to nothing, so its blocks are never hit."""
    return digest("unrepeatable", os.urandom(32))


@dataclass(frozen=True)
class ReferenceImage:
    """One reference image in a row's prefix.

    offset, length: its tokens, [offset, offset + length) of the row. grid: rows and columns of its tokens.
    content: digest of the pixels (digest_array). random_state: what its VAE draws from.
    """

    offset: int
    length: int
    grid: tuple[int, int]
    content: bytes
    random_state: RandomState

    @property
    def identifier(self) -> str:
        """Hex digest of everything but the offset, which the block hash adds."""
        return digest("image", self.content, self.random_state, self.grid, self.length).hex()


@dataclass(frozen=True)
class LoraContext:
    """The adapter that the weights are changed by. weights: digest of its tensors; names differ between workers."""

    name: str
    weights: bytes
    scale: float

    @property
    def key(self) -> str:
        """What stands for it in the block hash."""
        return "lora:" + digest("lora", self.name, self.weights, float(self.scale).hex()).hex()


@dataclass(frozen=True)
class PrefixIdentity:
    """All that the KV of one row's stable prefix depends on.

    token_ids: of the prefix, placeholders of images included. layout: fingerprint of how positions are made of it.
    images: by rising offset, not overlapping.
    """

    token_ids: Sequence[int]
    layout: str
    images: tuple[ReferenceImage, ...] = ()
    lora: LoraContext | None = None

    def __post_init__(self) -> None:
        end = 0
        for image in self.images:
            if image.offset < end or image.length < 1 or image.offset + image.length > len(self.token_ids):
                raise ValueError(
                    f"image at [{image.offset}, {image.offset + image.length}) of a prefix of {len(self.token_ids)} "
                    "tokens: images come by rising offset, do not overlap and lie within the prefix"
                )
            end = image.offset + image.length


def hash_prefix(identity: PrefixIdentity, model: str, block_size: int) -> list[bytes]:
    """Hashes of the complete blocks of a prefix, 32 bytes each, in order. model: fingerprint of the weights."""
    spans = tuple(MultiModalSpan(image.identifier, image.offset, image.length) for image in identity.images)
    extra = ExtraKeys(
        lora_name=None if identity.lora is None else identity.lora.key,
        mm_spans=spans,
        cache_salt="model:" + digest("model", model, identity.layout).hex(),
    )
    return BlockHasher(block_size, HASH_SEED).hash_blocks(identity.token_ids, extra)
