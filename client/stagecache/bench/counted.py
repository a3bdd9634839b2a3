"""What a step costs in counted work: calls, copies, allocations. The same on a busy machine as on a quiet one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stagecache.bench.attribution import counted_moves
from stagecache.bench.contenders import Contender
from stagecache.bench.measure import Step, settle

_EMPTY = {"empty", "empty_like", "new_empty"}


@dataclass(frozen=True)
class CountedStep:
    """One step of one contender.

    python_calls, c_calls: as sys.setprofile sees them, on the engine thread. buffers: tensors made by torch.empty and
    its like. copies, copied_bytes: of stagecache's host copies. held_blocks: memory blocks of the interpreter that the
    step's outputs hold. by_name: both kinds of calls, by name.
    """

    python_calls: int
    c_calls: int
    buffers: int
    copies: int
    copied_bytes: int
    held_blocks: int
    by_name: Counter[str]


def count_step(contender: Contender, steps: Sequence[Step]) -> CountedStep:
    """The cheapest of ``steps``, which are driven in order: some steps now and then do what others left.

    Each is driven right after one that is not counted, and counted once for calls, once for copies and memory.
    """
    counts = []
    for step in steps:
        settle(contender)
        _drive(contender, step)
        python, native = count_calls(contender, step)
        moved: dict[str, int] = {}
        with counted_moves(moved):
            before = sys.getallocatedblocks()
            kept = _drive(contender, step)
            held = sys.getallocatedblocks() - before
            del kept
        counts.append(
            CountedStep(
                sum(python.values()),
                sum(native.values()),
                sum(times for name, times in native.items() if name.rpartition(".")[2] in _EMPTY),
                moved.get("copies", 0),
                moved.get("engine", 0),
                held,
                python + native,
            )
        )
    return min(counts, key=lambda count: count.python_calls + count.c_calls)


def _drive(contender: Contender, step: Step) -> Any:
    drive, kept = _prepared(contender, step)
    drive()
    return kept


def _prepared(contender: Contender, step: Step, *, forward: bool = False) -> tuple[Callable[[], None], list[Any]]:
    """What drives the step, its plan made before; and where its outputs will be."""
    plan = contender.batch.plan(step.requests, step.counts)
    ids, count = list(contender.batch.ids), plan.total_num_scheduled_tokens
    kept: list[Any] = [None]

    def drive_step() -> None:
        contender.begin(plan)
        if forward:
            counting = sys.getprofile()
            sys.setprofile(None)
            contender.quiet()
            sys.setprofile(counting)
        kept[0] = contender.materialize(contender.save(step.rows, count), ids)

    return drive_step, kept


def count_calls(contender: Contender, step: Step, *, forward: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Python calls and C calls of a step by name, without those of the bench itself. forward: what was begun is done
    before the save, as behind a forward; so nothing is waited for.
    """
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    drive, _ = _prepared(contender, step, forward=forward)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and not frame.f_globals["__name__"].startswith("stagecache.bench"):
            python[getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1
        elif event == "c_call" and argument not in (sys.setprofile, sys.getprofile):
            native[getattr(argument, "__qualname__", repr(argument))] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        drive()
    finally:
        sys.setprofile(before)
    return python, native
