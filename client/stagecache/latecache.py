"""The cache of a worker that found no daemon when it started: asked for in the background until there is one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from stagecache.cache import StageCache
from stagecache.device import CpuDevice
from stagecache.policy import ModelCachePolicy
from stagecache.reattach import Attacher
from stagecache.session import Session
from stagecache.sharing import Namespace
from stagecache.step import BatchView
from stagecache_wire.geometry import Geometry, KeySchema


class LateCache:
    """Attaches in a thread of its own, with jittered and growing pauses.

    Args:
        error: why the first try failed; it was told already.
        socket, model, stage, geometry, keys, rank, engine, view, device: as for ``StageCache.attach``.
        namespace: to be joined then.
    """

    def __init__(
        self,
        error: Exception,
        *,
        socket: str | os.PathLike[str],
        model: str,
        stage: str,
        geometry: Geometry,
        view: BatchView,
        keys: Sequence[KeySchema] = (),
        rank: int = 0,
        engine: str = "",
        namespace: Namespace | None = None,
        device: CpuDevice | None = None,
    ) -> None:
        self._model = model
        self._namespace = namespace
        self._view = view
        self._device = device
        self._declared = frozenset(key.name for key in keys)
        attach = partial(
            Session.attach, socket, model=model, stage=stage, geometry=geometry, keys=keys, rank=rank, engine=engine
        )
        self._cache: StageCache | None = None
        self._attacher = Attacher(attach, f"stage {stage}", known=error)
        self._attacher.start()

    def take(self) -> StageCache | None:
        """The cache; None while there is none. Engine thread, before ``new_step_starts``; never waits.

        The engine has published hashes of rows that this cache never got: it begins a new epoch, and asks the engine to
        forget them. Of requests that run already it gets the rows from here on. The same cache comes again until
        whoever asks has it: an interrupt may keep it from him.
        """
        session = self._attacher.session
        if session is None:
            return None
        if self._cache is None:
            self._cache = StageCache(
                session, self._view, ModelCachePolicy(), declared=self._declared, device=self._device
            )
        cache = self._cache
        if self._namespace is not None:
            cache.join_later(self._namespace)
        cache.begin_late(self._model)
        return cache

    def stop(self) -> None:
        """Ask no more. Not behind a ``take`` whose cache is in use."""
        self._attacher.stop()
