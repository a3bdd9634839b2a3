"""Mutated records against a real daemon: workers without an engine publish them, each until its session fails.

The verdicts are those of the reference, the reasons those that the daemon tells; a bystander works beside them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from stagecache.control import connect_observer
from stagecache_wire import layout, records, shm
from stagecache_wire.geometry import Geometry
from stagecached import validate
from tests.daemon_process import DaemonProcess, poll_until
from tests.fuzz import reference
from tests.fuzz.beside import Beside
from tests.fuzz.call_fuzz import RECORDS, Found, Worker
from tests.fuzz.grown import Bounds, grow
from tests.fuzz.mutate import Case, mutate
from tests.fuzz.rules import Rules

ANSWER_S = 20.0


@dataclass
class Result:
    rules: Rules
    records: int = 0
    done: int = 0
    took_s: float = 0.0

    def told(self) -> str:
        return (
            f"{self.records} records in {self.took_s:.0f} s, {self.done} done, {self.rules.counts.total()} sessions "
            f"failed\n{self.rules.table()}"
        )


class Victim:
    """A session of which every record may be its last."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.worker = Worker(daemon.socket)
        answer = self.worker.answer
        assert answer is not None
        sizes = answer.geometry
        geometry = Geometry(
            sizes.num_blocks, sizes.block_size, sizes.staging_capacity_tokens, sizes.staging_depth, sizes.arena_bytes,
            sizes.max_results,
        )  # fmt: skip
        self.bounds = Bounds(
            geometry.num_blocks,
            geometry.num_slots,
            geometry.staging_capacity_tokens,
            geometry.staging_depth,
            geometry.max_results,
            geometry.arena_bytes,
            {opened.key_id: opened.key.row_bytes for opened in answer.keys},
        )
        self.layout = layout.ControlLayout.of(geometry)
        self.segment = shm.open_segment(answer.control_segment)
        self.words = self.segment.view.cast("Q")
        self.bell = shm.open_semaphore(answer.daemon_doorbell)
        self.position = 0

    def publish(self, case: Case, sequence: int) -> str | None:
        """Put a record into the log and ring; why it must be refused, None where it must be done."""
        ring, words = self.layout.payload_bytes, case.words
        start = self.position % ring
        if start + len(case.payload) > ring:
            start = self.position = 0
        at = self.layout.payload_word * layout.WORD
        self.segment.view[at + start : at + start + len(case.payload)] = case.payload
        if words[layout.E_PAYLOAD_POSITION] == 0:
            words[layout.E_PAYLOAD_POSITION] = self.position if case.position is None else case.position
        self.position += (len(case.payload) + 7) // 8 * 8
        entry = self.layout.entry_word(sequence)
        self.words[entry : entry + layout.ENTRY_WORDS] = memoryview(array("Q", words))
        why = self._fault(words, ring, at, sequence)
        self.words[layout.W_HEAD] = sequence
        self.bell.release()
        return why

    def _fault(self, words: list[int], ring: int, at: int, sequence: int) -> str | None:
        start, length = words[layout.E_PAYLOAD_POSITION] % ring, words[layout.E_PAYLOAD_LENGTH]
        if words[0] != sequence:
            return "sequence"
        if start + length > ring:
            return "ring"
        record = reference.parse(words, bytes(self.segment.view[at + start : at + start + length]))
        if isinstance(record, str):
            return record
        why = reference.fault(record, self.bounds, sequence, self.words[layout.D_EPOCH])
        if why is None and record.kind == records.Kind.CLOSE_KEY:
            self.bounds.keys.pop(record.keys[0][0], None)
        return why

    def settled(self, sequence: int) -> bool:
        """Whether the record is done, or the session failed."""
        return self.words[layout.D_CONSUMED] >= sequence or self.words[layout.D_STATUS] != layout.STATUS_LIVE

    def end(self) -> None:
        self.bell.close()
        self.worker.end()


@contextmanager
def victim_of(daemon: DaemonProcess) -> Iterator[Victim]:
    victim = Victim(daemon)
    try:
        yield victim
    finally:
        victim.end()


def run(daemon: DaemonProcess, seed: int, count: int) -> Result:
    """Publish ``count`` records.

    Raises:
        Found: a verdict other than the reference's, or no verdict. WrongError: the bystander's rows.
    """
    rng, begun = Random(seed), time.monotonic()
    result = Result(Rules("BadRecordError", (validate, records), without=("encode",)))
    with Beside(daemon.socket) as beside:
        while result.records < count:
            with victim_of(daemon) as victim:
                sequence = RECORDS
                while result.records < count and victim.bounds.keys:
                    sequence += 1
                    case = mutate(rng, grow(rng, victim.bounds, sequence), victim.bounds, sequence)
                    case.head = 0  # what a head elsewhere does is tried in one process
                    why = victim.publish(case, sequence)
                    poll_until(lambda v=victim, s=sequence: v.settled(s), f"a verdict on {case.done}", ANSWER_S)  # type: ignore[misc]
                    result.records += 1
                    failed = victim.words[layout.D_STATUS] == layout.STATUS_FAILED
                    if failed == (why is None):
                        raise Found(f"{case.done}: failed {failed}, and the reference says {why or 'good'}")
                    if failed:
                        told = failure(daemon, victim)
                        if not result.rules.count_text(told):
                            raise Found(f"{case.done}: refused by no rule that is known: {told}")
                        break
                    result.done += 1
            if result.rules.counts.total() % 50 == 0:
                beside.look()
        beside.look()
        beside.end()
    result.took_s = time.monotonic() - begun
    return result


def failure(daemon: DaemonProcess, victim: Victim) -> str:
    """Why the daemon says that the session failed."""

    def look() -> str:
        with connect_observer(daemon.socket, timeout_s=20.0) as observer:
            found = {session.session_id: session.failure for session in observer.stats().sessions}
        return found.get(victim.worker.credentials.session_id, "")

    return poll_until(look, "the reason of the failure", ANSWER_S)
