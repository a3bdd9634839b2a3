"""The model and the simulated engines, by themselves. That the model says what docs/semantics.md says is tested in
tests/rules, where every example runs on it too."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.driver import Mismatch, Plan, Run
from tests.model.engine import Engine
from tests.model.mutants import MUTANTS
from tests.model.reference import ReferenceCache
from tests.model.rows import rows_at
from tests.model.setups import SETUPS
from tests.model.steps import HIDDEN, Outputs, Refused, Rules, Scheduled, Schema, Step
from tests.model.strategies import plan_of

TWIN_SEEDS = 300
MUTANT_SEEDS = 400


def run_twins(plan: Plan, twin: type[ReferenceCache]) -> Run:
    setup = SETUPS[plan.setup]
    run = Run(plan, setup, ReferenceCache(setup.rules), twin(setup.rules), None)
    run.execute()
    return run


def test_the_model_agrees_with_itself_and_sequences_reach_every_situation() -> None:
    """The driver's sequences must hold what they are for, or agreement means little."""
    seen: Counter[str] = Counter()
    for seed in range(TWIN_SEEDS):
        for line in run_twins(plan_of(seed), ReferenceCache).trace:
            seen.update(situations(line))
    wanted = {
        "arrival with a hit": 300,
        "arrival without a hit": 300,
        "resumed": 100,
        "comes again": 100,
        "preempted": 100,
        "reuse with a finish": 100,
        "reuse with a preemption": 100,
        "nothing scheduled": 100,
        "discard_step": 50,
        "reset()": 100,
        "new epoch": 20,
        "UnreadableHitError": 100,
        "SchemaMismatchError": 50,
        "StepTooLargeError": 2,
        "SlotMismatchError": 20,
        "HitNotCoveredError": 50,
        "UnknownRequestError": 20,
        "StepConsumedError": 50,
    }
    assert {name: seen[name] for name, least in wanted.items() if seen[name] < least} == {}


def situations(line: str) -> set[str]:
    """What a line of a trace shows."""
    found = {word for word in ("resumed", "discard_step", "reset()", "new epoch", "nothing scheduled") if word in line}
    found |= {word.rstrip(":") for word in line.split() if word.rstrip(":").endswith("Error")}
    found |= {"comes again"} if " again" in line else set()
    for part in line.split("; "):
        if " new" in part:
            found.add("arrival without a hit" if "@0+" in part else "arrival with a hit")
    if "preempted " in line:
        found.add("preempted")
        found |= {"reuse with a preemption"} if " new" in line or " resumed" in line else set()
    if "finished " in line and " new" in line:
        found.add("reuse with a finish")
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_driver_finds_each_broken_rule(mutant: type[ReferenceCache]) -> None:
    """Control: a model with one rule broken is told apart."""
    for seed in range(MUTANT_SEEDS):
        try:
            run_twins(plan_of(seed), mutant)
        except Mismatch:
            return
    pytest.fail(f"{MUTANT_SEEDS} sequences do not tell {mutant.__name__} from the rules: {mutant.__doc__}")


def test_a_plan_runs_the_same_way_twice() -> None:
    assert run_twins(plan_of(3), ReferenceCache).trace == run_twins(plan_of(3), ReferenceCache).trace


def test_rows_tell_their_position_and_their_write() -> None:
    schema = Schema("float32", (2,))
    rows = [*rows_at(schema, 1, range(100)).rows, *rows_at(schema, 2, range(100)).rows]
    assert len(set(rows)) == 200
    assert rows_at(schema, 1, [5]).rows == rows_at(schema, 1, range(6)).rows[5:]
    assert set(rows_at(Schema("bool", ()), 1, range(50)).rows) == {b"\0", b"\1"}


def test_the_engine_hits_what_the_same_step_computes() -> None:
    engine = Engine(num_blocks=8, block_size=4)
    engine.arrive([1, 2, 3, 4, 5], decode=1)
    engine.arrive([1, 2, 3, 4, 9], decode=1)
    first, second = engine.schedule(budget=20, chunk=20).batch
    assert (first.first, second.first, second.blocks[0]) == (0, 4, first.blocks[0])


def test_the_engine_reuses_blocks_in_the_output_that_carries_the_finish() -> None:
    engine = Engine(num_blocks=2, block_size=4)
    engine.arrive([1, 2, 3, 4, 5], decode=0)
    step = engine.schedule(20, 20)
    engine.advance(step)
    engine.arrive([7, 7, 7, 7, 7], decode=0)
    again = engine.schedule(20, 20)
    assert again.finished == ("r1",)
    assert set(again.batch[0].blocks) == set(step.batch[0].blocks)


def test_the_engine_preempts_the_youngest_and_resumes_it() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    engine.arrive([1] * 8, decode=3)
    engine.arrive([2] * 8, decode=3)
    engine.advance(engine.schedule(20, 20))
    step = engine.schedule(20, 20)
    assert (step.preempted, [request.req_id for request in step.batch]) == (("r2",), ["r1"])
    while not any(request.how == "resumed" for request in step.batch):
        engine.advance(step)
        step = engine.schedule(20, 20)
    assert step.batch[0].req_id == "r2"


def test_blocks_keep_their_hash_until_they_are_reused_tail_first() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    engine.arrive(list(range(9)), decode=0)
    step = engine.schedule(20, 20)
    engine.advance(step)
    first, second, tail = step.batch[0].blocks
    assert list(engine.pool.free)[1:] == [tail, second, first]
    engine.arrive([50] * 7, decode=0)
    assert set(engine.schedule(20, 20).batch[0].blocks).isdisjoint({first, second})
    assert set(engine.pool.hash_of) >= {first, second}


def test_the_model_refuses_what_is_not_consumable() -> None:
    cache = ReferenceCache(Rules(schemas={HIDDEN: Schema("uint8", ())}))
    cache.new_step_starts(Step((Scheduled("a", (0,), 0, 2, "new"),)))
    step_id = cache.save_outputs(Outputs(rows_at(Schema("uint8", ()), 1, range(2)), {}, 2, 2))
    assert len(cache.materialize(step_id, ["a"])[HIDDEN]["a"].rows) == 2
    with pytest.raises(Refused, match="StepConsumedError"):
        cache.discard_step(step_id)
