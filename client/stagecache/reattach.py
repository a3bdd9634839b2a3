"""Attaching in the background: a worker that found no daemon, or whose session is over, gets a session by itself.

A thread of its own asks again and again, with jittered and growing pauses; the engine thread only looks whether a
session has come (``Attacher.session``), and begins a new epoch with it at the next step.

The engine thread may be interrupted anywhere (Ctrl-C). So a session that has come stays where it is until whoever takes
it goes on with it; every part of taking it may be done twice, and the next step begins again where one was cut short.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from stagecache.attachment import Attachment
from stagecache.errors import BudgetError, DaemonLostError, DaemonUnavailableError, StageCacheError
from stagecache.session import Session

PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Between tries while nobody answers."""
REFUSED_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries that a daemon refuses (another ABI, no room), and before the first after a session that lived shortly.
"""
SHORT_LIFE_S: Final = 60.0

logger = logging.getLogger("stagecache")


class Attacher:
    """Calls ``attach`` until it gives a session.

    Args:
        attach: makes a session, or raises.
        what: whose it is, for the log.
        first_pause_s: before the first try.
        known: an error that was told already.

    Attributes:
        session: what was attached; None until then. It stays until ``stop``, so that it can be taken anew by a step
            that was interrupted while it took it.
        last_error: why the last try failed.
    """

    def __init__(
        self, attach: Callable[[], Session], what: str, *, first_pause_s: float = 0.0, known: Exception | None = None
    ) -> None:
        self.session: Session | None = None
        self.last_error = "" if known is None else _text_of(known)
        self._attach = attach
        self._what = what
        self._first_pause_s = first_pause_s
        self._begun = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to ask, where that has not begun: it may be called again."""
        if not self._begun:
            threading.Thread(target=self._run, name="stagecache-attach", daemon=True).start()

    def stop(self, taken: Session | None = None) -> None:
        """Attach no more. A session that nobody took is given back, also one that is still being made.

        taken: a session that is somebody's by now.
        """
        self._stopped.set()
        with self._lock:
            session, self.session = self.session, None
        if session is not None and session is not taken:
            session.close(0.0)

    def _run(self) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
        unanswered = refused = 0
        pause_s = self._first_pause_s
        while not self._stopped.wait(pause_s * random.uniform(0.5, 1.5)):
            try:
                session = self._attach()
            except (DaemonUnavailableError, DaemonLostError) as error:
                self._note(error)
                pause_s = PAUSES_S[min(unanswered, len(PAUSES_S) - 1)]
                unanswered += 1
            except StageCacheError as error:
                self._note(error)
                pause_s = REFUSED_PAUSES_S[min(refused, len(REFUSED_PAUSES_S) - 1)]
                refused += 1
            except Exception as error:  # An OSError of this process' own: no descriptors left, no memory.
                self._note(error)
                pause_s = REFUSED_PAUSES_S[-1]
            else:
                self._hand_over(session)
                return

    def _hand_over(self, session: Session) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self.session = session
                return
        session.close(0.0)

    def _note(self, error: Exception) -> None:
        """Log an error that was not there the last time."""
        text = _text_of(error)
        if text != self.last_error:
            self.last_error = text
            logger.warning("stagecache: %s is not attached, and goes on asking: %s", self._what, text)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Renewals:
    """Attaches anew, in the background, whenever a session is over: the daemon was stopped, cannot adopt it, or met a
    bad record. ``watch`` and ``session`` on the engine thread.

    Attributes:
        pending: who attaches, or has attached, the session after one that is over; None while none is, and again once
            ``watch`` was told of the next. It alone says so, and one store changes it.
    """

    def __init__(self) -> None:
        self.pending: Attacher | None = None
        self._lock = threading.Lock()
        self._short_lives = 0
        self._stopped = False

    def watch(self, home: Attachment) -> None:
        """Steps go on with this session: from now on its end begins a renewal; also where it has ended already.

        May be called again. ``pending`` is cleared last, so that a step which was interrupted before is followed by one
        that does it.
        """
        home.session.watcher.when_over(partial(self._renew, weakref.ref(home)))
        with self._lock:
            if self.pending is not None and self.pending.session is home.session:
                self.pending = None

    def session(self) -> Session | None:
        """The next session, once it is attached; the same again until ``watch`` was told of it."""
        attacher = self.pending
        if attacher is None:
            return None
        attacher.start()  # An interrupt may have come before.
        return attacher.session

    def stop(self, home: Attachment) -> None:
        """No renewal from here on. home: whose session is in use; one that came and was not taken is given back."""
        with self._lock:
            self._stopped = True
            attacher = self.pending
        if attacher is not None:
            attacher.stop(home.session)

    def _renew(self, reference: weakref.ref[Attachment]) -> None:
        """Any thread; the watch's thread, as a rule."""
        home = reference()
        if home is None or home.session.forked:
            return
        session = home.session
        with self._lock:
            if self._stopped or (self.pending is not None and self.pending.session is not session):
                return
            lived_s = time.monotonic() - session.attached_at
            self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            before = self._short_lives - 2
            pause_s = 0.0 if before < 0 else REFUSED_PAUSES_S[min(before, len(REFUSED_PAUSES_S) - 1)]
            attacher = Attacher(partial(_attach_again, home), f"stage {session.stage}", first_pause_s=pause_s)
            self.pending = attacher
            attacher.start()


def _attach_again(old: Attachment) -> Session:
    """A session like the old one, with the keys that it had; with the declared ones alone where these are too much."""
    old.session.let_go()
    keys = old.keys.schemas()
    try:
        return old.session.attach_again(keys=keys)
    except BudgetError:
        declared = [key for key in keys if old.keys.is_declared(key.name)]
        if len(declared) == len(keys):
            raise
        return old.session.attach_again(keys=declared)
