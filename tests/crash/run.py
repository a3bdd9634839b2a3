"""One crash run: a worker under load, and daemons that die under it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.crash.load import Load, WrongError, wait_until
from tests.crash.mutants import Mutant
from tests.crash.supervisor import Supervisor
from tests.crash.workload import Workload

STEPS_AFTER = 30
"""Steps on the last daemon, which stays."""


@dataclass
class Report:
    """What a run came to. wrong: what was found, empty where all was well."""

    steps: int = 0
    rows: int = 0
    deaths: int = 0
    records: int = 0
    took_s: float = 0.0
    wrong: str = ""
    kills: dict[str, int] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)


def kill_plan(points: Sequence[str], times: int, seed: int, *, farthest: int = 4) -> list[dict[str, Any]]:
    """Each point ``times`` times, in random order, each at one of its first ``farthest`` visits."""
    rng = Random(seed)
    plan = [{"point": point, "visit": rng.randint(1, farthest)} for point in points for _ in range(times)]
    rng.shuffle(plan)
    return plan


def crash_run(
    folder: Path,
    plan: Sequence[dict[str, Any]],
    *,
    seed: int,
    mutant: Mutant | None = None,
    deadline_s: float = 90.0,
    workload: Workload | None = None,
    hold_s: float = 0.02,
    **load: Any,
) -> Report:
    """Run a load until every death of the plan has happened, and some steps more.

    What goes wrong is in the report, not raised: mutants are held to it.
    """
    report = Report()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if mutant is not None:
            stack.enter_context(mutant.client())
        keeper = Supervisor(folder, plan, seed=seed, hold_s=hold_s, mutant=mutant.name if mutant is not None else "")
        stack.enter_context(keeper)

        def settled(load: Load) -> None:
            """A new key is opened by a call: the daemon must be there, and not die in it."""
            session = load.cache.session

            def idle() -> bool:
                session.check()
                return session.log.consumed == session.log.head and keeper.serves()

            wait_until(idle, "a daemon without work")

        worker = Load(keeper.socket, seed, before_new_key=settled, workload=workload, **load)
        stack.callback(worker.close)
        try:
            after = STEPS_AFTER
            while after:
                worker.run_step()
                after -= keeper.planned
                keeper.check()
                if time.monotonic() - started > deadline_s:
                    raise WrongError(f"only {len(keeper.deaths)} of {len(plan)} deaths in {deadline_s:g} s")
            worker.finish()
        except WrongError as error:
            report.wrong = str(error)
        report.steps, report.rows = worker.steps, worker.checked_rows
        report.records = worker.cache.session.log.head
        report.deaths = len(keeper.deaths)
    report.kills, report.visits = dict(keeper.kills), dict(keeper.visits)
    report.took_s = time.monotonic() - started
    return report
