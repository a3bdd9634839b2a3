"""Mutated records against the real validator and the real consumer, on real segments, in this process.

After each record is asked:

    verdict     done or refused, as the reference says; anything else that is raised is a crash
    refusal     nothing that the daemon writes has changed, but the words that say so
    effect      only slots, keys, extents and results that the record names have changed (looked at now and then)
    bystander   another session beside it has every row that it had
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from stagecache_wire import layout, records
from stagecache_wire.geometry import KeySchema
from stagecache_wire.records import BadRecordError, KeyMode, Record
from stagecached import validate
from stagecached.consumer import Consumer
from stagecached.lookup import lookup
from stagecached.segments import SessionSegments
from tests.fuzz import reference
from tests.fuzz.grown import Bounds, grow
from tests.fuzz.mutate import EDGES_64, U64, Case, changed, mutate
from tests.fuzz.rules import Rules
from tests.unit.server.session_kit import KEYS as NARROW
from tests.unit.server.session_kit import Log, consumer_of, fill_page, hit, new_session, runs, save, snapshot

KEYS: dict[int, KeySchema] = {**NARROW, 3: KeySchema("broad", "float32", (256,))}
"""Rows of 5 to 1024 bytes: few gathers of the broad ones are more than the arena."""
WARM = 60
"""Good records before the first mutated one, so that there are claims to name."""
FAR = 0.005
"""How often the log is taken to be near the last sequence that can be."""
SLOW_S = 2.0


class Found(AssertionError):
    """The fuzz found something."""


@dataclass
class Result:
    """records: how many were tried. done, refused, idle: what became of them. slowest_s: of one record."""

    rules: Rules
    records: int = 0
    done: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    idle: int = 0
    slowest_s: float = 0.0
    took_s: float = 0.0

    def told(self) -> str:
        return (
            f"{self.records} records in {self.took_s:.0f} s ({self.records / max(self.took_s, 1e-9):.0f}/s): "
            f"{sum(self.done.values())} done, {self.refused} refused, {self.idle} never published; slowest "
            f"{self.slowest_s * 1000:.1f} ms\ndone: {dict(sorted(self.done.items()))}\n{self.rules.table()}"
        )


class Noting(Consumer):
    """Keeps what refused the last record, and what crashed it."""

    refusal: BaseException | None = None

    def _read(self, sequence: int) -> Record:
        try:
            return super()._read(sequence)
        except BaseException as error:
            self.refusal = error
            raise


class Bystander:
    """A session beside the one that is fuzzed, with rows that it knows."""

    def __init__(self, segments: SessionSegments) -> None:
        self.segments = segments
        self._log = Log(segments)
        self._consumer, self._told = consumer_of(segments)
        fill_page(segments, 0, salt=9)
        self._log.append(save(0, runs((0, 16)), *((key_id, KeyMode.ROWS) for key_id in segments.keys)))
        self._consumer._drain()
        self._before = snapshot(segments)

    def look(self) -> None:
        """
        Raises:
            Found: a byte of it has changed, or it does not work any more.
        """
        if snapshot(self.segments) != self._before:
            raise Found("the bystander's memory has changed")
        self._log._position = 0
        self._log.append(hit(runs((0, 16)), *((key_id, key_id, key_id * 1024) for key_id in self.segments.keys)))
        self._consumer._drain()
        for key_id, store in self.segments.keys.items():
            rows = bytes(store.segments()[0].map[: 16 * store.row_bytes])
            if bytes(self.segments.arena[key_id * 1024 : key_id * 1024 + len(rows)]) != rows or self._told:
                raise Found(f"the bystander's hit on key {key_id} is wrong: {self._told}")
        self._before = snapshot(self.segments)


class LogFuzz:
    """One session that is fuzzed. ``step`` tries one record."""

    def __init__(self, segments: SessionSegments, rules: Rules, seed: int) -> None:
        self.segments = segments
        self.rng = Random(seed)
        self.result = Result(rules)
        geometry = segments.geometry
        self.bounds = Bounds(
            geometry.num_blocks,
            geometry.num_slots,
            geometry.staging_capacity_tokens,
            geometry.staging_depth,
            geometry.max_results,
            geometry.arena_bytes,
            {key_id: schema.row_bytes for key_id, schema in KEYS.items()},
        )
        consumer, self._told = consumer_of(segments, Noting)
        assert isinstance(consumer, Noting)
        self.consumer = consumer
        for page in range(geometry.staging_depth):
            fill_page(segments, page, salt=page)
        log = Log(segments)
        for index in range(WARM):
            log.append(save(index % 2, runs((index % 16, 8)), (0, KeyMode.ROWS), (1, KeyMode.ROWS), (2, KeyMode.CLAIM)))
        consumer._drain()
        self._ring = segments.layout.payload_bytes
        self._payload_at = segments.layout.payload_word * layout.WORD
        self._position = 0

    def step(self) -> None:
        """
        Raises:
            Found: something that must not be.
        """
        segments, result = self.segments, self.result
        near, epoch_sequence = segments.consumed, segments.epoch_sequence
        far = self.rng.random() < FAR
        if far:
            segments.words[layout.D_CONSUMED] = layout.MAX_SEQUENCE + self.rng.choice((-2, -1, 0, 1, 1 << 40))
        sequence = segments.consumed + 1
        case = mutate(self.rng, grow(self.rng, self.bounds, sequence), self.bounds, sequence)
        head = self._publish(case, sequence)
        why, record = self._expected(case, head, sequence)
        looked = result.records % 64 == 0 or (why is None and self.rng.random() < 0.01)
        before = self._state() if looked else {}
        begun = time.perf_counter()
        self.consumer.refusal = None
        try:
            self.consumer._drain()
        except Exception as error:
            raise Found(f"{case.done}: crash by {type(error).__name__}: {error}") from error
        took_s = time.perf_counter() - begun
        result.records += 1
        result.slowest_s = max(result.slowest_s, took_s)
        if took_s > SLOW_S:
            raise Found(f"{case.done}: {took_s:.1f} s")
        self._judge(case, why, record, head, sequence, before)
        if far:
            segments.words[layout.D_CONSUMED] = segments.words[layout.W_HEAD] = near
            segments.words[layout.D_EPOCH_SEQUENCE] = epoch_sequence

    # ---- inside

    def _publish(self, case: Case, sequence: int) -> int:
        """Into the ring, as a worker does; the value of ``head``."""
        segments, words = self.segments, case.words
        start = self._position % self._ring
        if start + len(case.payload) > self._ring:
            start = self._position = 0
        if case.over:
            start = case.position = self._ring - case.over
        segments.control_bytes[self._payload_at + start : self._payload_at + start + len(case.payload)] = case.payload
        if words[layout.E_PAYLOAD_POSITION] == 0:
            words[layout.E_PAYLOAD_POSITION] = self._position if case.position is None else case.position
        self._position += (len(case.payload) + 7) // 8 * 8
        at = segments.layout.entry_word(sequence)
        segments.words[at : at + layout.ENTRY_WORDS] = memoryview(array("Q", words))
        segments.words[segments.layout.entry_word(sequence + 1)] = 0  # not one of an earlier time in its place
        head = sequence + case.head
        segments.words[layout.W_HEAD] = head
        return head

    def _expected(self, case: Case, head: int, sequence: int) -> tuple[str | None, reference.Plain | None]:
        """Why the record must be refused (None: it must be done), and the record."""
        words = case.words
        if head < sequence:
            return "idle", None
        if sequence >= 1 << 62:
            return "a claim word has no room", None
        if head - sequence >= 1024:
            return "head", None
        if words[0] != sequence:
            return "sequence", None
        start, length = words[2] % self._ring, words[3]
        if start + length > self._ring:
            return "ring", None
        raw = bytes(self.segments.control_bytes[self._payload_at + start : self._payload_at + start + length])
        record = reference.parse(words, raw)
        if isinstance(record, str):
            return record, None
        return reference.fault(record, self.bounds, sequence, self.segments.epoch), record

    def _judge(
        self,
        case: Case,
        why: str | None,
        record: reference.Plain | None,
        head: int,
        sequence: int,
        before: dict[str, Any],
    ) -> None:
        segments, result, refusal = self.segments, self.result, self.consumer.refusal
        done = segments.consumed == sequence
        if why == "idle":
            result.idle += 1
            if done or refusal is not None:
                raise Found(f"{case.done}: something was done that is not published")
        elif done != (why is None):
            verdict = "done" if done else f"refused ({refusal})"
            raise Found(f"{case.done}: {verdict}, and the reference says {why or 'good'}: {record}")
        if done:
            assert record is not None
            result.done[records.Kind(record.kind).name] += 1
            if before:
                self._check_effect(case, record, before)
            self._restore(record)
        if refusal is not None:
            if not isinstance(refusal, BadRecordError):
                raise Found(f"{case.done}: crash by {type(refusal).__name__}: {refusal}") from refusal
            if not result.rules.count(refusal):
                raise Found(f"{case.done}: refused by no rule that is known: {refusal}")
            result.refused += 1
            if segments.status != layout.STATUS_FAILED or not self._told:
                raise Found(f"{case.done}: refused, and nobody was told")
            if before and not done:
                self._same(case, before)
        elif not done and why != "idle" and head <= sequence:
            raise Found(f"{case.done}: neither done nor refused")
        self._begin_again(head)

    def _begin_again(self, head: int) -> None:
        """The session lives again, at the place where its log stopped."""
        segments = self.segments
        if self.consumer.failure is not None:
            self.consumer.failure = None
            segments.status = layout.STATUS_LIVE
            segments.words[layout.D_FAIL_REASON] = segments.words[layout.D_FAIL_SEQUENCE] = 0
            self._told.clear()
        segments.words[layout.W_HEAD] = segments.consumed
        for bell in (segments.worker_doorbell, segments.daemon_doorbell):
            while bell.value:
                bell.acquire(0)

    def _restore(self, record: reference.Plain) -> None:
        """What would take the ground from the records that follow."""
        segments = self.segments
        if record.kind == records.Kind.CLOSE_KEY:
            for key_id, schema in KEYS.items():
                if key_id not in segments.keys:
                    segments.open_key(key_id, schema)
                    fill_page(segments, 0, salt=key_id)
        elif record.kind == records.Kind.RESET:
            segments.words[layout.D_EPOCH] = 0

    def _state(self) -> dict[str, Any]:
        segments, state = self.segments, {}
        state["slots"] = segments.slot_words.copy()
        state["arena"] = segments.arena.copy()
        at = segments.layout.results_word
        state["results"] = np.frombuffer(segments.words[at : at + 8 * self.bounds.max_results].tobytes(), np.uint64)
        state["epoch"] = (segments.epoch, segments.epoch_sequence)
        state["keys"] = sorted(segments.keys)
        for key_id, store in segments.keys.items():
            state[f"pool{key_id}"] = np.frombuffer(store.segments()[1].map, np.uint8).copy()
            state[f"claims{key_id}"] = store.claims.copy()
            state[f"staging{key_id}"] = np.frombuffer(store.segments()[0].map, np.uint8).copy()
        return state

    def _same(self, case: Case, before: dict[str, Any]) -> None:
        for name, value in self._state().items():
            if not np.array_equal(value, before[name]):
                raise Found(f"{case.done}: refused, and yet {name} changed")

    def _check_effect(self, case: Case, record: reference.Plain, before: dict[str, Any]) -> None:
        """Whatever changed is named by the record."""
        kind, slots = records.Kind(record.kind).name, np.array(sorted(record.slots), np.int64)
        if kind == "FILL":  # this session is in no namespace, so what a FILL names becomes UNKNOWN
            size = self.segments.geometry.block_size
            slots = (slots[:, None] * size + np.arange(size)).reshape(-1)
        keys = {key for key, _ in record.keys}
        if kind == "CLOSE_KEY":
            return
        after = self._state()
        allowed: dict[str, Any] = {"slots": slots if kind in ("SAVE", "LOST", "FILL") else []}
        allowed["arena"] = [
            at
            for span, key, _, offset in record.gathers
            for at in range(offset, offset + record.spans[span][2] * self.bounds.keys[key])
        ]
        allowed["results"] = [8 * index + word for _, _, index, _ in record.gathers for word in range(8)]
        for key_id, row_bytes in self.bounds.keys.items():
            named = key_id in keys and kind in ("SAVE", "FLUSH", "FAIL")
            allowed[f"claims{key_id}"] = slots if named else []
            bytes_of = (slots[:, None] * row_bytes + np.arange(row_bytes)).reshape(-1)
            allowed[f"pool{key_id}"] = bytes_of if named and kind in ("SAVE", "FLUSH") else []
            allowed[f"staging{key_id}"] = []
        for name, places in allowed.items():
            changed = np.flatnonzero(before[name] != after[name])
            if not np.isin(changed, np.asarray(places, np.int64)).all():
                raise Found(f"{case.done}: {name} changed at places that the record does not name")
        if kind != "RESET" and after["epoch"] != before["epoch"]:
            raise Found(f"{case.done}: a new epoch by {kind}")


@contextmanager
def fuzzing(seed: int) -> Iterator[tuple[LogFuzz, Bystander]]:
    """A session to be fuzzed, and one beside it."""
    rules = Rules("BadRecordError", (validate, records), without=("encode",))
    with new_session(keys=KEYS) as segments, new_session() as other:
        yield LogFuzz(segments, rules, seed), Bystander(other)


def run(seed: int, count: int, *, look_every: int = 5000) -> Result:
    """Try ``count`` records.

    Raises:
        Found: the first thing that must not be.
    """
    begun = time.monotonic()
    with fuzzing(seed) as (fuzz, bystander):
        for index in range(count):
            fuzz.step()
            if index % look_every == 0:
                bystander.look()
        bystander.look()
        fuzz.result.took_s = time.monotonic() - begun
        return fuzz.result


def scribble(seed: int, count: int) -> Counter[str]:
    """Any word of header, worker words and daemon words holds any number, and a good record follows: it is done, or the
    session fails; it never stays live with nobody at work, and who looks at all sessions is not stopped by it.

    Returns how often each came.

    Raises:
        Found: something else.
    """
    became: Counter[str] = Counter()
    with fuzzing(seed) as (fuzz, bystander):
        segments, rng = fuzz.segments, fuzz.rng
        words_of = (range(16), range(layout.W_BASE, layout.W_BASE + 512), range(layout.D_BASE, layout.D_BASE + 96))
        for index in range(count):
            clean = segments.words[: 3 * layout.PAGE // layout.WORD].tobytes()
            for _ in range(rng.choice((1, 1, 2, 8))):
                at = rng.choice(rng.choice(words_of))
                segments.words[at] = changed(rng, segments.words[at], EDGES_64, U64)
            sequence = min(segments.consumed + 1, U64)
            if rng.random() < 0.7:  # the record that follows is published, wherever the log is now
                fuzz._publish(Case(*grow(rng, fuzz.bounds, max(sequence, 3)).encode(sequence)), sequence)
            try:
                fuzz.consumer._drain()
                failed = fuzz.consumer.failure is not None
            except Exception as error:
                if fuzz.consumer.failure is None or segments.status != layout.STATUS_FAILED:
                    raise Found(f"the consumer died of {type(error).__name__}: {error}, the session is live") from error
                failed = True
            became["failed" if failed else "done" if segments.consumed == sequence else "idle"] += 1
            _look_at_all(segments)
            for key_id, schema in KEYS.items():
                if key_id not in segments.keys:
                    segments.open_key(key_id, schema)
            segments.words[: 3 * layout.PAGE // layout.WORD] = memoryview(clean).cast("Q")
            fuzz._begin_again(0)
            if index % 500 == 0:
                bystander.look()
        bystander.look()
    return became


def _look_at_all(segments: SessionSegments) -> None:
    """What Stats and Lookup read of a session."""
    for store in segments.keys.values():
        store.present_slots(segments.slot_words, segments.epoch_sequence)
    lookup(segments, np.arange(2), [5], [])
