"""Block hashes are byte-equal to those of vLLM 0.30.0's `sha256_cbor`, whatever the request carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm")

import cbor2
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request as PeerRequest

from stagecache_wire import cbor
from stagecache_wire.identity import BlockHasher, ExtraKeys, MultiModalSpan, digest_prompt_embeds
from stagecached.index import Request

pytestmark = pytest.mark.engine

BLOCK_SIZE = 8
ROW = 3  # floats of one row of prompt embeddings

_PARAMS = SamplingParams(max_tokens=64)


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """VLLM keeps the seed in a global: each test begins, and leaves it, with the default."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)
    yield
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)


@dataclass(frozen=True)
class Content:
    """What one request is made of."""

    prompt: list[int]
    output: list[int]
    spans: list[tuple[str, int, int]]
    lora: str | None = None
    salt: str | None = None
    embeds: torch.Tensor | None = None

    def peer_hashes(self) -> list[bytes]:
        request = PeerRequest(
            request_id="peer",
            prompt_token_ids=self.prompt if self.embeds is None else None,
            prompt_embeds=self.embeds,
            sampling_params=_PARAMS,
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length), mm_hash=name)
                for name, offset, length in self.spans
            ],
            lora_request=LoRARequest(lora_name=self.lora, lora_int_id=1, lora_path="/none") if self.lora else None,
            cache_salt=self.salt,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
        )
        for token_id in self.output:
            request.append_output_token_ids(token_id)
        return list(request.block_hashes)

    def extra_keys(self) -> ExtraKeys:
        digests = None
        if self.embeds is not None:
            digests = digest_prompt_embeds(self.embeds.numpy().tobytes(), 4 * ROW, BLOCK_SIZE)
        spans = tuple(MultiModalSpan(*span) for span in self.spans)
        return ExtraKeys(self.lora, spans, self.salt, digests)

    def our_hashes(self) -> list[bytes]:
        prompt = self.prompt if self.embeds is None else [0] * len(self.embeds)
        request = Request("ours", prompt, BlockHasher(BLOCK_SIZE), self.extra_keys())
        for token_id in self.output:
            request.append([token_id])
        at_once = BlockHasher(BLOCK_SIZE).hash_blocks(prompt + self.output, self.extra_keys())
        assert request.block_hashes == at_once
        return at_once

    @property
    def items_in_unfilled_block(self) -> int:
        start = len(self.prompt) // BLOCK_SIZE * BLOCK_SIZE
        return sum(offset + length > start for _, offset, length in self.spans)


TOKENS = st.one_of(st.integers(0, 300), st.integers(0, 200_000), st.sampled_from([23, 24, 255, 256, 65535, 65536]))


@st.composite
def contents(draw: st.DrawFn) -> Content:
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=50))
    spans, position = [], draw(st.integers(0, 12))
    while position < len(prompt) and draw(st.booleans()):
        length = draw(st.integers(1, 20))
        if position + length <= len(prompt):
            spans.append((draw(st.text(max_size=70)), position, length))
        position += length + draw(st.integers(0, 4))
    embeds = None
    if not spans and draw(st.integers(0, 3)) == 0:
        embeds = torch.arange(len(prompt) * ROW, dtype=torch.float32).reshape(-1, ROW) * draw(st.integers(1, 5))
    return Content(
        prompt=prompt,
        output=draw(st.lists(TOKENS, max_size=20)),
        spans=spans,
        lora=draw(st.sampled_from([None, None, "adapter", "ä"])),
        salt=draw(st.sampled_from([None, None, "", "salt", "x" * 300])),
        embeds=embeds,
    )


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(content=contents())
def test_hashes_are_byte_equal_to_vllm(content: Content) -> None:
    if content.items_in_unfilled_block < 2:
        assert content.our_hashes() == content.peer_hashes()


@pytest.mark.parametrize("seed", ["0", "another"])
def test_the_engines_hash_seed_is_followed(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    kv_cache_utils.init_none_hash(sha256_cbor)
    content = Content(prompt=list(range(40)), output=[], spans=[])
    assert BlockHasher(BLOCK_SIZE, seed).hash_blocks(content.prompt) == content.peer_hashes()
    assert BlockHasher(BLOCK_SIZE).hash_blocks(content.prompt) != content.peer_hashes()


def test_a_32k_token_prompt_hashes_as_vllm_does() -> None:
    prompt = np.random.default_rng(5).integers(0, 200_000, 32_768)
    content = Content(prompt=prompt.tolist(), output=[], spans=[])
    assert BlockHasher(BLOCK_SIZE).hash_blocks(prompt) == content.peer_hashes()


@pytest.mark.parametrize(
    ("prompt", "output", "spans"),
    [
        pytest.param(list(range(13)), [1, 2, 3], [("{}", 9, 2), ("same", 11, 2)], id="two_items_in_the_unfilled_block"),
        pytest.param(list(range(24)), [], [("same", 0, 20), ("{}", 2, 10)], id="items_that_overlap"),
    ],
)
def test_different_images_never_share_a_hash_though_vllm_lets_them(
    prompt: list[int], output: list[int], spans: list[tuple[str, int, int]]
) -> None:
    """The two cases in which our hashes are not vLLM's (see identity.py): vLLM gives different content one hash."""

    def with_image(name: str) -> Content:
        return Content(prompt, output, [(item.format(name), offset, length) for item, offset, length in spans])

    cat, dog = with_image("cat"), with_image("dog")
    assert cat.peer_hashes()[1] == dog.peer_hashes()[1]
    assert cat.our_hashes()[1] != dog.our_hashes()[1]


def test_vllm_does_not_tell_a_salt_from_a_lora_of_the_same_name_in_the_first_block() -> None:
    """Byte equality brings this along (see identity.py)."""
    prompt = list(range(16))
    salted, adapted = Content(prompt, [], [], salt="name"), Content(prompt, [], [], lora="name")
    assert salted.peer_hashes()[0] == adapted.peer_hashes()[0] == salted.our_hashes()[0] == adapted.our_hashes()[0]
    assert salted.peer_hashes()[1] != adapted.peer_hashes()[1]


VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**64), 2**64 - 1), st.binary(max_size=300), st.text(max_size=300), st.none(), st.booleans()
    ),
    lambda values: st.one_of(st.lists(values, max_size=30), st.lists(values, max_size=30).map(tuple)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=VALUES)
def test_the_encoding_is_canonical_cbor_as_cbor2_writes_it(value: cbor.Value) -> None:
    assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(token_ids=st.lists(st.integers(-10, 2**33) | TOKENS, max_size=70), block_size=st.integers(1, 40))
def test_token_blocks_are_encoded_as_cbor2_does(token_ids: list[int], block_size: int) -> None:
    blocks = [token_ids[i : i + block_size] for i in range(0, len(token_ids) - block_size + 1, block_size)]
    heads = [
        cbor.encode_array_head(block_size) + encoded for encoded in cbor.encode_token_blocks(token_ids, block_size)
    ]
    assert heads == [cbor2.dumps(block, canonical=True) for block in blocks]
