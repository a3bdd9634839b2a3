"""Every error that the client raises, one class a situation.

The text says what was asked, what was found and what to do. ``reason`` is machine-readable and stable: the name of a
``stagecache.v1.Reason`` without its prefix (``BUDGET_EXCEEDED``), or empty where no daemon took part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

AnyError = TypeVar("AnyError", bound="StageCacheError")


class StageCacheError(RuntimeError):
    """Base of all errors of the stage cache.

    Attributes:
        reason: name of the daemon's reason, or empty.
        remedy: what to do; already part of the text.
        facts: the numbers of the text, by name.
    """

    def __init__(
        self, message: str, *, reason: str = "", remedy: str = "", facts: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.reason = reason
        self.remedy = remedy
        self.facts: dict[str, str] = dict(facts or {})

    def again(self: AnyError) -> AnyError:
        """The same error as a new object. What is kept to be raised later, perhaps often, is raised as one of these:
        the traceback of an object that is raised twice grows, and it holds all that its frames do.
        """
        copy = type(self).__new__(type(self), *self.args)
        copy.__dict__.update(self.__dict__)
        return copy


class AttachError(StageCacheError):
    """The worker could not attach; nothing was taken, and the engine may go on without the cache."""


class DaemonUnavailableError(AttachError):
    """No daemon answers at the socket."""


class AbiMismatchError(AttachError):
    """Client and daemon are of releases that disagree on the shared-memory layout."""


class TokenRefusedError(AttachError):
    """The daemon does not accept this peer's uid, token or role."""


class UnknownSessionError(AttachError):
    """The daemon holds no such session: it ended, or another daemon's state was removed. Attach anew."""


class GeometryError(AttachError):
    """A size of the geometry or of a key is zero, negative, too large or inconsistent."""


class BudgetError(AttachError):
    """The daemon's memory budget or /dev/shm has no room; the text has the arithmetic."""


class StepConsumedError(StageCacheError):
    """The step id is unknown, or was already consumed by materialize or discard (S1)."""


class UnknownRequestError(StageCacheError):
    """materialize was asked for a request that was not in the batch at save time (S2)."""


class HitNotCoveredError(StageCacheError):
    """A hit is not a multiple of the block size, or the given blocks do not cover it (H3)."""


class UnreadableHitError(StageCacheError):
    """Rows of a hit are UNKNOWN, or ABSENT for hidden states (H4): no rows are given rather than wrong ones.

    Attributes:
        req_id: the request.
        key: name of the key.
        slots: the first slots that cannot be read.
    """

    def __init__(self, message: str, *, req_id: str, key: str, slots: Sequence[int], remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.req_id = req_id
        self.key = key
        self.slots = tuple(slots)


class StepTooLargeError(StageCacheError):
    """A step has more tokens than a staging page has rows (W6); nothing was copied."""


class SlotMismatchError(StageCacheError):
    """The slots of a step do not cover its tokens (W6); nothing was copied."""


class SchemaMismatchError(StageCacheError):
    """A key is open with another dtype or row shape (K3); the text names both."""


class StagingTimeoutError(StageCacheError):
    """No staging page became free within ``staging_claim_timeout_s`` (W2).

    Attributes:
        unconsumed: step ids that neither materialize nor discard has consumed.
        outstanding: sequences of records that the daemon has not consumed.
    """

    def __init__(
        self, message: str, *, unconsumed: Sequence[int], outstanding: Sequence[int], remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.unconsumed = tuple(unconsumed)
        self.outstanding = tuple(outstanding)


class FailedWriteError(StageCacheError):
    """Deferred rows of an earlier step could not be written (W5); exactly these are unknown now, all else goes on."""


class SessionFailedError(StageCacheError):
    """The session is over: a bad record, a daemon that was stopped or does not know it; the text says which."""


class DaemonLostError(StageCacheError):
    """The daemon went away while it was needed: it does not answer, or it shuts down."""


class CallDeadlineError(StageCacheError):
    """A call did not end in its time; the text names what it waited for."""


class ResetRefusedError(StageCacheError):
    """Reset without ``force`` where no scheduler-side shim would make the engine forget its block hashes."""


class UnsupportedHashError(StageCacheError):
    """Block hashes of an algorithm or form that the index does not take, or tokens where only the engine can hash."""


class CallRefusedError(StageCacheError):
    """The daemon refused a call for another reason; ``reason`` names it."""
