"""What must come out right however late the streams run, as small stories.

Each is run by test_ordering.py on the cache as it is, and by test_mutants.py on caches with a wait taken out, where it
must fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tests.daemon_process import poll_until
from tests.device.cache import DeviceCache
from tests.model.steps import Refused
from tests.rules.builder import Result, Stage, kinds, numbers, refusal, spelled


class Make(Protocol):
    """Makes a Stage on a fake device; ``settings`` go to DeviceCache."""

    def __call__(self, settings: dict[str, Any] | None = None, **rules: Any) -> Stage: ...


def device_of(stage: Stage) -> DeviceCache:
    assert isinstance(stage.cache, DeviceCache)
    return stage.cache


class Elsewhere:
    """A call on a thread of its own, which is either done or waits."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1, "elsewhere")
        self._future: Future[Any] = self._pool.submit(call)

    def waits(self, function: str) -> bool:
        """Look until the call is over or a thread stands in ``function``. Whether it stands there."""

        def look() -> bool:
            return self._future.done() or _stands_in(function)

        poll_until(look, f"a thread in {function}")
        return not self._future.done()

    def result(self) -> Any:
        try:
            return self._future.result(30.0)
        finally:
            self._pool.shutdown()


def _stands_in(function: str) -> bool:
    for top in sys._current_frames().values():
        frame: Any = top
        while frame is not None:
            if (
                frame.f_code.co_qualname.endswith(function)
                if sys.version_info >= (3, 11)
                else (frame.f_code.co_name == function.rpartition(".")[2])
            ):
                return True
            frame = frame.f_back
    return False


# -------------------------------------------------------------- the stories


def overwritten_buffers(make: Make) -> None:
    """W1, S3: the forward is not done at save, and the next one overwrites its buffers before the first copy."""
    stage = make(deferred=frozenset({"late"}))
    for first in range(0, 12, 4):
        out = stage.step(f"a:[0,1,2]@{first}+4", k=first, late=first + 1, ref=numbers([first, 9]))
        assert out["a"] == spelled("a", first, first + 4)
        assert out.numbers("a") == " ".join([str(first)] * 4)
        assert out.numbers("a", "late") == " ".join([str(first + 1)] * 4)
        assert out.numbers("a", "ref") == f"{first} 9"
    assert stage.step("b:[0,1,2,3]@12+1", k=7)["b"] == f"{spelled('a', 0, 12)} b12"


def padded_batches(make: Make) -> None:
    """K1: rows beyond n, of a padded forward, reach neither page nor result."""
    stage = make()
    assert stage.step("a:[0]@0+3", padded=8, k="1 2 3")["a"] == "a0 a1 a2"
    assert stage.step("a@3+1", padded=4, k=4)["a"] == "a3"
    assert stage.step("b:[0,1]@4+1", padded=2, k=5)["b"] == "a0 a1 a2 a3 b4"


def pool_rows(make: Make) -> None:
    """The record is published behind its copies: what the daemon wrote into the pool is what the forward made."""
    stage = make()
    for number in range(6):
        stage.saved(f"a{number}:[{number}]@0+4", k=number).discard()
    hits = [f"b{number}:[{number},{10 + number}]@4+1" for number in range(6)]
    out = stage.step(*hits, k=9)
    for number in range(6):
        assert out[f"b{number}"] == f"{spelled(f'a{number}', 0, 4)} b{number}4"
        assert out.numbers(f"b{number}") == f"{number} {number} {number} {number} 9"


def same_step_hits(make: Make) -> None:
    """H6, H8: a hit on rows of the very step, and a late one whose slots got a new tenant since."""
    stage = make()
    stage.step("old:[0]@0+4", k=1)
    out = stage.saved("a:[0]@0+4", "b:[0,1]@4+1", k=2)
    stage.step("c:[0]@0+4", k=3)
    merged = out.materialize()
    assert merged["b"] == f"{spelled('a', 0, 4)} b4"
    assert merged.numbers("b") == "2 2 2 2 2"


def begin_behind_save(make: Make) -> None:
    """A hit planned while an older step's copies are on their way is gathered behind that step's rows."""
    stage = make()
    stage.step("old:[0]@0+4", k=1)
    cache = device_of(stage)
    cache.streams.gate.clear()
    stage.saved("a:[0]@0+4", k=2).discard()
    hit = stage.saved("b:[0,1]@4+1", k=3)
    cache.streams.gate.set()
    assert hit.materialize()["b"] == f"{spelled('a', 0, 4)} b4"


def materialize_waits(make: Make) -> None:
    """Rows of page, deferred keys and leftovers are handed out once they are there, not before."""
    stage = make(deferred=frozenset({"late"}))
    cache = device_of(stage)
    cache.streams.gate.clear()
    saved = stage.saved("a:[0]@0+2", k=5, late=6, ref=numbers([7]))
    handed = Elsewhere(saved.materialize)
    waits = handed.waits("Copies.wait")
    cache.streams.gate.set()
    out: Result = handed.result()
    assert out["a"] == "a0 a1"
    assert out.numbers("a") == "5 5"
    assert out.numbers("a", "late") == "6 6"
    assert out.numbers("a", "ref") == "7"
    assert waits


def engine_goes_on(make: Make) -> None:
    """W1: with no event of the device happening at all, the engine thread begins and saves step after step."""
    stage = make(deferred=frozenset({"late"}))
    stage.step("a:[0]@0+4", k=1, late=1)
    cache = device_of(stage)
    cache.streams.waited.clear()
    cache.streams.gate.clear()
    steps = [
        stage.saved("b:[1]@0+4", k=2, late=2, ref=numbers([1])),
        stage.saved("b:[1,2]@4+1", finished="a", k=3, late=3),
        stage.saved("c:[1,3]@4+1", k=4),
    ]
    assert not cache.streams.waited or set(cache.streams.waited) == {"stagecache-sender"}
    cache.streams.gate.set()
    assert [step.materialize().merged for step in steps]
    assert stage.step("d:[0,4]@4+1", k=5, late=9).numbers("d", "late") == "1 1 1 1 9"


def deferred_flush(make: Make) -> None:
    """W3: a flush joins clones of many steps; each goes on under the live buffers, the budget pushes out the oldest."""
    for budget in (1 << 20, 64):
        stage = make({"gpu_staging_bytes": budget}, deferred=frozenset({"k"}))
        for first in range(0, 12, 3):
            stage.step(f"a:[0,1,2]@{first}+3", k=f"{first} {first + 1} {first + 2}")
        out = stage.step("b:[0,1,2,3]@12+1", k=77)
        assert out.numbers("b") == " ".join(map(str, range(12))) + " 77"
        stage.begin(finished="b")
        assert stage.step("c:[0,1,2,4]@12+1", k=5).numbers("c") == " ".join(map(str, range(12))) + " 5"


def failed_copy(make: Make) -> None:
    """W5, W8: a copy that fails costs its step: an error at materialize and at the next call, UNKNOWN behind it."""
    stage = make()
    stage.step("a:[0]@0+4", k=1)
    cache = device_of(stage)
    for failure in ("fail_copies", "fail_calls"):
        stage.begin("b:[1]@0+4")
        setattr(cache.streams, failure, 1)
        saved = stage.save(k=2)
        assert kinds(refusal(saved.materialize)) == {"FailedWriteError"}
        _told_at_begin(stage, "c:[2]@0+4")
        assert stage.save(k=3).materialize()["c"], "the cache goes on"
        assert kinds(refusal(stage.saved("d:[1,3]@4+1", k=4).materialize)) == {"UnreadableHitError"}
        assert stage.step("e:[2,3]@4+1", k=5).numbers("e") == "3 3 3 3 5"
        stage.begin(finished="b c d e")
    assert cache.cache.counters.lost_steps == 2


def _told_at_begin(stage: Stage, *terms: str) -> None:
    """The next call reports a copy that failed; its step is noted all the same."""
    cache = device_of(stage)
    poll_until(
        lambda: cache.cache.session.stream is not None and cache.cache.session.stream.sender.failures, "the failure"
    )
    assert kinds(refusal(lambda: stage.begin(*terms))) == {"FailedWriteError"}
    cache.view.show(stage.begun)


def failed_flush(make: Make) -> None:
    """W5: a flush whose copy fails costs exactly its rows, and the next call says so."""
    stage = make(deferred=frozenset({"late"}))
    stage.step("a:[0]@0+4", late=1)
    cache = device_of(stage)
    cache.streams.fail_copies = 1
    stage.begin(finished="a")
    _told_at_begin(stage)
    assert kinds(refusal(stage.saved("b:[0,1]@4+1", late=2).materialize)) == {"UnreadableHitError"}
    assert stage.step("c:[2]@0+4", finished="b", late=3).numbers("c", "late") == "3 3 3 3"
    assert stage.step("d:[2,3]@4+1", finished="c", late=4).numbers("d", "late") == "3 3 3 3 4"


def page_under_a_copy(make: Make) -> None:
    """W7: a save fails when its copies are on their way. Its page goes to the next step only behind them."""
    stage = make(depth=1)
    stage.step("a:[0]@0+4", k=1)
    cache = device_of(stage)
    session = cache.cache.session
    append = session.append
    cache.streams.gate.clear()
    stage.begin("b:[1]@0+4")

    def refuse(*_: Any) -> int:
        session.append = append  # type: ignore[method-assign]
        raise Refused(["Interrupted"])

    session.append = refuse  # type: ignore[method-assign]
    assert kinds(refusal(lambda: stage.save(k=2))) == {"Interrupted"}
    stage.begin("c:[2]@0+4")
    cache.host = True
    saving = Elsewhere(lambda: stage.save(k=3))
    saving.waits("StepPages.wait")
    cache.streams.gate.set()
    assert saving.result().materialize()["c"] == "c0 c1 c2 c3"
    cache.host = False
    out = stage.step("d:[2,3]@4+1", k=4)
    assert (out["d"], out.numbers("d")) == ("c0 c1 c2 c3 d4", "3 3 3 3 4")


def key_given_up(make: Make) -> None:
    """K1: a provisional key that proves to be none is closed; its pages are unpinned behind the copies into them."""
    stage = make()
    cache = device_of(stage)
    cache.streams.gate.clear()
    stage.saved("p:[60]@0+1", "q:[61]@0+1", k=1, guess=numbers([1, 2])).discard()
    before = len(cache.streams.pinned)
    out = stage.saved("p@1+2", "q@1+2", k=1, guess=numbers([1, 2]))
    cache.streams.gate.set()
    assert out.materialize().numbers("p", "guess") == "1 2"
    poll_until(lambda: len(cache.streams.pinned) == before - 1, "the pages to be unpinned")
    wrong, cache.streams.wrong = cache.streams.wrong, []
    assert not wrong


def memory_that_cannot_be_pinned(make: Make) -> None:
    """Copies into it block, so they are the sender's; nothing else changes."""
    stage = make({"refuse_pins": True}, deferred=frozenset({"late"}))
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1, late=2)
    cache.streams.waited.clear()
    cache.streams.gate.clear()
    saved = stage.saved("b:[0,1]@4+1", k=3, late=4, ref=numbers([5, 6, 7]))
    cache.streams.gate.set()
    out = saved.materialize()
    assert (out["b"], out.numbers("b"), out.numbers("b", "ref")) == ("a0 a1 a2 a3 b4", "1 1 1 1 3", "5 6 7")
    assert out.numbers("b", "late") == "2 2 2 2 4"
    assert set(cache.streams.waited) == {"stagecache-sender"}
    assert cache.device.pins.pinned_bytes == 0


def inside_inference_mode(make: Make) -> None:
    """vLLM's runners save inside it, consumers may be outside; tensors made on either side are written on both."""
    for refuse_pins in (False, True):
        with torch.inference_mode():
            stage = make({"refuse_pins": refuse_pins, "slab_bytes": 4096}, deferred=frozenset({"late"}))
            stage.saved("a:[0]@0+4", k=1, late=2, ref=numbers(range(2000))).discard()
            saved = stage.saved("b:[0,1]@4+1", k=3, late=4, ref=numbers(range(2000)))
        out = saved.materialize()
        assert out["b"] == "a0 a1 a2 a3 b4"
        assert out.numbers("b", "late") == "2 2 2 2 4"
        assert out.numbers("b", "ref") == " ".join(map(str, range(2000)))


STORIES: tuple[Callable[[Make], None], ...] = (
    overwritten_buffers,
    padded_batches,
    pool_rows,
    same_step_hits,
    begin_behind_save,
    materialize_waits,
    engine_goes_on,
    deferred_flush,
    failed_copy,
    failed_flush,
    page_under_a_copy,
    key_given_up,
    memory_that_cannot_be_pinned,
    inside_inference_mode,
)
