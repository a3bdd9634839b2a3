"""Keeps a step's outputs: a page, one SAVE record, and the gathers that belong behind it (W1 to W3, W7, H6)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stagecache.batch import Batch
from stagecache.counters import Counters
from stagecache.deferred import DeferredRows, StepClone
from stagecache.device import CpuDevice
from stagecache.epochs import Epochs
from stagecache.errors import DaemonLostError, StageCacheError
from stagecache.hits import Gather, Hit, HitReader
from stagecache.keys import KeyBook, Split
from stagecache.leftovers import snapshot
from stagecache.mapping import StagedKey
from stagecache.merge import SavedStep
from stagecache.pages import FlushLog, PageUse, StepPages
from stagecache.planner import StepPlan
from stagecache.session import Session
from stagecache.sharing import BlockSharing
from stagecache.writes import Write, WriteState
from stagecache_wire.records import U32, KeyMode, Kind, Record, key_words

if TYPE_CHECKING:
    from stagecache.copies import Copies
    from stagecache.stream_path import StreamPath


class StepSaver:
    """Writes steps to pages and log. Engine thread only; ``lock`` is the cache's, taken for its tables alone."""

    def __init__(
        self,
        session: Session,
        keys: KeyBook,
        hits: HitReader,
        counters: Counters,
        lock: threading.Lock,
        device: CpuDevice,
        *,
        claim_timeout_s: float,
        merge_timeout_s: float,
        gpu_staging_bytes: int,
        split_lists: bool,
    ) -> None:
        self.session = session
        self.keys = keys
        self.hits = hits
        self.counters = counters
        self._stream = session.stream
        log = session.log if self._stream is None else self._stream.sender
        self.pages = StepPages(session.geometry.staging_depth, log)
        self._flushes = FlushLog(session, claim_timeout_s)
        self.deferred = DeferredRows(
            gpu_staging_bytes, device, self._flushes.claim, session.append, self._flushes.logged
        )
        self.epochs = Epochs(session, self.deferred, counters)
        self.sharing = BlockSharing(session, keys, self.epochs)
        self._lock = lock
        self._device = device
        self._block_size = session.geometry.block_size
        self._claim_timeout_s = claim_timeout_s
        self._merge_timeout_s = merge_timeout_s
        self._split_lists = split_lists
        self._last_staged: list[StagedKey] = []
        self._last_words: U32 = key_words()

    def begin_hits(self, hits: list[Hit]) -> None:
        """Gather hits on rows that are there already, while the forward runs; open deferred rows go first (W3)."""
        counters = self.counters
        for hit in hits:
            counters.hits += 1
            counters.hit_rows += hit.high - hit.low
        if self.deferred.open:
            self._flush_touched(hits)
        with self._lock:
            planned = self.hits.plan(hits, self.keys.hit_keys())
        self._log_gathers(planned)

    def note_failures(self, stream: StreamPath) -> None:
        """Copies that failed since the last step: the sender has logged that their rows are lost (W5, W8)."""
        while stream.sender.failures:
            lost = stream.sender.failures.popleft()
            self.deferred.note_failed(lost.writes, lost.error)
            if lost.kind is Kind.SAVE:
                self.epochs.lost()
            else:
                self.deferred.failed_flushes += 1

    def flush_ended(self, ended: list[str], finished: list[str]) -> None:
        """Requests finished or were preempted: what they have open is written (R1)."""
        if self.deferred.open:
            self._guarded(partial(self.deferred.flush, ended))
        for req_id in finished:
            self.deferred.forget(req_id)

    def _flush_touched(self, hits: list[Hit]) -> None:
        if self.deferred.open:
            blocks = {block for hit in hits for block in hit.blocks}
            touched = self.deferred.touching(blocks, self._block_size)
            self._guarded(partial(self.deferred.flush, touched))

    def _log_gathers(self, planned: list[tuple[Hit, Gather]]) -> None:
        """Log gathers as records of their own; what cannot be logged is an error of that hit."""
        for record, part in self.hits.records(planned):
            try:
                self.hits.logged(part, self.session.append(record))
            except StageCacheError as error:
                for _, gather in part:
                    gather.error = error.again()
        self.hits.spill(planned, self._merge_timeout_s)

    def save(
        self,
        step_id: int,
        plan: StepPlan,
        batch: Batch,
        hidden: torch.Tensor | None,
        outputs: Mapping[str, Any],
        padded: int,
    ) -> SavedStep:
        """Keep a step's outputs. Whatever fails, the caller abandons the step's page (W7).

        Raises:
            StagingTimeoutError: no page became free (W2).
        """
        n = batch.tokens
        if self._stream is not None:
            self._stream.device.drop()
        split = self.keys.split(hidden, outputs, n, padded, len(batch.req_ids))
        if split.demoted or split.replaced:
            self._forget_keys(plan, split)
        local: dict[str, torch.Tensor] = {}
        if split.unopened or split.unkept:
            local = {name: self._device.to_host(rows) for name, rows in (*split.unopened, *split.unkept)}
            self.counters.unopened += len(local)
        for key, rows in split.deferred:
            local[key.schema.name] = self._device.to_host(rows)
        leftover: dict[str, Any] = {}
        if split.leftover:
            leftover = {name: snapshot(value, self._device) for name, value in split.leftover.items()}
        write = Write("step", step_id=step_id)
        page = self._claim_page(step_id)
        staged: list[StagedKey] = []
        copies: Copies | None = None
        try:
            if page is None:
                self.counters.local_steps += 1
                self.epochs.unlogged = self.epochs.unlogged or n > 0
                self._spoil(plan, batch)
                local.update({key.schema.name: self._device.to_host(rows) for key, rows in split.immediate})
            else:
                page.write = write
                write.advance(WriteState.QUEUED)
                write.advance(WriteState.COPYING)
                for key, rows in split.immediate:
                    self._device.stage(key.rows(page.page, n), rows)
                    staged.append(key)
            if self._stream is not None:
                copies = self._device.seal()
            if page is not None:
                page.copies = copies
                if n:
                    self._log_step(plan, batch, split, page, staged)
                if copies is None or not page.sequence:
                    write.advance(WriteState.HOST_READY, sequence=page.sequence)
        except BaseException as error:
            if copies is not None:
                copies.release()
            if write.state < WriteState.WRITTEN:
                write.advance(WriteState.FAILED, cause=str(error))
            raise
        return SavedStep(
            step_id,
            batch,
            page,
            staged,
            local,
            leftover,
            {hit.req_id: hit for hit in plan.hits} if plan.hits else {},
            [error for _, error in split.failed] if split.failed else [],
            self.keys.policy.needs_full_hidden_states and (hidden is not None or (n == 0 and bool(plan.hits))),
            self._split_lists,
            self.keys.opened,
            copies,
            self.keys.policy.span_keys if plan.hits else frozenset(),
        )

    def _log_step(self, plan: StepPlan, batch: Batch, split: Split, page: PageUse, staged: list[StagedKey]) -> None:
        """The SAVE record, and the gathers that belong behind it."""
        if split.unopened:
            # Rows that no key took: were the slots only claimed by the others, a later hit would read zeros here.
            self.epochs.lose(batch.runs)
        else:
            clones = self._clone_deferred(split) if split.deferred else None
            # Rows may wait some milliseconds for the daemon to look; meanwhile they hold a page.
            record = Record.save(page.page, batch.tokens, self._key_words(split, staged), batch.runs)
            if page.copies is None:
                page.sequence = self.session.append(record, urgent=self.pages.scarce)
            else:
                assert page.write is not None
                page.sequence = self.session.append(record, page.copies, (page.write,), urgent=self.pages.scarce)
            if clones:
                self._add_deferred(batch, clones, page.sequence)
            if plan.publish:  # Never before the record whose rows it speaks of.
                self.sharing.publish(plan.publish)
        if self.epochs.unlogged:
            self._spoil(plan, batch)
        elif plan.hits:
            self._gather_behind(plan, batch)

    def _key_words(self, split: Split, staged: list[StagedKey]) -> U32:
        """The keys section of a SAVE; the last one again where the keys are the same. staged: as in ``split``."""
        plain = not split.deferred and not split.failed
        if plain and staged == self._last_staged:
            return self._last_words
        keyed = [(key.key_id, KeyMode.ROWS) for key in staged]
        keyed += [(key.key_id, KeyMode.CLAIM) for key, _ in split.deferred]
        keyed += [(key.key_id, KeyMode.FAILED) for key, _ in split.failed if key is not None]
        words = key_words(*keyed)
        if plain:
            self._last_staged, self._last_words = staged, words
        return words

    def _gather_behind(self, plan: StepPlan, batch: Batch) -> None:
        """Hits that touch this step's slots are gathered (again), now behind the write; so are keys opened now (H6)."""
        with self._lock:
            planned = self.hits.plan(plan.hits, self.keys.hit_keys())
        touched = self._touched(plan, batch)
        if touched:
            fresh = {id(gather) for _, gather in planned}
            for hit in touched:
                planned += [(hit, gather) for gather in hit.gathers.values() if id(gather) not in fresh]
        if not planned:
            return
        self._flush_touched([hit for hit, _ in planned])
        self._log_gathers(planned)

    def _spoil(self, plan: StepPlan, batch: Batch) -> None:
        """Hits on rows of this very step, which is not logged: what was gathered for them is an older tenant's."""
        for hit in self._touched(plan, batch):
            lost = DaemonLostError(f"request {hit.req_id} hits rows of a step that the daemon did not get")
            for gather in hit.gathers.values():
                gather.error = self.session.failure() or lost

    def _touched(self, plan: StepPlan, batch: Batch) -> list[Hit]:
        """Hits that name a block which this step writes."""
        if not plan.hits:
            return []
        size = self._block_size
        written, touched = batch.blocks(size), []
        for hit in plan.hits:
            first = hit.low // size
            if not written.isdisjoint(hit.blocks[first:] if first else hit.blocks):
                touched.append(hit)
        return touched

    def _claim_page(self, step_id: int) -> PageUse | None:
        """A page for a step; None while the daemon is away: the step then keeps its rows for itself.

        Raises:
            StagingTimeoutError: the house stayed full.
        """
        session = self.session
        if session.away or session.has_ended():
            return None
        claimed = self.pages.try_claim(step_id)
        if claimed is not None:
            return claimed
        found: list[PageUse] = []

        def ready() -> bool:
            use = self.pages.try_claim(step_id)
            if use is not None:
                found.append(use)
            return use is not None

        try:
            self.session.wait(ready, self._claim_timeout_s, "a staging page", self.pages.wait, kind="page")
        except DaemonLostError:
            return None
        except StageCacheError:
            if self.session.has_ended():
                return None
            raise self.pages.timeout_error(self._claim_timeout_s) from None
        return found[0]

    def _forget_keys(self, plan: StepPlan, split: Split) -> None:
        """Keys that this step gave up: close them, and drop what hits had planned for them."""
        for key in split.demoted:
            # Away, the daemon keeps a pool that nothing will name again.
            with contextlib.suppress(StageCacheError):
                self.session.close_key(key)
        closed = [*split.demoted, *split.replaced]
        dropped = [
            hit.gathers.pop(key.schema.name)
            for hit in plan.hits
            for key in closed
            if key.schema.name in hit.gathers and hit.gathers[key.schema.name].key is key
        ]
        with self._lock:
            self.hits.release(dropped)

    def _clone_deferred(self, split: Split) -> list[tuple[StagedKey, torch.Tensor]]:
        clones = []
        for key, rows in split.deferred:
            self._guarded(partial(self.deferred.make_room, rows.numel() * rows.element_size()))
            clones.append((key, self._device.clone(rows)))
        return clones

    def _add_deferred(self, batch: Batch, clones: list[tuple[StagedKey, torch.Tensor]], sequence: int) -> None:
        slots = batch.slots()
        parts = [
            (req_id, start, end)
            for req_id, (start, end) in zip(batch.req_ids, batch.spans(), strict=True)
            if end > start
        ]
        for key, rows in clones:
            self._guarded(partial(self.deferred.add, StepClone(key, rows, slots, sequence, 0), parts))

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do something to deferred rows; where the log cannot be reached, a new epoch begins later instead."""
        try:
            action()
        except StageCacheError:
            self.epochs.unlogged = True
