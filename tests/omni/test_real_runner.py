"""The real GPUARModelRunner on the CPU: in-process cache, sidecar and no prefix caching hand on the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.shim.omni import SidecarPrefixCacheManager
from tests.daemon_process import DaemonProcess
from tests.omni.engines import BLOCK, StageEngine, stage_engine, tokens

SHARED = tokens(1, 150)
ROUNDS = (
    {"first": SHARED},
    {"shares": SHARED[:110] + tokens(2, 60), "again": SHARED},
    {"twin_a": tokens(3, 130), "twin_b": tokens(3, 130)},
    {"chunked": SHARED + tokens(4, 200)},
    {"exact": SHARED[: 4 * BLOCK]},
)
"""Run one after another, the prompts of a round together. Every prompt computes one token at least."""

KEYS = {"thinker": {"hidden", "hidden_states.layer_0"}, "talker": {"codes.audio"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    write_checkpoint(directory, ModelShape(hidden=128, vocab=1024, max_len=1024))
    return directory


def run_rounds(engine: StageEngine) -> dict[str, dict[str, torch.Tensor]]:
    rows = {}
    for prompts in ROUNDS:
        rows.update(engine.run(prompts))
    return rows


@pytest.fixture(scope="module")
def uncached(checkpoint: Path) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Rows by stage, prompt and key with prefix caching off."""
    rows = {}
    for stage in KEYS:
        with stage_engine(checkpoint, stage, enable_prefix_caching=False) as engine:
            rows[stage] = run_rounds(engine)
            assert not any(engine.cached_tokens.values())
    return rows


def assert_same_rows(got: dict[str, dict[str, torch.Tensor]], want: dict[str, dict[str, torch.Tensor]]) -> None:
    for prompts in ROUNDS:
        for name, prompt in prompts.items():
            assert got[name].keys() == want[name].keys()
            for key, rows in got[name].items():
                assert rows.shape[0] == len(prompt), (name, key)
                assert torch.equal(rows, want[name][key]), (name, key)


@pytest.mark.parametrize("stage", KEYS)
def test_in_process_rows_equal_an_uncached_run(checkpoint: Path, uncached, stage: str) -> None:
    """H2: vLLM-Omni's own cache, as the measure of what follows."""
    with stage_engine(checkpoint, stage) as engine:
        rows = run_rounds(engine)
        assert not isinstance(engine.manager, SidecarPrefixCacheManager)
    assert_same_rows(rows, uncached[stage])


@pytest.mark.parametrize("stage", KEYS)
def test_sidecar_rows_equal_an_uncached_run(checkpoint: Path, uncached, daemon: DaemonProcess, stage: str) -> None:
    """H2: bit-equal in fp32 for rows that prefill made, chunked prefill and same-step hits too."""
    with stage_engine(checkpoint, stage, daemon.socket) as engine:
        rows = run_rounds(engine)
        hits = {name: count for name, count in engine.cached_tokens.items() if count}
        assert hits == {"shares": 96, "again": 128, "twin_b": 128, "chunked": 128, "exact": 96}
        assert engine.manager.cache.counters.hits == len(hits)
    assert_same_rows(rows, uncached[stage])
    assert rows["first"].keys() == KEYS[stage]


def test_a_shifted_row_would_be_seen(uncached) -> None:
    """The control."""
    rows = uncached["thinker"]["first"]["hidden"]
    assert not torch.equal(rows[1:], rows[:-1])
    assert not torch.equal(uncached["thinker"]["twin_a"]["hidden"][:96], rows[:96])
