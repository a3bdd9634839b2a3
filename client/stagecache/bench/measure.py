"""Driving one contender, step by step, and what each step cost: by phase, by thread, by process."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagecache.bench.batch import BenchRequest, Rows
from stagecache.bench.contenders import Contender
from stagecache.policy import HIDDEN_KEY

_QUIET_NS = 300_000


class WrongRowsError(AssertionError):
    """A contender handed out rows that are not those that it was given."""


@dataclass(frozen=True)
class StepSample:
    """One step on the engine thread, in nanoseconds. total: the phases' sum; thread_cpu: the forward's included."""

    begin: int
    save: int
    materialize: int
    thread_cpu: int

    @property
    def total(self) -> int:
        return self.begin + self.save + self.materialize


@dataclass
class BlockSample:
    """A few steps of one contender in a row, and what the processes spent on them.

    engine_cpu, daemon_cpu: nanoseconds, from the first step until all was quiet; the checking of rows is not in it.
    faults, switches: of the engine process. consumed_at: steps that the daemon had behind it are not waited for.
    """

    steps: list[StepSample] = field(default_factory=list)
    engine_cpu: int = 0
    daemon_cpu: int = 0
    faults: int = 0
    switches: int = 0


@dataclass(frozen=True)
class Step:
    """One step to drive. expected: rows of each request that must be handed out, hit rows included."""

    requests: Sequence[BenchRequest]
    counts: Sequence[int]
    rows: Rows
    expected: Sequence[Rows]
    forward_s: float = 0.0


Forward = Callable[[float], None]
"""What runs between begin and save, for so many seconds. It gives up the interpreter lock."""


def sleeping(seconds: float) -> None:
    """A forward that leaves the CPU idle, as one on a GPU may."""
    time.sleep(seconds)


class Working:
    """A forward that multiplies matrices on the engine thread and torch's others, as a model on a CPU does."""

    def __init__(self) -> None:
        self._rows, self._weights = torch.ones(16, 1024), torch.ones(1024, 1024)
        self._out = torch.empty(16, 1024)

    def __call__(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.mm(self._rows, self._weights, out=self._out)


FORWARDS: dict[str, Callable[[], Forward]] = {"sleep": lambda: sleeping, "work": Working}


def run_step(contender: Contender, step: Step, forward: Forward = sleeping) -> tuple[StepSample, Any, list[str]]:
    """Drive one step. Every request's tensor of every key is taken out inside the timing."""
    batch, rows = contender.batch, step.rows
    plan = batch.plan(step.requests, step.counts)
    ids, count = list(batch.ids), plan.total_num_scheduled_tokens
    cpu = time.thread_time_ns()
    at_begin = time.perf_counter_ns()
    contender.begin(plan)
    at_forward = time.perf_counter_ns()
    if step.forward_s:
        forward(step.forward_s)
    at_save = time.perf_counter_ns()
    step_id = contender.save(rows, count)
    at_materialize = time.perf_counter_ns()
    outputs = contender.materialize(step_id, ids)
    taken = [outputs.hidden_states[req_id] for req_id in ids]
    for name in rows.outputs:
        of_key = outputs.mm_outputs[name]
        taken += [of_key[req_id] for req_id in ids]
    at_end = time.perf_counter_ns()
    cpu = time.thread_time_ns() - cpu
    sample = StepSample(at_forward - at_begin, at_materialize - at_save, at_end - at_materialize, cpu)
    return sample, outputs, ids


def check(contender: Contender, step: Step, outputs: Any, ids: Sequence[str]) -> None:
    """Compare every row with what went in.

    Raises:
        WrongRowsError: a row is missing or another.
    """
    for req_id, expected in zip(ids, step.expected, strict=True):
        for name, rows in expected.by_key().items():
            found = outputs.hidden_states[req_id] if name == HIDDEN_KEY else outputs.mm_outputs[name][req_id]
            if found.shape != rows.shape or not np.array_equal(_bytes(found), _bytes(rows)):
                raise WrongRowsError(f"{contender.name}: rows of key {name} of request {req_id} are not what was saved")


def run_block(
    contender: Contender,
    steps: Sequence[Step],
    daemon_pid: int | None,
    *,
    checked: bool = True,
    forward: Forward = sleeping,
) -> BlockSample:
    """Drive steps back to back, then compare all of their rows, outside of every figure."""
    block = BlockSample()
    kept = []
    until_idle()  # The last block's rows were compared by threads that spin on for a while.
    before = resource.getrusage(resource.RUSAGE_SELF)
    daemon, engine = process_cpu_ns(daemon_pid), time.process_time_ns()
    for step in steps:
        sample, outputs, ids = run_step(contender, step, forward)
        block.steps.append(sample)
        kept.append((step, outputs, ids))
    settle(contender)
    after = resource.getrusage(resource.RUSAGE_SELF)
    block.engine_cpu = time.process_time_ns() - engine
    block.daemon_cpu = process_cpu_ns(daemon_pid) - daemon
    block.faults = after.ru_minflt - before.ru_minflt
    block.switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    for step, outputs, ids in kept if checked else ():
        check(contender, step, outputs, ids)
    return block


def settle(contender: Contender, limit_s: float = 2.0) -> None:
    """Wait until the contender's other threads and processes have done what the steps left for them."""
    contender.quiet()
    until_idle(limit_s)


def until_idle(limit_s: float = 2.0) -> None:
    """Wait until no thread of this process uses a CPU."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        spent = time.process_time_ns()
        time.sleep(0.001)
        if time.process_time_ns() - spent < _QUIET_NS:
            return


def process_cpu_ns(pid: int | None) -> int:
    """CPU time of all threads of a process, from /proc; 0 where there is none."""
    if pid is None:
        return 0
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:  # the thread ended
            continue
    return total


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, pages of shared memory left out."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _bytes(rows: torch.Tensor) -> Any:
    return rows.contiguous().view(torch.uint8).numpy()
