"""A diffusion stage and the node's daemon: what one worker computed, another has; what was half done, nobody has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.small_dit import MODEL_NAME, ImageRequest, Lora, SmallDiT
from stagecache.control import connect_observer
from stagecache.diffusion import DiffusionStage, NodeStore
from stagecache.diffusion.counts import DiffusionCounts
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.diffusion_worker import WINDOW_BLOCKS, digest, run_worker
from tests.integration.helpers import own_daemon
from tests.unit.diffusion.kit import BLOCK, SIZES, ask, changed_pixel, dense, one_thread, paged

MakeStage = Callable[..., tuple[DiffusionStage, NodeStore]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> SmallDiT:
    return SmallDiT(SIZES)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[DaemonProcess]:
    with own_daemon(tmp_path, "--shared-bytes", "16MiB") as process:
        yield process


@pytest.fixture
def attach(model: SmallDiT) -> Iterator[MakeStage]:
    opened: list[NodeStore] = []

    def make(daemon: DaemonProcess, of: SmallDiT = model) -> tuple[DiffusionStage, NodeStore]:
        node = NodeStore.attach(
            daemon.socket,
            of.kv_shape,
            model=MODEL_NAME,
            stage="dit",
            block_size=BLOCK,
            window_blocks=WINDOW_BLOCKS,
            daemon_grace_s=0.2,
        )
        opened.append(node)
        return paged(of, node), node

    yield make
    for node in opened:
        node.close()


def run(
    stage: DiffusionStage, node: NodeStore, request: ImageRequest, request_id: str = "r"
) -> tuple[torch.Tensor, DiffusionCounts]:
    before = stage.counts.copy()
    latents = stage.generate(request_id, request).latents
    node.wait()
    return latents, stage.counts.since(before)


def complete_blocks(model: SmallDiT, request: ImageRequest) -> int:
    """Of all rows."""
    return sum(row.prefix_len // BLOCK for row in model.start(request).rows)


def distinct_blocks(model: SmallDiT, request: ImageRequest) -> int:
    """Hashes of all rows: those up to the image's end are the same in both."""
    return complete_blocks(model, request) - model.start(request).layouts[0].spans[0].end // BLOCK


def test_a_hit_from_the_node_equals_the_run_without_a_cache(
    sharing: DaemonProcess, model: SmallDiT, attach: MakeStage
) -> None:
    """Another prompt warms, then the request hits in part, then in whole; what must not be shared is not."""
    request = ask()
    expected = dense(model).generate("r", request).latents
    stage, node = attach(sharing)
    _, cold = run(stage, node, ask("a blue whale, seen from far above"), "warm")
    assert cold.hit_blocks == 0

    partial, counts = run(stage, node, request, "partial")
    assert torch.equal(partial, expected)
    assert 0 < counts.hit_blocks < complete_blocks(model, request)

    whole, counts = run(stage, node, request, "whole")
    assert torch.equal(whole, expected)
    assert counts.hit_blocks == complete_blocks(model, request)
    assert counts.loaded_blocks == distinct_blocks(model, request)
    assert counts.first_step_tokens == sum(r.prefix_len % BLOCK + r.target_len for r in model.start(request).rows)

    text_blocks = 2 * (model.start(request).layouts[0].spans[0].start // BLOCK)
    for other, most in (
        (changed_pixel(request), text_blocks),
        (replace(request, vae_seed=43), text_blocks),
        (replace(request, lora=Lora.random("oil", SIZES, seed=1)), 0),
        (replace(request, positions="raster"), 0),
    ):
        found, counts = run(stage, node, other, "other")
        assert torch.equal(found, dense(model).generate("r", other).latents)
        assert counts.hit_blocks == most

    with connect_observer(sharing.socket) as observer:
        (namespace,) = observer.stats().namespaces
    # Complete prefix blocks and nothing else: no block of the target, none that the target shares.
    assert namespace.published == stage.counts.saved_blocks
    assert node._cache.counters.computed_rows == stage.counts.saved_blocks * BLOCK
    assert (namespace.leases, dict(namespace.skipped)) == (0, {})
    # The window is small, and a load or a save of more goes through it in parts.
    assert distinct_blocks(model, request) > 2 * WINDOW_BLOCKS


def test_a_worker_with_other_weights_shares_nothing(sharing: DaemonProcess, model: SmallDiT, attach: MakeStage) -> None:
    stage, node = attach(sharing)
    run(stage, node, ask())
    other = SmallDiT(SIZES, seed=1)
    theirs, their_node = attach(sharing, other)
    found, counts = run(theirs, their_node, ask())
    assert counts.hit_blocks == 0
    assert torch.equal(found, dense(other).generate("r", ask()).latents)
    same, same_node = attach(sharing)
    assert run(same, same_node, ask())[1].hit_blocks == complete_blocks(model, ask())


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_a_killed_worker_leaves_whole_blocks_or_none(
    sharing: DaemonProcess, model: SmallDiT, attach: MakeStage
) -> None:
    """Killed between two denoise steps, and between the rows of a transfer and their publication."""
    first, second = ask("a red boat on a lake in fog"), ask("a green parrot in an old tree")
    # In the second transfer: what was published before it is there, and nothing of it.
    reports, status = run_worker(sharing.socket, "publish 2", first.prompt)
    assert (reports, status) == ([], -9)
    stage, node = attach(sharing)
    latents, counts = run(stage, node, first, "first")
    assert torch.equal(latents, dense(model).generate("r", first).latents)
    # One transfer's blocks, all leading ones of the first row and with that of the second.
    assert counts.loaded_blocks == WINDOW_BLOCKS
    assert counts.hit_blocks == 2 * WINDOW_BLOCKS
    assert counts.saved_blocks == distinct_blocks(model, first) - WINDOW_BLOCKS

    # Another worker has what this one computed; then it is killed where the third denoise step would begin.
    reports, status = run_worker(sharing.socket, "step 2", first.prompt, second.prompt)
    assert status == -9
    (report,) = reports
    assert report["hit_blocks"] == complete_blocks(model, first)
    assert report["latents"] == digest(latents)
    latents, counts = run(stage, node, second, "second")
    assert torch.equal(latents, dense(model).generate("r", second).latents)
    assert counts.hit_blocks == complete_blocks(model, second)
    with connect_observer(sharing.socket) as observer:
        assert [session.session_id for session in observer.stats().sessions] == [
            node._cache.session.rpc.credentials.session_id
        ]
        assert sum(namespace.leases for namespace in observer.stats().namespaces) == 0


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_without_the_daemon_everything_is_computed_and_behind_it_the_blocks_are_there(
    sharing: DaemonProcess, model: SmallDiT, attach: MakeStage
) -> None:
    request = ask()
    expected = dense(model).generate("r", request).latents
    stage, node = attach(sharing)
    run(stage, node, request, "cold")
    sharing.kill()
    before = stage.counts.copy()
    assert torch.equal(stage.generate("away", request).latents, expected)
    counts = stage.counts.since(before)
    assert counts.hit_blocks == 0
    # The log has room for two transfers, which the next daemon does.
    assert counts.saved_blocks == 2 * WINDOW_BLOCKS
    assert counts.unsaved_requests == 0
    sharing.start()

    def hits_all() -> bool:
        before = stage.counts.copy()
        assert torch.equal(stage.generate("back", request).latents, expected)
        return stage.counts.since(before).hit_blocks == complete_blocks(model, request)

    # The worker shakes hands with the new daemon in its own time, and attaches anew where its session was ended.
    poll_until(hits_all, "hits behind a killed daemon", 60.0)
    session = node._cache.session.rpc.credentials.session_id
    assert sharing.stop() == 0
    assert torch.equal(stage.generate("stopped", request).latents, expected)
    sharing.start()
    poll_until(hits_all, "hits behind a daemon that was stopped", 60.0)
    assert node._cache.session.rpc.credentials.session_id != session


def test_a_hit_that_the_node_has_not_is_computed_and_never_guessed(
    sharing: DaemonProcess, model: SmallDiT, attach: MakeStage
) -> None:
    """As if the blocks had gone between lookup and load: the fill finds nothing, and the rows are UNKNOWN."""
    stage, node = attach(sharing)
    run(stage, node, changed_pixel(ask()), "older rows in the same slots")
    acquire = node.acquire
    node.acquire = lambda request_id, rows: [len(hashes) for hashes in rows]  # type: ignore[method-assign]
    latents, counts = run(stage, node, ask(), "not there")
    assert torch.equal(latents, dense(model).generate("r", ask()).latents)
    assert (counts.failed_loads, counts.hit_blocks, counts.loaded_blocks) == (1, 0, 0)
    node.acquire = acquire  # type: ignore[method-assign]
    latents, counts = run(stage, node, ask(), "there")
    assert torch.equal(latents, dense(model).generate("r", ask()).latents)
    assert (counts.failed_loads, counts.hit_blocks) == (0, complete_blocks(model, ask()))


def test_a_node_with_little_room_serves_what_it_has(tmp_path: Path, model: SmallDiT, attach: MakeStage) -> None:
    """Room for fewer blocks than one request has: blocks are evicted, also behind a hit that is held."""
    with own_daemon(tmp_path, "--shared-bytes", str(9 * BLOCK * SIZES.layers * 2 * SIZES.width * 4)) as small:
        stage, node = attach(small)
        requests = [ask(), ask("a blue whale, seen from far above"), ask()]
        for index, request in enumerate(requests):
            latents, counts = run(stage, node, request, str(index))
            assert torch.equal(latents, dense(model).generate("r", request).latents)
            assert counts.failed_loads == 0
        with connect_observer(small.socket) as observer:
            (namespace,) = observer.stats().namespaces
        assert 0 < namespace.num_blocks < distinct_blocks(model, ask())


def test_a_node_that_keeps_no_blocks_is_used_without_any(
    daemon: DaemonProcess, model: SmallDiT, attach: MakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage, node = attach(daemon)
    assert not node.on
    assert "keeps no prefix blocks for stage dit" in caplog.text
    for request_id in ("one", "two"):
        latents, counts = run(stage, node, ask(), request_id)
        assert torch.equal(latents, dense(model).generate("r", ask()).latents)
        assert (counts.hit_blocks, counts.saved_blocks) == (0, 0)
    assert node._cache.counters.steps == 0


def test_a_span_of_a_named_key_comes_without_rows_of_its_own(daemon: DaemonProcess) -> None:
    """H7, for keys that the policy names; others are handed out only by steps that bring them."""
    import numpy as np

    from stagecache import Geometry, KeySchema, StageCache
    from stagecache.policy import ModelCachePolicy
    from stagecache.step import NewRequest, SchedulerStep

    class One:
        name, first = "", 0

        def req_ids(self) -> list[str]:
            return [self.name]

        def num_computed(self) -> np.ndarray:
            return np.array([self.first])

        def block_table(self) -> np.ndarray:
            return np.array([[0, 1]])

    view = One()
    cache = StageCache.attach(
        socket=daemon.socket,
        model="m",
        stage="spans",
        geometry=Geometry(2, 4, 8, 2),
        view=view,
        policy=ModelCachePolicy(needs_full_hidden_states=False, span_keys=frozenset({"kv"})),
        keys=[KeySchema("kv", "float32", (3,)), KeySchema("other", "float32", (3,))],
    )
    try:
        rows = torch.randn(8, 3)
        view.name = "a"
        cache.new_step_starts(SchedulerStep({"a": 8}, [NewRequest("a", 0, [0, 1])]))
        cache.discard_step(
            cache.save_outputs(None, {"kv": rows, "other": rows}, num_tokens_unpadded=8, num_tokens_padded=8)
        )
        view.name, view.first = "b", 8
        cache.new_step_starts(SchedulerStep({}, [NewRequest("b", 8, [0, 1])], finished_req_ids={"a"}))
        step = cache.save_outputs(None, {}, num_tokens_unpadded=0, num_tokens_padded=0)
        outputs = cache.materialize(step, ["b"]).mm_outputs
        assert set(outputs) == {"kv"}
        assert torch.equal(outputs["kv"]["b"], rows)
    finally:
        cache.close()
