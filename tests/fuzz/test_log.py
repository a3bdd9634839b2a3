"""Mutated records of the log, in this process: each done or refused as it must be, and no other session touched.

Counts of the long forms: STAGECACHE_FUZZ_RECORDS (1,000,000), STAGECACHE_FUZZ_SEED.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from stagecache_wire import records
from stagecached import consumer, validate
from tests.fuzz.log_fuzz import Found, Result, fuzzing, run, scribble
from tests.fuzz.rules import raises, without_rule

RECORDS = int(os.environ.get("STAGECACHE_FUZZ_RECORDS", "1000000"))
SEED = int(os.environ.get("STAGECACHE_FUZZ_SEED", "1"))
SHORT = 3000
UNTIL_NOTICED = 20_000
MIB = 1 << 20

RULES: list[tuple[Any, int]] = [
    (module, index)
    for module in (validate, records)
    for index, (function, _) in enumerate(raises(ast.parse(inspect.getsource(module)), "BadRecordError"))
    if function != "encode"
]
"""Each refusal of validator and decoder, by module and number."""


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def judge(result: Result) -> None:
    assert result.rules.never == [], "a validator that never says no is not tested"
    assert result.rules.counts.total() == result.refused
    assert set(result.done) == {kind.name for kind in records.Kind}, "good records are still done, of each kind"


def test_mutated_records_are_done_or_refused_as_they_must_be() -> None:
    judge(run(SEED, SHORT, look_every=500))


def test_scribbled_words_fail_their_session_at_most() -> None:
    """Not the records alone: any word of the control segment that a worker can reach."""
    became = scribble(SEED, 600)
    assert min(became["done"], became["idle"], became["failed"]) > 0


@pytest.mark.parametrize("number", range(2, len(RULES), 5))
def test_the_fuzz_notices_a_rule_that_is_taken_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notice_without(number, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(RULES)))
def test_the_fuzz_notices_any_rule_that_is_taken_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notice_without(number, monkeypatch)


def notice_without(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with this one refusal gone from the daemon's source, the fuzz finds something."""
    module, index = RULES[number]
    rule, names = without_rule(module, "BadRecordError", index)
    for name in ("BadRecordError", "Kind", "KeyMode", "Record"):
        names[name] = getattr(records, name)
    for name in ("read_entry", "check_record", "decode"):
        if name in names and module in (validate, records) and names[name].__module__ == module.__name__:
            monkeypatch.setattr(consumer, name, names[name])
    with fuzzing(SEED + 1) as (fuzz, bystander):
        try:
            for _ in range(UNTIL_NOTICED):
                fuzz.step()
        except Found:
            bystander.look()
            return
    pytest.fail(f"{UNTIL_NOTICED} records, and nothing wrong was found without: {rule}")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_mutated_records(capsys: pytest.CaptureFixture[str]) -> None:
    begun = anonymous_bytes()
    result = run(SEED, RECORDS)
    grown = anonymous_bytes() - begun
    with capsys.disabled():
        print(f"\n{result.told()}\nanonymous memory of this process {grown / MIB:+.1f} MiB")
    judge(result)
    assert grown < 32 * MIB


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_scribbled_words() -> None:
    became = scribble(SEED, RECORDS // 10)
    assert min(became["done"], became["idle"], became["failed"]) > 0
