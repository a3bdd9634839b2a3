"""The notation of docs/semantics.md, made into steps, rows and readable results.

    stage = Stage(make_cache)                            # any cache that speaks tests.model.steps
    stage.step("a:[0,1]@0+8")                            # begin, save and materialize one step
    stage.step("b:[0,1]@8+2", "c@8+1")["b"]              # -> "a0 a1 a2 a3 a4 a5 a6 a7 b8 b9"

``ID:[blocks]@FIRST+COUNT`` is a request of the step: its whole block table, the first position computed in the step
and the tokens scheduled. Blocks may be left out where they did not change. An id that is not live is an arrival, with
its first FIRST positions from the prefix cache; a live one goes on, unless a word says that it comes again:

    again      in scheduled_new_reqs although live: an async_chunk continuation, or a V2 runner's resume
    resumed    in resumed_req_ids
    idle       in the batch, not in the scheduler's output

Hidden rows are named by who computed them and where, ``a3``, with one prime for each further time that the same
request computes that position. Other keys hold one small int a token: ``k=5`` for all tokens of the step,
``k="5 6 7"`` for each. Results read back as such words, so an expectation is a string.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.model.reference import ReferenceCache
from tests.model.steps import HIDDEN, Cache, Outputs, Refused, Rules, Scheduled, Schema, Step, Tensor

TERM = re.compile(r"(?P<id>\w+)(:\[(?P<blocks>[\d, ]*)\])?@(?P<first>\d+)\+(?P<count>-?\d+)(?P<words>( \w+)*)")

HIDDEN_SCHEMA = Schema("float32", (3,))
NUMBER_SCHEMA = Schema("int64", ())
WIDE = Schema("float32", (5,))
"""Not how any key is opened."""


class Result:
    """What one materialize handed out, read as words."""

    def __init__(self, merged: Mapping[str, Mapping[str, Any]], names: Mapping[bytes, str]):
        self.merged = merged
        self._names = names

    def __getitem__(self, request: str) -> str:
        """Hidden rows of a request, as words; empty where it got none."""
        return self.key(HIDDEN, request)

    def key(self, key: str, request: str) -> str:
        """Rows of a key, as words: names of hidden rows, numbers of others."""
        value = self.merged.get(key, {}).get(request)
        if value is None:
            return ""
        assert isinstance(value, Tensor), value
        if key == HIDDEN:
            return " ".join(self._names.get(row, "?" + row.hex()) for row in value.rows)
        return " ".join(str(int.from_bytes(row, "little", signed=True)) for row in value.rows)

    def numbers(self, request: str, key: str = "k") -> str:
        return self.key(key, request)


class Saved:
    """A step that was saved and not yet consumed."""

    def __init__(self, stage: Stage, step_id: int, req_ids: list[str]):
        self._stage = stage
        self.step_id = step_id
        self.req_ids = req_ids

    def materialize(self, *req_ids: str) -> Result:
        """Consume it for ``req_ids``, or for all requests of its batch."""
        merged = self._stage.cache.materialize(self.step_id, list(req_ids) or self.req_ids)
        return Result(merged, self._stage.names)

    def discard(self) -> None:
        self._stage.cache.discard_step(self.step_id)


class Stage:
    """Drives one cache step by step."""

    def __init__(self, make_cache: Callable[[Rules], Cache], **rules: Any):
        self.rules = Rules(**{"schemas": {HIDDEN: HIDDEN_SCHEMA}, **rules})
        self.cache = make_cache(self.rules)
        self.real = not isinstance(self.cache, ReferenceCache)
        self.names: dict[bytes, str] = {}
        self._tables: dict[str, tuple[int, ...]] = {}
        self._computed: Counter[tuple[str, int]] = Counter()
        self._next_row = 0
        self.begun = Step()

    def begin(self, *terms: str, finished: str = "", preempted: str = "", new_epoch: bool = False) -> Step:
        """new_step_starts. ``finished`` and ``preempted`` are ids with blanks between."""
        for req_id in finished.split():
            self._tables.pop(req_id, None)
        batch = tuple(self._parse(term) for term in terms)
        step = Step(batch, tuple(finished.split()), tuple(preempted.split()), new_epoch)
        self.begun = step
        self.cache.new_step_starts(step)
        return step

    def save(self, *, hidden: bool | Schema = True, padded: int | None = None, **mm: Any) -> Saved:
        """save_outputs of the step that began.

        Args:
            hidden: False for none, a schema for rows of another dtype or shape.
            padded: rows of the hidden states; the ones beyond the step's tokens are noise.
            mm: per key a number for all tokens, words for each, a Tensor, or a leftover.
        """
        n = self.begun.tokens
        padded = n if padded is None else padded
        rows = self._hidden_rows() + [b"\x7f" * 12] * (padded - n) if hidden else None
        tensor = None if rows is None else Tensor(HIDDEN_SCHEMA.dtype, HIDDEN_SCHEMA.row_shape, tuple(rows))
        if isinstance(hidden, Schema):
            tensor = rows_of(hidden, 1, n)
        values = {key: self._numbers(value, n) for key, value in mm.items()}
        return self.save_raw(Outputs(tensor, values, n, padded))

    def save_raw(self, outputs: Outputs) -> Saved:
        """save_outputs with exactly these."""
        step_id = self.cache.save_outputs(outputs)
        return Saved(self, step_id, [request.req_id for request in self.begun.batch])

    def saved(self, *terms: str, finished: str = "", preempted: str = "", **outputs: Any) -> Saved:
        """begin and save."""
        self.begin(*terms, finished=finished, preempted=preempted)
        return self.save(**outputs)

    def step(self, *terms: str, finished: str = "", preempted: str = "", **outputs: Any) -> Result:
        """begin, save and materialize."""
        return self.saved(*terms, finished=finished, preempted=preempted, **outputs).materialize()

    def _parse(self, term: str) -> Scheduled:
        match = TERM.fullmatch(term)
        assert match, f"not a request of a step: {term!r}"
        req_id, words = match["id"], match["words"].split()
        blocks = self._tables.get(req_id, ())
        if match["blocks"] is not None:
            blocks = tuple(int(block) for block in match["blocks"].replace(",", " ").split())
        how = "cached" if req_id in self._tables else "new"
        for word in words:
            how = {"again": "new", "resumed": "resumed", "idle": "idle"}[word]
        self._tables[req_id] = blocks
        return Scheduled(req_id, blocks, int(match["first"]), int(match["count"]), how)

    def _hidden_rows(self) -> list[bytes]:
        rows = []
        for request in self.begun.batch:
            for position in range(request.first, request.first + request.tokens):
                self._next_row += 1
                row = self._next_row.to_bytes(4, "little") * 3
                self.names[row] = f"{request.req_id}{position}" + "'" * self._computed[request.req_id, position]
                self._computed[request.req_id, position] += 1
                rows.append(row)
        return rows

    @staticmethod
    def _numbers(value: Any, n: int) -> Any:
        if isinstance(value, int):
            value = " ".join([str(value)] * n)
        if not isinstance(value, str):
            return value
        return numbers(int(word) for word in value.split())


def numbers(values: Iterable[int]) -> Tensor:
    """A key's tensor of one int64 a token."""
    rows = tuple(value.to_bytes(8, "little", signed=True) for value in values)
    return Tensor(NUMBER_SCHEMA.dtype, NUMBER_SCHEMA.row_shape, rows)


def rows_of(schema: Schema, fill: int, count: int) -> Tensor:
    """A tensor of ``count`` rows, all bytes ``fill``."""
    empty = Tensor(schema.dtype, schema.row_shape, ())
    return empty.with_rows([bytes([fill]) * empty.row_bytes] * count)


def spelled(request: str, begin: int, end: int) -> str:
    """Names of the hidden rows that ``request`` computed first at positions [begin, end)."""
    return " ".join(f"{request}{position}" for position in range(begin, end))


def refusal(call: Callable[[], Any]) -> Refused | None:
    """The refusal that ``call`` ends with, if it does."""
    try:
        call()
    except Refused as error:
        return error
    return None


def kinds(error: Refused | None) -> frozenset[str]:
    """Names of the errors that a refusal may be; none where there was none."""
    return error.kinds if error else frozenset()
