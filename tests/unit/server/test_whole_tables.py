"""What looks at whole tables, or keeps text of sessions, stays small however large and many they are."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from stagecache_wire import layout
from stagecache_wire.geometry import Geometry, KeySchema
from stagecached import keystore
from stagecached.metrics.catalog import METRICS
from stagecached.metrics.survey import count, pool_map
from stagecached.metrics.text import SPARE, TextWriter
from tests.unit.server.session_kit import new_session

GEOMETRY = Geometry(1000, 4, 16, 2, 1 << 16, 16).checked()
EPOCH = 30


@pytest.mark.parametrize("piece", [4, 52, 1000, 4000, 1 << 14])
def test_counts_and_maps_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    rng = np.random.default_rng(1)
    with new_session(GEOMETRY, {0: KeySchema("k", "float32", (2,))}) as segments:
        store = segments.keys[0]
        segments.slot_words[:] = rng.integers(0, 200, 4000, np.uint64)
        store.claims[:] = segments.slot_words * 2 + rng.integers(0, 4, 4000, np.uint64)
        store.claims[::3] = 8  # claimed by an early record, and written again since without the key
        segments.words[layout.D_EPOCH_SEQUENCE] = EPOCH
        found, _ = keystore.classify(segments.slot_words, store.claims, EPOCH)
        whole = pool_map(store, segments, 300)
        monkeypatch.setattr(keystore, "PIECE", piece)
        counts = count(store, segments)
        assert (counts.absent, counts.pending, counts.unknown) == (found.absent, found.pending, found.unknown)
        assert counts.present == store.present_slots(segments.slot_words, EPOCH)
        assert counts.present + counts.absent + counts.pending + counts.unknown == 4000
        assert min(counts.present, counts.absent, counts.pending, counts.unknown) > 0
        assert asdict(pool_map(store, segments, 300)) == asdict(whole)
        assert len(whole.present) == 250


def test_lines_of_sessions_that_are_gone_are_forgotten() -> None:
    """A session's id is in its lines: a daemon that lives for months meets many."""
    writer, metric = TextWriter(), METRICS["stagecache_session_info"]
    for index in range(20 * SPARE):
        text = writer.write([(metric, [("", ("s", "0", "m", "0", f"{index:016x}"), 1)])])
        assert f"{index:016x}" in text
        assert len(writer._heads) <= SPARE + 3
