from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache_wire.layout import PAGE
from stagecached.shared import layout
from stagecached.shared.layout import SharedGeometry, fitting_blocks, hash_words, seal_of, seals_of
from stagecached.shared.rebuild import rebuild
from stagecached.shared.segment import SegmentMismatchError, SharedSegment
from stagecached.shared.store import NamespaceStore
from tests.unit.server.shared.kit import BLOCK_SIZE, DIGEST, KEYS, Member, digest, new_segment, publish, stored

WORDS = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.tuples(*[WORDS] * 5), min_size=1, max_size=8), WORDS)
def test_the_seal_of_one_block_is_that_of_all_at_once(blocks: list[tuple[int, ...]], digest_word: int) -> None:
    headers = np.zeros((len(blocks), layout.BLOCK_WORDS), np.uint64)
    headers[:, :5] = np.array(blocks, np.uint64)
    expected = [seal_of(digest_word, index, words) for index, words in enumerate(blocks)]
    assert seals_of(digest_word, headers).tolist() == expected
    assert 0 not in expected


def test_a_seal_fits_one_block_one_content_and_one_namespace() -> None:
    words = (*hash_words(digest(1)), 7)
    others = {
        seal_of(3, 4, words),
        seal_of(3, 5, words),
        seal_of(4, 4, words),
        *(seal_of(3, 4, (*words[:i], words[i] ^ 1 << bit, *words[i + 1 :])) for i in range(5) for bit in range(1, 64)),
    }
    assert len(others) == 3 + 5 * 63


@given(st.integers(0, 1 << 20))
def test_a_segment_of_fitting_blocks_fits_and_one_more_does_not(size: int) -> None:
    count = fitting_blocks(size, BLOCK_SIZE, KEYS)
    if count:
        assert SharedGeometry(DIGEST, count, BLOCK_SIZE, KEYS).total_bytes <= size
    slack = PAGE * (2 + len(KEYS))  # rounding to whole pages
    assert SharedGeometry(DIGEST, count + 1, BLOCK_SIZE, KEYS).total_bytes > size - slack


def test_regions_do_not_overlap_and_begin_on_pages() -> None:
    geometry = SharedGeometry(DIGEST, 100, BLOCK_SIZE, KEYS)
    offsets = geometry.region_offsets()
    assert all(offset % PAGE == 0 for offset in offsets)
    for key, start, end in zip(KEYS, offsets, offsets[1:], strict=False):
        assert end - start >= 100 * BLOCK_SIZE * key.row_bytes
    assert offsets[0] >= PAGE + 100 * layout.BLOCK_WORDS * 8


def test_a_rebuild_finds_what_was_stored_in_order_of_use_and_nothing_garbled() -> None:
    with new_segment(4) as segment:
        store = NamespaceStore(segment)
        member = Member(store)
        for number in range(4):
            publish(member, number)
        stored(member, [0])
        at = layout.block_word(2)
        segment.words[at + layout.B_HASH + 1] ^= 1
        again = NamespaceStore(SharedSegment.open(segment.name, segment.geometry))
        assert rebuild(again) == (3, 1)
        assert segment.words[at + layout.B_SEAL] == 0
        late = Member(again)
        assert stored(late, range(4)) == [True, True, False, True]
        assert again.counts() == {"held": 0, "cached": 3, "free": 1}


def test_blocks_used_after_a_rebuild_are_younger_than_those_before() -> None:
    with new_segment(3) as segment:
        member = Member(NamespaceStore(segment, clock=lambda: 10**18))
        for number in range(3):
            publish(member, number)
        opened = SharedSegment.open(segment.name, segment.geometry)
        again = NamespaceStore(opened, clock=lambda: 5)  # the clock was set back
        rebuild(again)
        late = Member(again)
        stored(late, [0])
        last = NamespaceStore(SharedSegment.open(segment.name, segment.geometry))
        rebuild(last)
        assert [block.block_hash[:32] for block in last.pool.queue if block.block_hash] == [
            digest(n) for n in (1, 2, 0)
        ]


@pytest.mark.parametrize("what", ["digest", "blocks", "abi", "generations"])
def test_a_segment_that_is_another_is_not_read(what: str) -> None:
    with new_segment(4) as segment:
        geometry = segment.geometry
        if what == "digest":
            geometry = SharedGeometry(sha256(b"another").digest(), 4, BLOCK_SIZE, KEYS)
        elif what == "blocks":
            geometry = SharedGeometry(DIGEST, 400, BLOCK_SIZE, KEYS)
        elif what == "abi":
            segment.words[layout.H_ABI] += 1
        else:
            segment.words[layout.S_BASE_GENERATION] = 9
        with pytest.raises(SegmentMismatchError):
            rebuild(NamespaceStore(SharedSegment.open(segment.name, geometry)))
