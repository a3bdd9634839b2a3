"""A real DiT in the three modes: equal to the last bit, and only what is not cached is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from examples.small_dit import ImageRequest, Lora, SmallDiT
from stagecache.diffusion import DiffusionStage, register_prefix_hook
from stagecache.diffusion import model as hooks
from stagecache.diffusion.counts import DiffusionCounts
from stagecache.diffusion.pages import KVPages
from stagecache.errors import DaemonLostError
from tests.unit.diffusion.kit import BLOCK, SIZES, IndexInProcess, ask, changed_pixel, dense, one_thread, paged, picture

REQUEST = ask()
OTHER_PROMPT = ask("a blue whale, seen from far above")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> SmallDiT:
    return SmallDiT(SIZES)


def run(stage: DiffusionStage, request: ImageRequest, request_id: str = "r") -> tuple[torch.Tensor, DiffusionCounts]:
    """Latents that the request ends with, and what was done for it."""
    before = stage.counts.copy()
    latents = stage.generate(request_id, request).latents
    return latents, stage.counts.since(before)


def total(request: ImageRequest, model: SmallDiT) -> int:
    """Tokens of all rows and steps without a cache: all once, the target in each step."""
    rows = model.start(request).rows
    return sum(row.seq_len + (request.steps - 1) * row.target_len for row in rows)


def test_paged_equals_dense_to_the_last_bit(model: SmallDiT) -> None:
    """Nothing is hashed and no hook is asked without prefix caching (G4); the outputs are compared as float32."""
    expected, counts = run(dense(model), REQUEST)
    found, paged_counts = run(paged(model), REQUEST)
    assert torch.equal(found, expected)
    assert counts.computed_tokens == paged_counts.computed_tokens == total(REQUEST, model)
    # The control: the output depends on the prefix, the image and the seed, so equality says something.
    for other in (OTHER_PROMPT, changed_pixel(REQUEST), replace(REQUEST, vae_seed=7), replace(REQUEST, seed=7)):
        assert not torch.equal(run(dense(model), other)[0], expected)


def test_a_partial_and_a_whole_hit_equal_the_run_without_a_cache(model: SmallDiT) -> None:
    expected, _ = run(dense(model), REQUEST)
    stage = paged(model, IndexInProcess())
    run(stage, OTHER_PROMPT, "warm")
    rows = model.start(REQUEST).rows
    image_end = model.start(REQUEST).layouts[0].spans[0].end

    part, partial = run(stage, REQUEST, "partial")
    assert torch.equal(part, expected)
    # The row with the prompt hits up to the image's end, the other one shares the no-prompt tokens too.
    assert image_end // BLOCK <= partial.hit_blocks // 2 < rows[0].prefix_len // BLOCK
    assert partial.computed_tokens == total(REQUEST, model) - partial.hit_blocks * BLOCK

    whole, full = run(stage, REQUEST, "whole")
    assert torch.equal(whole, expected)
    assert full.hit_blocks == sum(row.prefix_len // BLOCK for row in rows)
    assert full.computed_tokens == total(REQUEST, model) - full.hit_blocks * BLOCK
    assert full.first_step_tokens == sum(row.prefix_len % BLOCK + row.target_len for row in rows)
    assert full.saved_blocks == 0


def test_the_model_passes_no_more_tokens_than_the_stage_counts(model: SmallDiT) -> None:
    """Counted inside the layers, where the rows are, and not where the plan is made."""
    stage = paged(model, IndexInProcess())
    for request_id in ("cold", "warm"):
        before, encoded = model.transformer.computed_tokens, model.encoded_images
        _, counts = run(stage, REQUEST, request_id)
        assert model.transformer.computed_tokens - before == counts.computed_tokens
        # An image whose KV is there in whole is not encoded either.
        assert model.encoded_images - encoded == (2 if request_id == "cold" else 0)


LORA = Lora.random("oil", SIZES, seed=1)


@pytest.mark.parametrize(
    ("warm", "then"),
    [
        (REQUEST, changed_pixel(REQUEST)),
        (REQUEST, replace(REQUEST, vae_seed=43)),
        (REQUEST, replace(REQUEST, generator=torch.Generator().manual_seed(42).get_state().numpy().tobytes())),
        (REQUEST, replace(REQUEST, images=(picture().reshape(16, 64, 3),))),
        (REQUEST, replace(REQUEST, positions="raster")),
        (REQUEST, replace(REQUEST, lora=LORA)),
        (replace(REQUEST, lora=LORA), REQUEST),
        (replace(REQUEST, lora=LORA), replace(REQUEST, lora=Lora.random("oil", SIZES, seed=2))),
        (replace(REQUEST, lora=LORA), replace(REQUEST, lora=replace(LORA, scale=0.5))),
    ],
    ids=["one pixel", "vae seed", "vae generator", "grid", "layout", "lora", "no lora", "lora weights", "lora scale"],
)
def test_what_differs_before_or_in_the_image_is_not_reused(
    model: SmallDiT, warm: ImageRequest, then: ImageRequest
) -> None:
    stage = paged(model, IndexInProcess())
    run(stage, warm, "warm")
    found, counts = run(stage, then, "then")
    assert torch.equal(found, run(dense(model), then)[0])
    span = model.start(then).layouts[0].spans[0]
    text_only = 2 * (span.start // BLOCK) if (then.lora, then.positions) == (warm.lora, warm.positions) else 0
    assert counts.hit_blocks == text_only
    # The control: the very same request again is.
    assert run(stage, then, "again")[1].hit_blocks == 2 * (model.start(then).rows[0].prefix_len // BLOCK)


def test_a_second_image_is_another_where_its_draw_comes_later(model: SmallDiT) -> None:
    """The VAE draws for all images from one generator: the same picture in second place has other latents."""
    first, second = picture(1), picture(2, 16, 16)
    stage = paged(model, IndexInProcess())
    run(stage, replace(REQUEST, images=(first, second)), "warm")
    both = replace(REQUEST, images=(second, first))
    found, counts = run(stage, both, "swapped")
    assert torch.equal(found, run(dense(model), both)[0])
    assert counts.hit_blocks == 2 * (model.start(both).layouts[0].spans[0].start // BLOCK)


def test_a_draw_that_nobody_can_repeat_is_never_hit(model: SmallDiT) -> None:
    stage = paged(model, IndexInProcess())
    request = replace(REQUEST, vae_seed=None)
    for request_id in ("one", "two"):
        _, counts = run(stage, request, request_id)
    assert counts.hit_blocks == 2 * (model.start(request).layouts[0].spans[0].start // BLOCK)


def test_only_complete_prefix_blocks_go_to_the_node_and_they_do_not_change_later(model: SmallDiT) -> None:
    """The target's KV, which is new in each step, stays in the worker; so does the block that it shares."""
    saved: dict[bytes, list[torch.Tensor]] = {}

    class Watching(IndexInProcess):
        def save(self, request_id: str, blocks: Mapping[int, bytes], pages: KVPages) -> int:
            for page, block_hash in blocks.items():
                saved[block_hash] = [layer[page].clone() for layer in pages.layers]
            self.pages, self.blocks = pages, dict(blocks)
            return super().save(request_id, blocks, pages)

    node = Watching()
    stage = paged(model, node)
    _, counts = run(stage, REQUEST)
    rows = model.start(REQUEST).rows
    complete = sum(row.prefix_len // BLOCK for row in rows)
    leading = model.start(REQUEST).layouts[0].spans[0].end // BLOCK  # the same in both rows
    assert rows[0].prefix_len % BLOCK, "the last prefix block is shared with the target, which makes the test one"
    assert counts.saved_blocks == node.num_cached == complete - leading
    for page, block_hash in node.blocks.items():
        after = [layer[page] for layer in node.pages.layers]
        assert all(torch.equal(a, b) for a, b in zip(after, saved[block_hash], strict=True))
    # The control: pages that are no complete prefix did change between the first and the last step.
    first = stage_after(model, steps=1)
    assert first != stage_after(model, steps=4)


def stage_after(model: SmallDiT, steps: int) -> bytes:
    """All pages of a worker that ran ``steps`` steps of a request of four."""
    stage = paged(model)
    denoising = model.start(REQUEST)
    denoising.num_steps = steps
    assert stage._scheduler is not None
    stage._worker.run(denoising, stage._scheduler.admit("r", denoising.rows))
    assert stage._worker.pages is not None
    return b"".join(layer.numpy().tobytes() for layer in stage._worker.pages.layers)


def test_a_hit_that_cannot_be_brought_is_computed(model: SmallDiT) -> None:
    class Away(IndexInProcess):
        def load(self, request_id: str, hits: Mapping[int, bytes], pages: KVPages) -> None:
            for page in list(hits)[:2]:  # a part came, and it is wrong
                for layer in pages.layers:
                    layer[page] = 1e30
            raise DaemonLostError("the daemon is away")

    stage = paged(model, Away())
    expected, _ = run(stage, REQUEST, "cold")
    found, counts = run(stage, REQUEST, "warm")
    assert torch.equal(found, expected)
    assert (counts.failed_loads, counts.hit_blocks, counts.computed_tokens) == (1, 0, total(REQUEST, model))


def test_without_prefix_caching_nothing_is_hashed(model: SmallDiT, monkeypatch: pytest.MonkeyPatch) -> None:
    """G4"""

    class Forbidden:
        fingerprint = "never asked for"

        def __init__(self, loaded: SmallDiT) -> None:
            raise AssertionError("a hook was made")

    monkeypatch.setattr(hooks, "_hooks", dict(hooks._hooks))
    register_prefix_hook("small_dit", Forbidden)
    monkeypatch.setattr("stagecache.diffusion.scheduler.hash_prefix", Forbidden)
    for stage in (dense(model), paged(model)):
        assert run(stage, REQUEST)[1].hashed_blocks == 0
    with pytest.raises(AssertionError, match="a hook was made"):  # the control
        paged(model, IndexInProcess())


def test_a_request_with_one_row_and_one_without_images_are_served(model: SmallDiT) -> None:
    for request in (replace(REQUEST, guidance=1.0), replace(REQUEST, images=())):
        stage = paged(model, IndexInProcess())
        expected, _ = run(dense(model), request)
        for request_id in ("cold", "warm"):
            found, counts = run(stage, request, request_id)
            assert torch.equal(found, expected)
        assert counts.hit_blocks == sum(row.prefix_len // BLOCK for row in model.start(request).rows)


def test_pages_of_earlier_requests_are_never_seen(model: SmallDiT) -> None:
    """Few pages, so that each request lies where others lay."""
    stage = paged(model, IndexInProcess(), num_kv_blocks=28)
    for index, request in enumerate((REQUEST, OTHER_PROMPT, changed_pixel(REQUEST), REQUEST, OTHER_PROMPT)):
        assert torch.equal(run(stage, request, str(index))[0], run(dense(model), request)[0])
    assert stage._scheduler is not None
    assert stage._scheduler.num_free_blocks == 28


def test_a_request_that_fails_gives_everything_back(model: SmallDiT) -> None:
    node = IndexInProcess()
    stage = paged(model, node)
    run(stage, REQUEST, "warm")
    broken = model.start(REQUEST)
    broken.latents = torch.zeros(3, 3)
    stage._model.start, start = (lambda request: broken), stage._model.start  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError):
            stage.generate("broken", REQUEST)
    finally:
        stage._model.start = start  # type: ignore[method-assign]
    assert stage._scheduler is not None
    assert (stage._scheduler.num_free_blocks, len(node.leases)) == (64, 0)
    assert torch.isfinite(run(stage, REQUEST, "after")[0]).all()
