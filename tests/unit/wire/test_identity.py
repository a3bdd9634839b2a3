"""Block hashes: chained, the same in parts and at once, never equal where content differs."""

from __future__ import annotations

from hashlib import sha256

import pytest

from stagecache_wire.cbor import encode
from stagecached.index import (
    BlockHasher,
    ExtraKeys,
    MultiModalSpan,
    Request,
    UnsupportedHash,
    UnsupportedKey,
    check_hashes,
    digest_prompt_embeds,
)

TOKENS = list(range(100, 140))
HASHER = BlockHasher(8)


def hashes(**keys: object) -> list[bytes]:
    return HASHER.hash_blocks(TOKENS, ExtraKeys(**keys))  # type: ignore[arg-type]


def image(name: str, offset: int = 10, length: int = 12) -> tuple[MultiModalSpan, ...]:
    return (MultiModalSpan(name, offset, length),)


def first_difference(one: list[bytes], other: list[bytes]) -> int:
    """First block whose hash differs; all behind it must differ too, since hashes are chained."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    first = same.index(False) if False in same else len(same)
    assert not any(same[first:])
    return first


def test_a_hash_is_sha256_over_parent_tokens_and_extra_keys() -> None:
    root = sha256(encode("vllm-none-hash")).digest()
    first = sha256(encode((root, TOKENS[:8], None))).digest()
    second = sha256(encode((first, TOKENS[8:16], None))).digest()
    assert HASHER.hash_blocks(TOKENS[:20]) == [first, second]


def test_the_first_block_has_its_own_parent_by_seed() -> None:
    assert first_difference(HASHER.hash_blocks(TOKENS), BlockHasher(8, "0").hash_blocks(TOKENS)) == 0


def test_equal_tokens_behind_different_ones_are_different_content() -> None:
    other = [*TOKENS[:9], 7, *TOKENS[10:]]
    assert first_difference(HASHER.hash_blocks(TOKENS), HASHER.hash_blocks(other)) == 1


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param({"lora_name": "a"}, {"lora_name": "b"}, 0, id="lora"),
        pytest.param({"lora_name": "a"}, {}, 0, id="lora_or_none"),
        pytest.param({"cache_salt": "a"}, {"cache_salt": "b"}, 0, id="salt"),
        pytest.param({"cache_salt": "a"}, {}, 0, id="salt_or_none"),
        pytest.param({"cache_salt": ""}, {}, 5, id="an_empty_salt_is_none"),
        pytest.param({"mm_spans": image("cat")}, {"mm_spans": image("dog")}, 1, id="image"),
        pytest.param({"mm_spans": image("cat")}, {"mm_spans": image("cat", 11)}, 1, id="image_at_another_place"),
        pytest.param({"mm_spans": image("cat", 8, 8)}, {"mm_spans": image("cat", 8, 9)}, 2, id="longer_image"),
        pytest.param({"mm_spans": image("cat")}, {}, 1, id="image_or_none"),
        pytest.param({"embeds_digests": (b"a",)}, {"embeds_digests": (b"b",)}, 0, id="embeddings"),
        pytest.param({"embeds_digests": ()}, {}, 0, id="embeddings_or_none"),
    ],
)
def test_content_that_differs_is_never_shared(one: dict[str, object], other: dict[str, object], expected: int) -> None:
    assert first_difference(hashes(**one), hashes(**other)) == expected


def test_a_salt_that_spells_a_loras_name_meets_it_in_the_first_block() -> None:
    """As in vLLM 0.30.0, whose extra keys are not labelled: the one ambiguity that byte equality brings along."""
    assert first_difference(hashes(cache_salt="a"), hashes(lora_name="a")) == 1


def test_images_in_one_block_each_count() -> None:
    def two(first: str, second: str) -> list[bytes]:
        return hashes(mm_spans=image(first, 9, 2) + image(second, 12, 2))

    assert len({two(a, b)[1] for a in ("cat", "dog") for b in ("cat", "dog")}) == 4


def test_hashing_in_parts_gives_the_same_hashes() -> None:
    keys = ExtraKeys("lora", image("cat", 3, 5) + image("dog", 9, 20), "salt")
    at_once = HASHER.hash_blocks(TOKENS, keys)
    request = Request("r", TOKENS[:5], HASHER, keys)
    for token_id in TOKENS[5:]:
        request.append([token_id])
    assert request.block_hashes == at_once
    assert HASHER.hash_blocks(TOKENS[16:], keys, first_block=2, parent_hash=at_once[1]) == at_once[2:]


def test_a_parent_is_given_exactly_for_later_blocks() -> None:
    with pytest.raises(ValueError, match="without a parent"):
        HASHER.hash_blocks(TOKENS, first_block=1)
    with pytest.raises(ValueError, match="with a parent"):
        HASHER.hash_blocks(TOKENS, parent_hash=bytes(32))
    with pytest.raises(UnsupportedHash):
        HASHER.hash_blocks(TOKENS, first_block=1, parent_hash=bytes(16))


def test_embeddings_are_digested_block_by_block() -> None:
    rows = bytes(range(60))
    assert digest_prompt_embeds(rows, 6, 4) == tuple(sha256(rows[i : i + 24]).digest() for i in (0, 24, 48))
    with pytest.raises(UnsupportedKey, match="60 bytes"):
        digest_prompt_embeds(rows, 7, 4)


def test_items_come_by_rising_offset() -> None:
    with pytest.raises(UnsupportedKey, match="rising offset"):
        ExtraKeys(mm_spans=image("a", 5) + image("b", 4))


def test_the_engines_hashes_are_taken_unless_they_are_too_short_for_sha256() -> None:
    check_hashes(hashes())
    with pytest.raises(UnsupportedHash, match="hash 1 has 16 bytes"):
        check_hashes([bytes(32), bytes(16)])
