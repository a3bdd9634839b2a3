"""Images whose span ends inside a block, on vLLM's real scheduler: who shares rows, and what is computed again.

The worked example of docs/vllm-omni.md: block size 16, an image of 24 placeholders at 20..43, so that block 2 (32..47)
is half image, half text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm_omni.core.prefix_cache import OmniPrefixCacheManager, runner_mixin

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.shim.omni import SidecarPrefixCacheManager, patch
from tests.daemon_process import DaemonProcess
from tests.omni.mini import BLOCK, PLACEHOLDER, Image, MiniRunner, content_rows, make_scheduler, request

BEFORE, AFTER, OTHER = list(range(100, 120)), list(range(200, 240)), list(range(300, 340))
PROMPT = [*BEFORE, *[PLACEHOLDER] * 24, *AFTER]
"""84 tokens: 5 full blocks of 16."""

X, Y = Image("image-x", 20, 24), Image("image-y", 20, 24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    write_checkpoint(directory, ModelShape(hidden=64, layers=1, vocab=2048, max_len=1024))
    return directory


class Engines:
    """Makes MiniRunners, with the daemon or without."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.made: list[MiniRunner] = []

    def __call__(self, **settings: int) -> MiniRunner:
        self.made.append(MiniRunner(make_scheduler(self.checkpoint, **settings)))
        return self.made[-1]


@pytest.fixture(params=["in-process", "sidecar"])
def engine(
    request: pytest.FixtureRequest, checkpoint: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engines]:
    ranks = SimpleNamespace(is_last_rank=True, world_size=1, rank_in_group=0)
    for module in (gpu_model_runner, parallel_state):
        monkeypatch.setattr(module, "get_pp_group", lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: ranks)
    patch.apply(runner_mixin)
    if request.param == "sidecar":
        monkeypatch.setenv("STAGECACHE_SOCKET", str(daemon.socket))
    else:
        monkeypatch.delenv("STAGECACHE_SOCKET", raising=False)
    engines = Engines(checkpoint)
    yield engines
    for runner in engines.made:
        wanted = SidecarPrefixCacheManager if request.param == "sidecar" else OmniPrefixCacheManager
        assert type(runner.omni_prefix_cache) is wanted
        runner.shutdown()


def served(runner: MiniRunner, name: str, tokens: list[int], *images: Image) -> int:
    """Run one request; checks its rows against an uncached run; its hit length."""
    runner.add(request(name, tokens, *images), *images)
    output, rows = runner.step()
    hit = int(output.scheduled_new_reqs[0].num_computed_tokens)
    parts = [rows[name], *([more[name]] if name in (more := runner.run()) else [])]
    got = torch.cat(parts)
    want = content_rows([*tokens, 7], images)
    assert torch.equal(got, want[: got.shape[0]]), f"{name}: rows of something else"
    assert got.shape[0] == len(tokens) + 1
    return hit


def test_the_same_image_is_shared_whole(engine: Engines) -> None:
    """80 of 84 tokens hit; the encoder does not run again."""
    runner = engine()
    assert served(runner, "first", PROMPT, X) == 0
    assert served(runner, "again", PROMPT, X) == 80
    assert runner.encoded == ["image-x"]


def test_another_image_with_equal_placeholders_shares_only_what_is_before_it(engine: Engines) -> None:
    """Only block 0 is before the image: blocks 1 to 4 have another content, though the tokens are equal."""
    runner = engine()
    served(runner, "first", PROMPT, X)
    assert served(runner, "other", PROMPT, Y) == BLOCK
    assert runner.encoded == ["image-x", "image-y"]
    assert served(runner, "again", PROMPT, X) == 80
    assert served(runner, "other again", PROMPT, Y) == 80


def test_a_block_that_is_half_image_half_text_is_computed_again_and_merged(engine: Engines) -> None:
    """Same image, another text behind it: the hit of 32 ends inside the image (20..43); rows 32 on are computed, the
    image's from its encoder output, which the engine's encoder cache still holds."""
    runner = engine()
    served(runner, "first", PROMPT, X)
    assert served(runner, "other text", [*PROMPT[:44], *OTHER], X) == 2 * BLOCK
    assert runner.encoded == ["image-x"], "served from the engine's encoder cache"


def test_an_evicted_encoder_output_is_computed_again(engine: Engines) -> None:
    """Its cache holds one image; the rows before the hit's end need none."""
    runner = engine(encoder_cache=24)
    served(runner, "first", PROMPT, X)
    served(runner, "other", PROMPT, Y)
    assert served(runner, "other text", [*PROMPT[:44], *OTHER], X) == 2 * BLOCK
    assert runner.encoded == ["image-x", "image-y", "image-x"]
    assert served(runner, "again", PROMPT, Y) == 80
    assert runner.encoded[3:] == [], "a hit over the whole image needs no encoder"


def test_two_requests_with_one_image_in_one_step(engine: Engines) -> None:
    """The second hits blocks that the first writes in this very step (H6)."""
    runner = engine()
    for name, image in (("a", X), ("b", X), ("c", Y)):
        runner.add(request(name, PROMPT, image), image)
    output, rows = runner.step()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 80, BLOCK]
    for name, image in (("a", X), ("b", X), ("c", Y)):
        assert torch.equal(rows[name], content_rows(PROMPT, [image]))
    runner.run()


def test_an_image_across_the_edge_of_a_chunk(engine: Engines) -> None:
    """Prefill in chunks of 32: the image's rows are saved by two steps, and hit as one."""
    runner = engine(budget=32)
    served(runner, "first", PROMPT, X)
    assert served(runner, "again", PROMPT, X) == 80


def test_a_moved_image_is_another_content(engine: Engines) -> None:
    """The same image one token later: nothing from its block on is shared."""
    runner = engine()
    served(runner, "first", PROMPT, X)
    moved = [*BEFORE, 555, *[PLACEHOLDER] * 24, *AFTER]
    assert served(runner, "moved", moved, Image("image-x", 21, 24)) == BLOCK


def test_several_images_in_one_prompt(engine: Engines) -> None:
    """The hit ends where the first difference is: the second image."""
    runner = engine()
    prompt = [*BEFORE, *[PLACEHOLDER] * 24, *BEFORE, *[PLACEHOLDER] * 24, *AFTER]
    second = Image("image-y", 64, 24)
    served(runner, "first", prompt, X, second)
    assert served(runner, "same", prompt, X, second) == 112
    assert served(runner, "different", prompt, X, Image("image-z", 64, 24)) == 64
