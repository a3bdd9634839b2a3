"""What belongs to one session: arena, results, keys, pages, log. A cache that attaches anew changes all of it at once.

A step keeps the attachment that it was saved under, and with it the mapping: rows of an older session stay readable, as
far as they had been brought, until the step is consumed.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from stagecache.arena import Arena
from stagecache.counters import Counters
from stagecache.device import CpuDevice, clone_rows
from stagecache.errors import DaemonLostError
from stagecache.export import Exporter
from stagecache.hits import Gather, Hit, HitReader
from stagecache.keys import KeyBook
from stagecache.merge import SavedStep, Window
from stagecache.saver import StepSaver
from stagecache.session import Session
from stagecache.stream_device import StreamDevice
from stagecache.stream_path import StreamPath


class Attachment:
    """One session with everything that steps do through it.

    Args:
        keys: a book of the session's keys; those that came with the attach are added.
        lock: the cache's, which guards arena and results.
    """

    def __init__(
        self,
        session: Session,
        keys: KeyBook,
        counters: Counters,
        lock: threading.Lock,
        device: CpuDevice,
        *,
        claim_timeout_s: float,
        merge_timeout_s: float,
        gpu_staging_bytes: int,
        split_lists: bool,
    ) -> None:
        geometry = session.geometry
        self.session = session
        self.renewals = 0
        """Sessions that the cache had before this one."""
        if isinstance(device, StreamDevice):
            session.stream = StreamPath(session, device)
        self.keys = keys
        for key in session.keys:
            keys.add(key, remembered=True)
        self.arena = Arena(session.control.arena)
        self.hits = HitReader(session, self.arena, geometry.block_size, geometry.max_results)
        self.saver = StepSaver(
            session,
            keys,
            self.hits,
            counters,
            lock,
            device,
            claim_timeout_s=claim_timeout_s,
            merge_timeout_s=merge_timeout_s,
            gpu_staging_bytes=gpu_staging_bytes,
            split_lists=split_lists,
        )
        pins = device.pins if isinstance(device, StreamDevice) else None
        self.export = Exporter(session, counters, self.arena, self.saver.deferred, self.hits, lock, pins)
        if pins is not None:
            self.export.refresh(0)
        self._counters = counters
        self._lock = lock
        self._merge_timeout_s = merge_timeout_s

    def read_hit(self, hit: Hit, name: str, needed: Window) -> NDArray[np.uint8]:
        """u8 rows of hit and tail, the tail not filled in. Waits for the gather; holds no lock.

        Raises:
            StageCacheError: the rows cannot be had.
        """
        gather = hit.gathers.get(name)
        if gather is None:
            if name in self.keys.refused:
                raise self.keys.refused[name].again()
            raise DaemonLostError(f"request {hit.req_id}: key {name} has no rows of its hit at the daemon")
        return self.hits.read(hit, gather, needed, self._merge_timeout_s)

    def hand_out(self, hit: Hit, name: str, raw: NDArray[np.uint8]) -> torch.Tensor:
        """Merged rows as a tensor of their own: a lease of their extent, or a copy where tensors hold too much.

        raw: what ``read_hit`` gave, the tail filled in.
        """
        gather = hit.gathers[name]
        if gather.extent is None:
            return as_rows(raw, hit, gather)
        with self._lock:
            leased = self.arena.lease(gather.extent) if self.arena.may_lease(gather.extent) else None
            if leased is not None:
                gather.extent = None
        if leased is None:
            self._counters.copied_extents += 1
            return clone_rows(as_rows(raw, hit, gather))
        return as_rows(leased, hit, gather)

    def land(self, step: SavedStep) -> None:
        """Wait until a step's rows are in host memory. Holds no lock.

        Raises:
            CallDeadlineError, FailedWriteError: they are not there in time, or their copy failed.
        """
        if step.copies is not None:
            step.land(step.copies, self._merge_timeout_s)

    def release(self, step: SavedStep) -> None:
        """Give back what hits of a consumed step hold. Caller holds the lock."""
        for hit in step.hits.values():
            self.hits.release(hit.gathers.values())


def as_rows(raw: NDArray[np.uint8], hit: Hit, gather: Gather) -> torch.Tensor:
    """[rows + tail, *row_shape] over ``raw``, which lives as long as the tensor's memory is used.

    Two calls into torch: what it costs to make a tensor is its code, which is cold behind a forward.
    """
    key, rows = gather.key, hit.high - hit.low + hit.tail
    items = torch.frombuffer(raw, dtype=key.dtype, count=rows * key.row_items)
    shape = key.schema.row_shape
    return items.view(rows, *shape) if shape else items
