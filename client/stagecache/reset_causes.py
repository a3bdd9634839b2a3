"""Causes of resets after which the model computes what it computed before: replicas go on sharing their blocks."""

from __future__ import annotations

from typing import Final

ROWS_LOST: Final = "rows of a step were lost"
NOT_LOGGED: Final = "steps were not logged while the daemon was away"
ATTACHED_ANEW: Final = "the worker attached anew"
ATTACHED_LATE: Final = "the worker attached late"
SCHEDULE_LOST: Final = "what was scheduled never came to a worker"
SAME_MODEL: Final = frozenset({ROWS_LOST, NOT_LOGGED, ATTACHED_ANEW, ATTACHED_LATE, SCHEDULE_LOST})
