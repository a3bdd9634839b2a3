"""Sessions come and go, series stay: which replica a session is, and what those that ended leave behind.

A replica is the smallest number that no other live session of the stage has. A counter of (stage, replica) goes on
where the session before stopped, so nothing that a short session did is lost between two scrapes.
"""

from __future__ import annotations

from typing import Final

from stagecached.metrics.fold import SessionFold
from stagecached.metrics.sheet import KEY_LINES, SESSION_LINES

MAX_KEPT: Final = 128
"""(stage, replica) pairs without a session whose totals are kept; the one that ended first goes first."""

Values = list[float]

_SESSION_TOTALS: Final = tuple(line.total for line in SESSION_LINES)
_KEY_TOTALS: Final = tuple(line.total for line in KEY_LINES)


class Replicas:
    """Numbers of live sessions."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, int]] = {}

    def name(self, session_id: str, stage: str) -> str:
        """The session's number; given at the first call, kept until ``drop``."""
        found = self._of.get(session_id)
        if found is None:
            taken = {number for other, number in self._of.values() if other == stage}
            found = self._of[session_id] = (stage, next(n for n in range(len(taken) + 1) if n not in taken))
        return str(found[1])

    def drop(self, session_id: str) -> None:
        self._of.pop(session_id, None)


class Totals:
    """Last values of sessions that ended, by (stage, replica), and of their keys."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[str, str], Values] = {}
        self.keys: dict[tuple[str, str], dict[str, Values]] = {}

    def copy(self) -> Totals:
        """These totals as they are now; the values themselves are never changed."""
        other = Totals()
        other.sessions, other.keys = dict(self.sessions), dict(self.keys)
        return other

    def keep(self, fold: SessionFold) -> None:
        """A session ended with these figures."""
        name = (fold.stage, fold.replica)
        values, keys = session_values(fold), key_values(fold)
        self.sessions[name] = _plus(values, self.sessions.pop(name, None), _SESSION_TOTALS)
        before = self.keys.pop(name, {})
        self.keys[name] = before | {key: _plus(mine, before.get(key), _KEY_TOTALS) for key, mine in keys.items()}
        while len(self.sessions) > MAX_KEPT:
            oldest = next(iter(self.sessions))
            del self.sessions[oldest]
            self.keys.pop(oldest, None)

    def session(self, fold: SessionFold) -> Values:
        """A live session's values, with those of its predecessors."""
        name = (fold.stage, fold.replica)
        return _plus(session_values(fold), self.sessions.get(name), _SESSION_TOTALS)

    def of_keys(self, fold: SessionFold) -> dict[str, Values]:
        """The same of its keys, by name."""
        name = (fold.stage, fold.replica)
        before = self.keys.get(name, {})
        return {key: _plus(values, before.get(key), _KEY_TOTALS) for key, values in key_values(fold).items()}


def session_values(fold: SessionFold) -> Values:
    """One value a line of ``SESSION_LINES``."""
    return [line.read(fold) for line in SESSION_LINES]


def key_values(fold: SessionFold) -> dict[str, Values]:
    """One value a line of ``KEY_LINES``, by key."""
    return {key.name: [line.read(key) for line in KEY_LINES] for key in fold.keys}


def _plus(values: Values, before: Values | None, totals: tuple[bool, ...]) -> Values:
    """``values`` with what earlier sessions of that name left; gauges as they are."""
    if before is None:
        return values
    return [value + earlier if total else value for value, earlier, total in zip(values, before, totals, strict=True)]
