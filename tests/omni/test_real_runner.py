"""The real GPUARModelRunner on the CPU, thinker and talker at once: in-process cache, sidecar and no prefix caching
hand on the same rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_omni.core.prefix_cache import OmniPrefixCacheManager

from stagecache.control import Observer
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.errors import DaemonUnavailableError
from stagecache.policy import HIDDEN_KEY
from stagecache.shim.omni import SidecarPrefixCacheManager
from tests.daemon_process import DaemonProcess, poll_until
from tests.omni.engines import BLOCK, Rows, StageEngine, environment, run_together, stage_engine, tokens
from tests.omni.managers import ADAPTER_API

SHARED = tokens(1, 150)
ROUNDS = (
    {"first": SHARED},
    {"shares": SHARED[:110] + tokens(2, 60), "again": SHARED},
    {"twin_a": tokens(3, 130), "twin_b": tokens(3, 130)},
    {"chunked": SHARED + tokens(4, 200)},
    {"exact": SHARED[: 4 * BLOCK]},
)
"""Run one after another, the prompts of a round together. Every prompt computes one token at least."""

HITS = {"shares": 96, "again": 128, "twin_b": 128, "chunked": 128, "exact": 96}
BLOCK_BYTES = 32 << 10
"""KV cache of one block of the test's model."""

KEYS = {"thinker": {"hidden", "hidden_states.layer_0"}, "talker": {"codes.audio"}}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    write_checkpoint(directory, ModelShape(hidden=128, vocab=1024, max_len=1024))
    return directory


@contextlib.contextmanager
def both_stages(checkpoint: Path, socket: object = None, **changes: Any) -> Iterator[list[StageEngine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stage_engine(checkpoint, stage, socket, **changes)) for stage in KEYS]


def run_rounds(engines: list[StageEngine]) -> dict[str, Rows]:
    rows: dict[str, Rows] = {engine.stage: {} for engine in engines}
    for prompts in ROUNDS:
        for stage, found in run_together(engines, prompts).items():
            rows[stage].update(found)
    return rows


@pytest.fixture(scope="module")
def uncached(checkpoint: Path) -> dict[str, Rows]:
    """Rows by stage, prompt and key with prefix caching off."""
    with both_stages(checkpoint, enable_prefix_caching=False) as engines:
        rows = run_rounds(engines)
        assert not any(count for engine in engines for count in engine.cached_tokens.values())
    return rows


def assert_same_rows(got: dict[str, Rows], want: dict[str, Rows]) -> None:
    for stage, keys in KEYS.items():
        for prompts in ROUNDS:
            for name, prompt in prompts.items():
                assert got[stage][name].keys() == keys
                for key, rows in got[stage][name].items():
                    assert rows.shape[0] == len(prompt), (stage, name, key)
                    assert torch.equal(rows, want[stage][name][key]), (stage, name, key)


def hits(engine: StageEngine) -> dict[str, int]:
    return {name: count for name, count in engine.cached_tokens.items() if count}


def test_in_process_rows_equal_an_uncached_run(checkpoint: Path, uncached: dict[str, Rows]) -> None:
    """H2: vLLM-Omni's own cache, as the measure of what follows."""
    with both_stages(checkpoint) as engines:
        rows = run_rounds(engines)
        for engine in engines:
            assert type(engine.manager) is OmniPrefixCacheManager
            assert hits(engine) == HITS
    assert_same_rows(rows, uncached)


def test_sidecar_rows_equal_an_uncached_run(checkpoint: Path, uncached: dict[str, Rows], daemon: DaemonProcess) -> None:
    """H2: bit-equal in fp32 for rows that prefill made, in chunks and in same-step hits too; two stages attached at
    once, with keys and policies of their own."""
    with both_stages(checkpoint, daemon.socket) as engines:
        rows = run_rounds(engines)
        for engine in engines:
            assert type(engine.manager) is SidecarPrefixCacheManager
            assert hits(engine) == HITS
            assert engine.manager.cache.counters.hits == len(HITS)
        with Observer(daemon.socket) as observer:
            sessions = {s.stage: {key.key.name for key in s.keys} for s in observer.stats().sessions}
    assert_same_rows(rows, uncached)
    assert sessions["thinker"] == {HIDDEN_KEY, "hidden_states.layer_0"}
    assert sessions["talker"] == {"codes.audio"}


def test_a_shifted_or_foreign_row_would_be_seen(uncached: dict[str, Rows]) -> None:
    """The control."""
    rows = uncached["thinker"]["first"]["hidden"]
    assert not torch.equal(rows[1:], rows[:-1])
    assert not torch.equal(uncached["thinker"]["twin_a"]["hidden"][:96], rows[:96])


def test_a_daemon_that_is_killed_and_started_again_loses_no_row(
    checkpoint: Path, uncached: dict[str, Rows], fresh_daemon: DaemonProcess
) -> None:
    """Its successor takes the session over; the stage notices nothing but the wait."""
    with stage_engine(checkpoint, "thinker", fresh_daemon.socket) as engine:
        engine.run({"first": SHARED})
        fresh_daemon.restart()
        rows = engine.run({"again": SHARED, "chunked": ROUNDS[3]["chunked"]})
        assert hits(engine) == {"again": 128, "chunked": 128}
    for name, keys in rows.items():
        for key, got in keys.items():
            assert torch.equal(got, uncached["thinker"][name][key])


def test_rows_that_decode_made_are_hit_by_the_next_turn(checkpoint: Path, daemon: DaemonProcess) -> None:
    """H2: against an uncached run only as exact as the engine's kernels, against the in-process cache to the bit."""
    rows: dict[str, Rows] = {}
    for name, socket, cached in (("off", None, False), ("in-process", None, True), ("sidecar", daemon.socket, True)):
        with stage_engine(checkpoint, "thinker", socket, enable_prefix_caching=cached) as engine:
            engine.run({"turn_1": SHARED[:60]}, max_tokens=40)
            turn_2 = SHARED[:60] + engine.generated["turn_1"] + tokens(5, 20)
            rows[name] = engine.run({"turn_2": turn_2})
            assert engine.cached_tokens["turn_2"] == (96 if cached else 0)
    for key, want in rows["off"]["turn_2"].items():
        assert torch.equal(rows["sidecar"]["turn_2"][key], rows["in-process"]["turn_2"][key])
        assert torch.allclose(rows["sidecar"]["turn_2"][key], want, atol=1e-4)


def test_a_preempted_request_hands_on_every_position_once(checkpoint: Path, daemon: DaemonProcess) -> None:
    """R3: on a cache of a few blocks; vLLM-Omni's in-process cache hands positions on twice here."""
    prompts = {f"p{seed}": tokens(seed, 90) for seed in (11, 12, 13)}
    rows: dict[str, Rows] = {}
    few = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES, "max_model_len": 256}
    for name, socket, changes in (
        ("roomy", None, {"enable_prefix_caching": False}),
        ("in-process", None, few),
        ("sidecar", daemon.socket, few),
    ):
        with stage_engine(checkpoint, "thinker", socket, **changes) as engine:
            rows[name] = engine.run(prompts, max_tokens=40)
    count = 90 + 39
    assert any(rows["in-process"][name]["hidden"].shape[0] != count for name in prompts), "nothing was preempted"
    for name in prompts:
        for key, want in rows["roomy"][name].items():
            assert rows["sidecar"][name][key].shape == want.shape == (count, 128)
            assert torch.allclose(rows["sidecar"][name][key], want, atol=1e-4), (name, key)


def test_without_a_daemon_the_engine_runs_on_vllm_omnis_cache_until_there_is_one(
    checkpoint: Path, uncached: dict[str, Rows], tmp_path: Path, shim_log: list[str]
) -> None:
    """R3, R5: then the engine forgets what only the in-process cache has, no row is lost, and none comes twice."""
    want = uncached["thinker"]
    daemon = DaemonProcess(tmp_path)
    try:
        with stage_engine(checkpoint, "thinker", daemon.socket) as engine:
            rows = engine.run({"first": SHARED})
            late = engine.manager
            assert type(getattr(late, "inner", late)) is OmniPrefixCacheManager
            assert torch.equal(rows["first"]["hidden"], want["first"]["hidden"])
            [warning] = [line for line in shim_log if "in-process" in line]
            assert str(daemon.socket) in warning
            if ADAPTER_API:  # Its manager takes no scheduler outputs: the stage stays where it is.
                return
            daemon.start()
            poll_until(late._waiting.session, "a session in the background")
            rows = {}
            while late.changed is None:
                names = f"long{len(rows)}", f"other{len(rows)}"
                rows.update(engine.run({names[0]: SHARED, names[1]: SHARED[:110]}, max_tokens=100))
            assert late.followed, "requests that had rows already went on with the daemon's cache"
            for name, found in rows.items():
                prompt = len(SHARED) if name.startswith("long") else 110
                for key, first in want["first"].items():
                    assert found[key].shape[0] == prompt + 99, (name, key)
                    assert torch.equal(found[key][:prompt], first[:prompt]), (name, key)
            rows = engine.run({"again": SHARED, "chunked": ROUNDS[3]["chunked"]})
            assert type(engine.manager) is SidecarPrefixCacheManager
            assert late.inner is None
            assert hits(engine).items() >= {"again": 128, "chunked": 128}.items()
            assert engine.manager.cache.counters.hits >= 2
            for name, keys in rows.items():
                for key, got in keys.items():
                    assert torch.equal(got, want[name][key]), (name, key)
    finally:
        daemon.close()


def test_a_required_daemon_that_is_not_there_stops_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    with environment({"STAGECACHE_REQUIRED": "1"}), pytest.raises(DaemonUnavailableError):  # noqa: SIM117
        with stage_engine(checkpoint, "thinker", tmp_path / "nobody.sock"):
            pass
