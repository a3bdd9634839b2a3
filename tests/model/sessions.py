"""Sessions for random sequences: used again where that is sound, fresh where it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.model.driver import Mismatch, Plan, Run
from tests.model.real import RealCache
from tests.model.reference import ReferenceCache
from tests.model.setups import NUM_BLOCKS, SETUPS, Setup

SEQUENCES_A_SESSION = 50
"""A session is given up after so many sequences, so that attaching to used memory is tested too."""


class Sessions:
    """One session a setup, over one daemon. Between two sequences there is a reset: the model begins anew, the
    session with its tables full of an older epoch, which none of its results may show (R5)."""

    def __init__(self, socket: str, make: Callable[..., RealCache] = RealCache):
        """make: makes a cache as ``RealCache`` does."""
        self._socket = socket
        self._make = make
        self._open: dict[str, RealCache] = {}
        self._by_setup: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, "materialize")
        self.attached = 0
        self.served = 0

    def run(self, plan: Plan) -> Run:
        """Run a plan on the model and on a session.

        Raises:
            Mismatch: they disagree; the session is gone then, so that the next run starts clean.
        """
        setup = SETUPS[plan.setup]
        cache = self._session(setup)
        run = Run(plan, setup, ReferenceCache(setup.rules), cache, self._pool)
        try:
            run.execute()
        except BaseException:
            self._end(setup)
            raise
        self.served += 1
        self._by_setup[setup.name] += 1
        if not setup.reuse or self._by_setup[setup.name] % SEQUENCES_A_SESSION == 0:
            self._end(setup)
        return run

    def close(self) -> None:
        for setup in SETUPS:
            self._end(setup)
        self._pool.shutdown()

    def _session(self, setup: Setup) -> RealCache:
        if setup.name not in self._open:
            self.attached += 1
            self._open[setup.name] = self._make(
                setup.rules, self._socket, num_blocks=NUM_BLOCKS, model="model", stage=setup.name, **setup.settings
            )
        return self._open[setup.name]

    def _end(self, setup: Setup) -> None:
        cache = self._open.pop(setup.name, None)
        if cache is not None:
            cache.close()


__all__ = ["Mismatch", "Sessions"]
