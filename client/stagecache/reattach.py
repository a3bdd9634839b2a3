"""Attaching in the background: a worker that found no daemon, or whose session is over, gets a session by itself.

A thread of its own asks again and again, with jittered and growing pauses; the engine thread only looks whether a
session has come (``Attacher.take``), and begins a new epoch with it at the next step.
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
        last_error: why the last try failed.
    """

    def __init__(
        self, attach: Callable[[], Session], what: str, *, first_pause_s: float = 0.0, known: Exception | None = None
    ) -> None:
        self.last_error = "" if known is None else _text_of(known)
        self._attach = attach
        self._what = what
        self._first_pause_s = first_pause_s
        self._ready: Session | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagecache-attach", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Session | None:
        """The session, once; None while there is none. Never waits."""
        if self._ready is None:
            return None
        with self._lock:
            session, self._ready = self._ready, None
        return session

    def stop(self) -> None:
        """Attach no more. A session that nobody took is given back, also one that is still being made."""
        self._stopped.set()
        session = self.take()
        if session is not None:
            session.close(0.0)

    def _run(self) -> None:
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
                self._ready = session
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
    bad record. ``watch`` and ``take`` on the engine thread.

    Attributes:
        pending: a session is over, and the next one has not been taken.
    """

    def __init__(self) -> None:
        self.pending = False
        self._lock = threading.Lock()
        self._attacher: Attacher | None = None
        self._short_lives = 0
        self._stopped = False

    def watch(self, home: Attachment) -> None:
        """From now on this session's end begins a renewal; also where it has ended already."""
        home.session.watcher.when_over(partial(self._renew, weakref.ref(home)))

    def take(self) -> Session | None:
        """The next session, once it is attached."""
        attacher = self._attacher
        session = attacher.take() if attacher is not None else None
        if session is not None:
            with self._lock:
                self._attacher, self.pending = None, False
        return session

    def stop(self) -> None:
        """No renewal from here on."""
        with self._lock:
            self._stopped = True
            attacher = self._attacher
        if attacher is not None:
            attacher.stop()

    def _renew(self, reference: weakref.ref[Attachment]) -> None:
        """Any thread; the watch's thread, as a rule."""
        home = reference()
        if home is None or home.session.forked:
            return
        session = home.session
        with self._lock:
            if self._stopped or self._attacher is not None:
                return
            lived_s = time.monotonic() - session.attached_at
            self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            before = self._short_lives - 2
            pause_s = 0.0 if before < 0 else REFUSED_PAUSES_S[min(before, len(REFUSED_PAUSES_S) - 1)]
            self._attacher = Attacher(partial(_attach_again, home), f"stage {session.stage}", first_pause_s=pause_s)
            self.pending = True
            self._attacher.start()


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
