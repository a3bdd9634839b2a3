"""Block tables of requests: all rows or none, hits shared and held, everything back at the end."""

from __future__ import annotations

import pytest

from stagecache.diffusion.counts import DiffusionCounts
from stagecache.diffusion.identity import PrefixIdentity
from stagecache.diffusion.model import RowLengths
from stagecache.diffusion.pages import KVPages
from stagecache.diffusion.scheduler import DiffusionScheduler, PageShortageError
from tests.unit.diffusion.kit import SIZES, IndexInProcess

BLOCK = 8
ROWS = [RowLengths(20, 6), RowLengths(20, 6)]
TWO = [PrefixIdentity(list(range(20)), "l"), PrefixIdentity([*range(10), *[99] * 10], "l")]


def scheduler(index: IndexInProcess | None = None, num_blocks: int = 16) -> DiffusionScheduler:
    return DiffusionScheduler(num_blocks, BLOCK, index, "model", DiffusionCounts())


def pages() -> KVPages:
    from stagecache.diffusion.model import KVShape

    return KVPages(KVShape(SIZES.layers, SIZES.heads, SIZES.head_dim), 16, BLOCK)


def test_every_row_has_pages_for_prefix_and_target_and_gives_them_back() -> None:
    plain = scheduler()
    allocation = plain.admit("r", ROWS)
    ids = [block_id for row in allocation.rows for block_id in row.block_ids]
    assert [len(row.block_ids) for row in allocation.rows] == [4, 4]
    assert len(set(ids)) == 8
    assert plain.num_free_blocks == 8
    assert (allocation.hits(), allocation.computed()) == ({}, {})
    plain.finish("r")
    plain.finish("r")
    assert plain.num_free_blocks == 16


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    index = IndexInProcess()
    small = scheduler(index, 9)
    small.admit("first", ROWS, TWO)
    with pytest.raises(PageShortageError, match="needs 8 pages, 1 of 9 are free") as short:
        small.admit("second", ROWS, TWO)
    assert "Finish another" in str(short.value)
    with pytest.raises(PageShortageError, match="Raise num_kv_blocks, or shorten"):
        small.admit("third", ROWS * 2, TWO * 2)
    assert small.num_free_blocks == 1
    assert len(index.leases) == 0


def test_rows_that_hit_the_same_block_share_its_page_and_the_hit_is_held() -> None:
    index = IndexInProcess()
    caching = scheduler(index)
    cold = caching.admit("cold", ROWS, TWO)
    computed = cold.computed()
    # Block 0 is the same in both rows: it has two pages and goes to the node once.
    assert [row.cached_blocks for row in cold.rows] == [0, 0]
    assert cold.rows[0].block_ids[0] != cold.rows[1].block_ids[0]
    assert len(computed) == len(set(computed.values())) == 3
    index.save("cold", computed, pages())
    caching.finish("cold")

    warm = caching.admit("warm", ROWS, TWO)
    assert [row.cached_blocks for row in warm.rows] == [2, 2]
    assert warm.rows[0].block_ids[0] == warm.rows[1].block_ids[0]
    assert warm.rows[0].block_ids[1] != warm.rows[1].block_ids[1]
    assert sorted(warm.hits().values()) == sorted(computed.values())
    assert warm.computed() == {}
    assert len(index.leases) == 2
    # What could not be brought is computed into the same pages.
    assert sorted(warm.without_hits().computed().values()) == sorted(computed.values())
    caching.finish("warm")
    assert len(index.leases) == 0
    assert caching.num_free_blocks == 16


def test_no_page_of_a_target_has_a_name() -> None:
    aligned = scheduler(IndexInProcess()).admit("r", [RowLengths(16, 8)], [PrefixIdentity(list(range(16)), "l")])
    assert len(aligned.rows[0].block_ids) == 3
    assert list(aligned.computed()) == list(aligned.rows[0].block_ids[:2])
    mixed = scheduler(IndexInProcess()).admit("r", [RowLengths(15, 9)], [PrefixIdentity(list(range(15)), "l")])
    assert list(mixed.computed()) == list(mixed.rows[0].block_ids[:1])


def test_a_running_id_and_identities_that_do_not_fit_are_refused() -> None:
    caching = scheduler(IndexInProcess())
    with pytest.raises(ValueError, match="1 identities for 2 rows"):
        caching.admit("r", ROWS, TWO[:1])
    with pytest.raises(ValueError, match="20 token ids for a prefix of 19"):
        caching.admit("r", [RowLengths(19, 6)], TWO[:1])
    caching.admit("r", ROWS, TWO)
    with pytest.raises(ValueError, match="running already"):
        caching.admit("r", ROWS, TWO)
