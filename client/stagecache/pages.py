"""Staging pages: which step holds which, and when one is free. Derived, never stored in shared memory.

A page is free when its step was handed out (consumed by materialize or discard) and the daemon has consumed its
record. A key that is written deferred uses its own pages for flushes, each free when its record is consumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagecache.errors import StagingTimeoutError
from stagecache.interrupts import Wakeups
from stagecache.log import WAIT_SLICE_S, LogWriter
from stagecache.writes import Write

if TYPE_CHECKING:
    from stagecache.copies import Copies
    from stagecache.mapping import StagedKey
    from stagecache.sender import LogSender
    from stagecache.session import Session


def _somebody() -> object:
    return True


@dataclass(slots=True)
class PageUse:
    """Who holds a page. ``sequence`` 0: its record is not logged (yet, or ever). ``holder``: a weak reference to the
    saved step; where that was collected without being handed out (something interrupted it), nobody wants the page.
    ``copies``: from a device into the page; it is nobody else's before they have landed, whatever became of the record
    (W7).
    """

    page: int
    step_id: int
    sequence: int = 0
    handed_out: bool = False
    write: Write | None = None
    holder: Callable[[], object] = _somebody
    copies: Copies | None = None

    @property
    def over(self) -> bool:
        """Nobody will read the page any more."""
        return self.handed_out or self.holder() is None

    def landed(self, consumed: int) -> bool:
        """The daemon has done its record, and no copy from a device is under way."""
        return self.sequence <= consumed and (self.copies is None or self.copies.done)


class StepPages:
    """The ``staging_depth`` pages of steps (W2).

    One thread claims; any thread marks a page handed out.
    """

    def __init__(self, depth: int, log: LogWriter | LogSender) -> None:
        self._uses: list[PageUse | None] = [None] * depth
        self._log = log
        self._changed = Wakeups()
        self._next = 0
        self.scarce = False
        """At the last claim at most one further page was free: the step after the next one may wait for the daemon."""

    def try_claim(self, step_id: int) -> PageUse | None:
        """A free page, or None."""
        uses, consumed = self._uses, self._log.consumed
        depth, found, free = len(uses), -1, 0
        for page in range(self._next - depth, self._next):  # Counted from the end where negative: once around.
            use = uses[page]
            # As ``over`` and ``landed`` say, without a call a page.
            if use is None or (
                (use.handed_out or use.holder() is None)
                and use.sequence <= consumed
                and (use.copies is None or use.copies.done)
            ):
                free += 1
                if found < 0:
                    found = page % depth
        if found < 0:
            return None
        self._next = (found + 1) % depth
        self.scarce = free < 3
        claimed = uses[found] = PageUse(found, step_id)
        return claimed

    def wait(self, slice_s: float) -> None:
        """Sleep until a page may have become free, for ``slice_s`` seconds at most."""
        consumed = self._log.consumed
        if any(use is not None and use.over and not use.landed(consumed) for use in self._uses):
            self._log.listen(min(slice_s, WAIT_SLICE_S))
            return
        # Made before it looks: a page is handed out before its thread wakes who waits.
        sleep = self._changed.sleeper()
        if not any(use is None or use.over for use in self._uses):
            sleep(slice_s)

    def hand_out(self, use: PageUse) -> None:
        """The step of this page was consumed. Any thread; twice does nothing."""
        use.handed_out = True
        if self._changed.sleepers:
            self._changed.wake()

    def abandon(self, step_id: int) -> None:
        """The step failed: its page is nobody's. Where its record got out, the daemon has still to read the page."""
        for use in self._uses:
            if use is not None and use.step_id == step_id:
                use.sequence = max(use.sequence, self._log.head)
                self.hand_out(use)

    def unconsumed(self) -> list[int]:
        """Step ids that hold a page and were neither materialized nor discarded."""
        return [use.step_id for use in self._uses if use is not None and not use.over]

    def outstanding(self) -> list[int]:
        """Sequences of logged pages that the daemon has not consumed."""
        consumed = self._log.consumed
        return [use.sequence for use in self._uses if use is not None and use.sequence > consumed]

    def timeout_error(self, waited_s: float) -> StagingTimeoutError:
        """The error of a full house."""
        unconsumed, outstanding = self.unconsumed(), self.outstanding()
        consumed = self._log.consumed
        writes = [use.write for use in self._uses if use is not None and use.write is not None]
        stuck = [f"{write.name} {write.state.name}" for write in writes if not write.settled(consumed)]
        return StagingTimeoutError(
            f"no staging page became free in {waited_s:g} s: {len(self._uses)} pages, held by steps {unconsumed} that "
            f"were neither materialized nor discarded, and by records {outstanding} that the daemon has not consumed "
            f"({', '.join(stuck) or 'no write is stuck'}).",
            unconsumed=unconsumed,
            outstanding=outstanding,
            remedy="Consume each step id once, or raise staging_depth.",
        )


class FlushPages:
    """Pages of one deferred key, each free when its FLUSH is consumed (W3)."""

    def __init__(self, depth: int) -> None:
        self._sequences = [0] * depth
        self._next = 0

    @property
    def next_free_at(self) -> int:
        """The sequence that must be consumed before ``take`` may be called."""
        return self._sequences[self._next]

    def take(self) -> int:
        """The next page; its last FLUSH is consumed."""
        page = self._next
        self._next = (page + 1) % len(self._sequences)
        return page

    def logged(self, page: int, sequence: int) -> None:
        """The page belongs to the FLUSH ``sequence`` until that is consumed."""
        self._sequences[page] = sequence


class FlushLog:
    """Flush pages of every deferred key of a session: what deferred rows need of the log. Engine thread only."""

    def __init__(self, session: Session, claim_timeout_s: float) -> None:
        """claim_timeout_s: longest wait for a page, in seconds."""
        self._session = session
        self._claim_timeout_s = claim_timeout_s
        self._pages: dict[int, FlushPages] = {}

    def claim(self, key: StagedKey) -> int:
        """A page of the key that the daemon has done with.

        Raises:
            StageCacheError: none in time, or the daemon is gone.
        """
        pages = self._pages.get(key.key_id)
        if pages is None:
            pages = self._pages[key.key_id] = FlushPages(self._session.geometry.staging_depth)
        what = f"a flush page of key {key.schema.name}"
        self._session.wait_consumed(pages.next_free_at, self._claim_timeout_s, what, kind="flush")
        return pages.take()

    def logged(self, key: StagedKey, page: int, sequence: int) -> None:
        """The FLUSH ``sequence`` names the page."""
        self._pages[key.key_id].logged(page, sequence)
