"""The life of a write, as one chain with one transition function (W4).

PENDING   claimed in the tables of the worker
QUEUED    a page is held for it
COPYING   its rows are on their way into the page
HOST_READY  the rows are in the page and the record is logged
WRITTEN   the daemon has consumed the record
FAILED    from any but WRITTEN
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class WriteState(IntEnum):
    """States in the order in which a write goes through them."""

    PENDING = 0
    QUEUED = 1
    COPYING = 2
    HOST_READY = 3
    WRITTEN = 4
    FAILED = 5


_NEXT = (*list(WriteState)[1:5], None, None)
"""By state: the one that follows; none leads on from WRITTEN and FAILED."""


class IllegalTransitionError(RuntimeError):
    """A write was asked to skip a state, to go back, or to leave a final one."""


@dataclass(slots=True)
class Write:
    """One write: of a step's rows, or of a request's deferred rows.

    what: for people: a step, or which request, key and write_n. step_id: of a step's.
    sequence: of its record; 0 before HOST_READY.
    """

    what: str
    state: WriteState = WriteState.PENDING
    sequence: int = 0
    cause: str = ""
    step_id: int = 0

    @property
    def name(self) -> str:
        """Which write this is. Put together when somebody asks: nobody does, as long as all goes well."""
        return f"{self.what} {self.step_id}" if self.step_id else self.what

    def advance(self, to: WriteState, *, sequence: int = 0, cause: str = "") -> None:
        """Go one step along the chain, or fail.

        Raises:
            IllegalTransitionError: any other move.
        """
        now = self.state
        if to is _NEXT[now]:
            if sequence:
                self.sequence = sequence
            self.state = to
            return
        if to is WriteState.FAILED:
            if now >= WriteState.WRITTEN:
                raise IllegalTransitionError(f"{self.name}: {now.name} is final, it cannot fail")
            self.cause = cause
            self.state = to
        else:
            raise IllegalTransitionError(f"{self.name}: from {now.name} to {to.name}")

    def settled(self, consumed: int) -> bool:
        """Whether the write is over; sees WRITTEN from the daemon's ``consumed``."""
        if self.state is WriteState.HOST_READY and self.sequence <= consumed:
            self.advance(WriteState.WRITTEN)
        return self.state >= WriteState.WRITTEN
