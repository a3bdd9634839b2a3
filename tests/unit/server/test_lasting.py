"""Objects that last: the collector does not look at them, they go by themselves, and large ones get huge pages."""

from __future__ import annotations

import asyncio
import gc
import mmap
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecache_wire.geometry import KeySchema
from stagecached.background import Background
from stagecached.index import Block, BlockPool
from stagecached.lasting import HUGE, lasting, use_huge_pages
from stagecached.manifest import ManifestStore
from stagecached.shared.layout import SharedGeometry
from stagecached.shared.manager import HUGE_PAGES_FROM, SharedBlocks
from stagecached.shared.manifest import NamespaceManifest, NamespaceManifests, namespace_of
from stagecached.shared.segment import SharedSegment
from stagecached.shared.space import Space
from stagecached.shared.store import NamespaceStore
from tests.unit.server.shared.kit import DIGEST, segment_name

BLOCKS = 5000
NAMED = {
    "model_fingerprint": "m", "hash_algorithm": "sha256", "hash_seed": "s", "stage": "t", "dtype": "int8",
    "block_size": 1, "tensor_parallel_size": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def seen_blocks() -> int:
    """Blocks that a collection looks at."""
    return sum(type(one) is Block for one in gc.get_objects())


def full(pool: BlockPool) -> BlockPool:
    """With content, duplicates and prefixes."""
    blocks = pool.get_new_blocks(BLOCKS)
    pool.cache_full_blocks(blocks, [(at % 4000).to_bytes(32, "little") for at in range(BLOCKS)])
    pool.free_blocks(blocks[::2])
    return pool


def test_a_collection_does_not_look_at_what_was_made_inside() -> None:
    before = seen_blocks()
    plain = BlockPool(BLOCKS)
    assert seen_blocks() - before >= BLOCKS
    del plain
    gc.collect()
    with lasting():
        kept = BlockPool(BLOCKS)
    assert seen_blocks() == 0
    assert gc.isenabled()
    assert kept.num_free_blocks == BLOCKS
    kept.close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_pool_that_was_closed_goes_with_its_last_reference(closed: bool) -> None:
    gc.disable()
    tracemalloc.start()
    try:
        pool = full(BlockPool(BLOCKS))
        held, _ = tracemalloc.get_traced_memory()
        if closed:
            pool.close()
        del pool
        left, _ = tracemalloc.get_traced_memory()
        assert (left < held // 20) is closed
    finally:
        tracemalloc.stop()
        gc.enable()


def huge_bytes() -> int:
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def test_large_tables_get_huge_pages_and_mappings_that_nobody_touched_do_not() -> None:
    if "never" in re.findall(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()):
        pytest.skip("this kernel gives no huge pages")
    untouched = mmap.mmap(-1, 64 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    use_huge_pages()
    before = huge_bytes()
    table = mmap.mmap(-1, 16 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    table.write(b"x" * (16 * HUGE))
    assert use_huge_pages() > 15 * HUGE
    assert 8 * HUGE < huge_bytes() - before < 40 * HUGE
    untouched.close()
    table.close()


@pytest.mark.parametrize("blocks", [HUGE_PAGES_FROM, HUGE_PAGES_FROM // 2])
def test_the_map_of_a_large_namespace_is_asked_for_huge_pages_again_with_time(tmp_path: Path, blocks: int) -> None:
    """Once in a while, and not for one that is small."""

    async def run() -> list[int]:
        background = Background()
        shared = SharedBlocks(
            "n", NamespaceManifests(tmp_path), ManifestStore(tmp_path), background, limit_bytes=1 << 30, parts=1
        )
        key = KeySchema("k", "int8", ())
        with segment_name() as name:
            segment = SharedSegment.create(name, SharedGeometry(DIGEST, blocks, 1, (key,)))
            manifest = NamespaceManifest.of(namespace_of((key,), **NAMED), (key,), blocks, 1.0)
            shared._spaces["n"] = Space.of(manifest, NamespaceStore(segment))
            asked = []
            for _ in range(2):
                tasks = asyncio.all_tasks()
                shared.tick()
                asked += await asyncio.gather(*(asyncio.all_tasks() - tasks))
            segment.unlink()
        return asked

    asked = asyncio.run(run())
    assert len(asked) == (blocks >= HUGE_PAGES_FROM), "once in a minute"
