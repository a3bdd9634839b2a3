"""One crash run: a worker under load, and daemons that die under it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from stagecache_wire.names import RunPaths
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from tests.crash.load import Load, WrongError
from tests.crash.mutants import Mutant
from tests.crash.supervisor import Supervisor
from tests.crash.workload import Workload


@dataclass
class Report:
    """What a run came to. wrong: what was found, empty where all was well."""

    steps: int = 0
    rows: int = 0
    deaths: int = 0
    records: int = 0
    took_s: float = 0.0
    wrong: str = ""
    back_s: list[float] = field(default_factory=list)
    back_own_s: list[float] = field(default_factory=list)
    """From each death until the next daemon answered; ``own``: on a CPU that nobody else wants."""
    shm: list[tuple[int, int]] = field(default_factory=list)
    """Files and bytes of the node in /dev/shm, after each step."""
    kills: dict[str, int] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)


def kill_plan(points: Sequence[str], times: int, seed: int, *, farthest: int = 4) -> list[dict[str, Any]]:
    """Each point ``times`` times, in random order, each at one of its first ``farthest`` visits."""
    rng = Random(seed)
    plan = [{"point": point, "visit": rng.randint(1, farthest)} for point in points for _ in range(times)]
    rng.shuffle(plan)
    return plan


def in_shared_memory(socket: Path) -> tuple[int, int]:
    """Files and bytes of a daemon and its sessions."""
    files = size = 0
    for path in SHM_DIRECTORY.glob(f"*{PREFIX}.{RunPaths.of(socket).node}.*"):
        try:
            size += path.stat().st_blocks * 512
            files += 1
        except FileNotFoundError:
            continue
    return files, size


def crash_run(
    folder: Path,
    plan: Sequence[dict[str, Any]],
    *,
    seed: int,
    workers: int = 1,
    mutant: Mutant | None = None,
    hold_s: float = 0.02,
    deadline_s: float = 90.0,
    steps_after: int = 30,
    workload: dict[str, Any] | None = None,
    **load: Any,
) -> Report:
    """Run loads until every death of the plan has happened, and some steps more.

    workers: sessions that take turns. hold_s: longest time without a daemon, in which they run ahead. steps_after:
    steps on the last daemon, which stays. workload, load: settings of Workload and Load. What goes wrong is in the
    report, not raised: mutants are held to it.
    """
    report = Report()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if mutant is not None:
            stack.enter_context(mutant.client())
        keeper = Supervisor(folder, plan, seed=seed, hold_s=hold_s, mutant=mutant.name if mutant is not None else "")
        stack.enter_context(keeper)
        loads = []
        for index in range(workers):
            steps = Workload(seed + 1000 * index, **(workload or {}))
            loads.append(Load(keeper.socket, seed + index, workload=steps, stage=f"stage{index}", **load))
            stack.callback(loads[-1].close)
        keeper.begin()
        try:
            after = steps_after
            while after:
                for each in loads:
                    each.run_step()
                after -= keeper.planned
                report.shm.append(in_shared_memory(keeper.socket))
                keeper.check()
                if time.monotonic() - started > deadline_s:
                    raise WrongError(f"not all deaths in {deadline_s:g} s, {keeper.next_death()} did not come")
            for each in loads:
                each.finish()
        except WrongError as error:
            report.wrong = str(error)
        report.steps = sum(each.steps for each in loads)
        report.rows = sum(each.checked_rows for each in loads)
        report.records = sum(each.cache.session.log.head for each in loads)
        report.deaths = len(keeper.deaths)
    report.back_s, report.back_own_s = list(keeper.back_s), list(keeper.back_own_s)
    report.kills, report.visits = dict(keeper.kills), dict(keeper.visits)
    report.took_s = time.monotonic() - started
    return report
