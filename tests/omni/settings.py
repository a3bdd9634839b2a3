"""Environment of the engine in tests: quiet, offline, in this process. Set it before vLLM is imported."""

from __future__ import annotations

import os

from stagecache.local_engine import quiet_engine_environment


def quiet() -> None:
    os.environ.update(quiet_engine_environment())
