"""What a step costs in counted work: calls, copies, allocations. The same on a busy machine as on a quiet one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stagecache.bench.attribution import counted_moves
from stagecache.bench.contenders import Contender
from stagecache.bench.measure import Step

_EMPTY = "empty"


@dataclass(frozen=True)
class CountedStep:
    """One step of one contender.

    python_calls, c_calls: as sys.setprofile sees them, on the engine thread. buffers: calls of torch.empty.
    copies, copied_bytes: of stagecache's host copies. held_blocks: memory blocks of the interpreter that the step's
    outputs hold. by_name: both kinds of calls, by name.
    """

    python_calls: int
    c_calls: int
    buffers: int
    copies: int
    copied_bytes: int
    held_blocks: int
    by_name: Counter[str]


def count_step(contender: Contender, step: Step) -> CountedStep:
    """Drive one step and count. The step's plan is made before."""
    plan = contender.batch.plan(step.requests, step.counts)
    ids, count = list(contender.batch.ids), plan.total_num_scheduled_tokens
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    kept: list[Any] = []

    def drive() -> None:
        contender.begin(plan)
        kept.append(contender.materialize(contender.save(step.rows, count), ids))

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            python[name] += 1
        elif event == "c_call":
            native[getattr(argument, "__qualname__", repr(argument))] += 1

    _profiled(drive, profile)
    held = _held_blocks(contender, step)
    python.subtract({name: 1 for name in (drive.__qualname__, drive.__name__) if name in python})
    native.subtract({"setprofile": 1, "list.append": 1})
    python -= Counter(
        {name: times for name, times in python.items() if name.startswith((type(contender).__name__ + ".",))}
    )
    moved: dict[str, int] = {}
    with counted_moves(moved):
        _drive_plainly(contender, step)
    return CountedStep(
        sum(python.values()),
        sum(native.values()),
        native[_EMPTY],
        moved.get("copies", 0),
        moved.get("engine", 0),
        held,
        python + native,
    )


def _profiled(drive: Callable[[], None], profile: Callable[[Any, str, Any], None]) -> None:
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        drive()
    finally:
        sys.setprofile(before)


def _held_blocks(contender: Contender, step: Step) -> int:
    before = sys.getallocatedblocks()
    kept = _drive_plainly(contender, step)
    held = sys.getallocatedblocks() - before
    del kept
    return held


def _drive_plainly(contender: Contender, step: Step) -> Any:
    plan = contender.batch.plan(step.requests, step.counts)
    ids, count = list(contender.batch.ids), plan.total_num_scheduled_tokens
    contender.begin(plan)
    return contender.materialize(contender.save(step.rows, count), ids)
