"""The stage cache, worker side: what a stage worker calls each step.

    register_policy(policy)      once, at load_model
    new_step_starts(output)      engine thread, before finished requests leave the batch
    step_id = save_outputs(...)  engine thread, after the forward
    materialize(step_id, ids)    any thread, once; or discard_step(step_id)

What happens at each, in log order:

    new_step_starts   a step that was never saved is logged LOST; deferred rows of requests that ended are flushed;
                      hits on rows that are there already are gathered, during the forward
    save_outputs      rows go into one staging page, one SAVE is logged; hits that touch this step's slots are gathered
                      again, behind the write
    materialize       this step's rows are copied out of the page, and behind the hit's in its extent

``_lock`` guards the tables that engine thread and materializing threads share: steps, requests, arena, results. It is
never held over a copy or a wait. Files beside this one hold one table each.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stagecache.arena import Arena
from stagecache.batch import Batch, BatchReader, scheduled_runs, start_positions
from stagecache.counters import Counters
from stagecache.deferred import DeferredRows, StepClone
from stagecache.device import CpuDevice, clone_rows
from stagecache.errors import DaemonLostError, StageCacheError, StepConsumedError, UnknownRequestError
from stagecache.hits import Gather, Hit, HitReader
from stagecache.keys import KeyBook, Split
from stagecache.leftovers import snapshot
from stagecache.mapping import StagedKey
from stagecache.merge import SavedStep, assemble, windows
from stagecache.outputs import StageCacheOutputs
from stagecache.pages import FlushPages, PageUse, StepPages
from stagecache.planner import StepPlan, StepPlanner
from stagecache.policy import ModelCachePolicy
from stagecache.requests import NO_END, RequestTable
from stagecache.session import Session
from stagecache.slots import Runs, count_slots
from stagecache.step import BatchView
from stagecache.writes import Write, WriteState
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.records import MODE_SHIFT, KeyMode, Kind, Record


class StageCache:
    """One stage worker's cache. Made by ``StageCache.attach``."""

    def __init__(
        self,
        session: Session,
        view: BatchView,
        policy: ModelCachePolicy,
        *,
        declared: frozenset[str] = frozenset(),
        staging_claim_timeout_s: float = 30.0,
        merge_timeout_s: float = 30.0,
        gpu_staging_bytes: int = 512 << 20,
        split_lists: bool = True,
        device: CpuDevice | None = None,
    ) -> None:
        geometry = session.geometry
        self.session = session
        self.counters = Counters()
        self._geometry = geometry
        self._device = device or CpuDevice()
        self._claim_timeout_s = staging_claim_timeout_s
        self._merge_timeout_s = merge_timeout_s
        self._split_lists = split_lists
        self._lock = threading.Lock()
        self._requests = RequestTable()
        self._planner = StepPlanner(self._requests, geometry)
        self._batches = BatchReader(view, geometry, self._requests)
        self._arena = Arena(session.control.arena)
        self._hits = HitReader(session, self._arena, geometry.block_size, geometry.max_results)
        self._pages = StepPages(geometry.staging_depth, session.log)
        self._flush_pages: dict[int, FlushPages] = {}
        self._keys = KeyBook(session.open_key, policy, declared)
        for key in session.keys:
            self._keys.add(key)
        self._deferred = DeferredRows(
            gpu_staging_bytes, self._device, self._claim_flush_page, session.append, self._flush_logged
        )
        self._steps: dict[int, SavedStep] = {}
        self._in_flight: set[int] = set()
        self._next_step_id = 1
        self._plan: StepPlan | None = None
        self._unlogged = False
        self._closed = False

    @classmethod
    def attach(
        cls,
        *,
        socket: str | os.PathLike[str],
        model: str,
        stage: str,
        geometry: Geometry,
        view: BatchView,
        policy: ModelCachePolicy | None = None,
        keys: Sequence[KeySchema] = (),
        rank: int = 0,
        open_remembered_keys: bool = False,
        staging_claim_timeout_s: float = 30.0,
        merge_timeout_s: float = 30.0,
        daemon_grace_s: float = 2.0,
        gpu_staging_bytes: int = 512 << 20,
        split_lists: bool = True,
        device: CpuDevice | None = None,
    ) -> StageCache:
        """Attach this process to the daemon at ``socket`` and open the declared ``keys``.

        geometry: the engine's KV cache and limits. view: the live batch. staging_claim_timeout_s: longest wait of a
        save for a page (W2). merge_timeout_s: longest wait of a materialize for a hit. daemon_grace_s: how long an
        outage is waited for, once. gpu_staging_bytes: device bytes that deferred clones may take (W3). split_lists:
        give each request its entry of a list with one entry a request.

        Raises:
            DaemonUnavailableError: nobody answers at the socket.
            AttachError: refused; the class and the text say why and what to change.
        """
        session = Session.attach(
            socket,
            model=model,
            stage=stage,
            geometry=geometry,
            keys=keys,
            rank=rank,
            open_remembered_keys=open_remembered_keys,
            daemon_grace_s=daemon_grace_s,
        )
        return cls(
            session,
            view,
            policy or ModelCachePolicy(),
            declared=frozenset(key.name for key in keys),
            staging_claim_timeout_s=staging_claim_timeout_s,
            merge_timeout_s=merge_timeout_s,
            gpu_staging_bytes=gpu_staging_bytes,
            split_lists=split_lists,
            device=device,
        )

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Set what the model wants cached (K5). Before the first step."""
        self._keys.policy = policy

    # ------------------------------------------------------------ step begins

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Note a scheduler output. Engine thread, once a step, before finished requests leave the batch.

        Raises:
            HitNotCoveredError: a hit without blocks, or not at a block's end (H3). The step's slots become UNKNOWN.
            StageCacheError: a deferred write failed earlier (W5); this step was noted all the same.
        """
        begun = time.perf_counter_ns()
        self._abandon()
        self._come_back()
        with self._lock:
            plan = self._planner.plan(scheduler_output, self._next_step_id - 1)
        self._plan = plan
        if plan.ended and self._deferred.open:
            self._guarded(lambda: self._deferred.flush(plan.ended))
        if plan.hits:
            self._begin_hits(plan)
        self.counters.phase_ns["begin"] += time.perf_counter_ns() - begun
        if plan.error is not None:
            raise plan.error
        if self._deferred.errors:
            raise self._deferred.errors.pop(0)

    def _begin_hits(self, plan: StepPlan) -> None:
        self.counters.hits += len(plan.hits)
        self.counters.hit_rows += sum(hit.rows for hit in plan.hits)
        if self._deferred.open:
            blocks = {block for hit in plan.hits for block in hit.blocks}
            touched = self._deferred.touching(blocks, self._geometry.block_size)
            self._guarded(lambda: self._deferred.flush(touched))
        with self._lock:
            planned = self._hits.plan(plan.hits, self._keys.hit_keys())
        self._log_gathers(planned)

    def _log_gathers(self, planned: list[tuple[Hit, Gather]]) -> None:
        """Log gathers as records of their own; what cannot be logged is an error of that hit."""
        for record, part in self._hits.records(planned):
            try:
                self._hits.logged(part, self.session.append(record))
            except StageCacheError as error:
                for _, gather in part:
                    gather.error = error
        self._hits.spill(planned, self._merge_timeout_s)

    def _abandon(self) -> None:
        """A step began and was never saved: its slots become UNKNOWN (W8)."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._lose(plan)

    def _lose(self, plan: StepPlan) -> None:
        with self._lock:
            self._hits.release(gather for hit in plan.hits for gather in hit.gathers.values())
            starts = start_positions(plan.source.scheduled_new_reqs or (), plan.source.scheduled_cached_reqs)
            runs = scheduled_runs(plan.scheduled, starts, self._requests, self._geometry)
        if len(runs):
            self.counters.lost_steps += 1
            self._log_lost(runs)

    def _log_lost(self, runs: Runs) -> None:
        unit = runs.ndim == 1
        record = Record(0, Kind.LOST, rows=count_slots(runs), unit_runs=unit, runs=runs)
        try:
            self.session.append(record)
        except StageCacheError:
            self._unlogged = True

    def _come_back(self) -> None:
        """After an outage, or on an operator's wish, a new epoch begins before anything else is logged."""
        session = self.session
        if session.away and not session.returned():
            return
        cause = session.watcher.reset_cause
        if self._unlogged or cause is not None:
            session.watcher.reset_cause = None
            self.reset(cause=cause or "steps were not logged while the daemon was away")

    def reset(self, cause: str = "") -> int:
        """Begin a new epoch: nothing saved before is readable after (R5). Engine thread. Returns the epoch.

        Rows of hits that were gathered before stay good; steps saved before may still be materialized.
        """
        self._deferred.drop_all()
        try:
            self.session.append(Record(0, Kind.RESET, rows=self.session.epoch + 1))
        except StageCacheError:
            self._unlogged = True
            return self.session.epoch
        self._unlogged = False
        self.session.epoch += 1
        self.counters.resets += 1
        return self.session.epoch

    # ------------------------------------------------------------------- save

    def save_outputs(
        self,
        hidden_states: torch.Tensor | None,
        multimodal_outputs: Mapping[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Keep a step's outputs; returns the step id, to be consumed exactly once.

        hidden_states: [>= n, ...]; multimodal_outputs: by flat name; n = num_tokens_unpadded rows count, rows beyond
        are padding. Engine thread, after the forward. However it fails, the step's slots become UNKNOWN (W8).

        Raises:
            StepTooLargeError, SlotMismatchError: refused before anything was copied (W6).
            StagingTimeoutError: no page became free (W2).
        """
        begun = time.perf_counter_ns()
        plan, self._plan = self._plan, None
        if plan is None:
            raise StageCacheError("save_outputs without new_step_starts: every step begins with it")
        try:
            with self._lock:
                batch = self._batches.read(plan.scheduled, plan.tokens, num_tokens_unpadded)
            step = self._save(plan, batch, hidden_states, multimodal_outputs or {}, num_tokens_padded)
        except BaseException:
            self.counters.refused_saves += 1
            self._lose(plan)
            raise
        self.counters.steps += 1
        self.counters.computed_rows += batch.tokens
        self.counters.phase_ns["save"] += time.perf_counter_ns() - begun
        return step.step_id

    def _save(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor | None, outputs: Mapping[str, Any], padded: int
    ) -> SavedStep:
        n = batch.tokens
        split = self._keys.split(hidden, outputs, n, padded, len(batch.req_ids))
        for key in split.demoted:
            self._close_key(key)
        local = {name: self._device.to_host(rows) for name, rows, _ in split.unopened}
        local.update({key.schema.name: self._device.to_host(rows) for key, rows in split.deferred})
        leftover = {name: snapshot(value, self._device) for name, value in split.leftover.items()}
        step_id = self._next_step_id
        write = Write(f"step {step_id}")
        page = self._claim_page(step_id)
        staged: list[StagedKey] = []
        try:
            if page is None:
                self.counters.local_steps += 1
                self._unlogged = self._unlogged or n > 0
                self._spoil(plan, batch)
                local.update({key.schema.name: self._device.to_host(rows) for key, rows in split.immediate})
            else:
                write.advance(WriteState.QUEUED)
                write.advance(WriteState.COPYING)
                for key, rows in split.immediate:
                    self._device.stage(key.pages[page.page][:n], rows)
                    staged.append(key)
                if n:
                    self._log_step(plan, batch, split, page)
                write.advance(WriteState.HOST_READY, sequence=page.sequence)
        except BaseException as error:
            write.advance(WriteState.FAILED, cause=str(error))
            if page is not None:
                self._pages.hand_out(page)
            raise
        step = SavedStep(
            step_id,
            batch,
            page,
            staged,
            local,
            leftover,
            {hit.req_id: hit for hit in plan.hits},
            [error for _, error in split.failed],
            self._keys.policy.needs_full_hidden_states and (hidden is not None or (n == 0 and bool(plan.hits))),
            self._split_lists,
            dict(self._keys.open),
        )
        with self._lock:
            self._next_step_id += 1
            self._steps[step_id] = step
        return step

    def _log_step(self, plan: StepPlan, batch: Batch, split: Split, page: PageUse) -> None:
        """The SAVE record, and the gathers that belong behind it."""
        modes = [key.key_id | int(KeyMode.ROWS) << MODE_SHIFT for key, _ in split.immediate]
        modes += [key.key_id | int(KeyMode.CLAIM) << MODE_SHIFT for key, _ in split.deferred]
        modes += [key.key_id | int(KeyMode.FAILED) << MODE_SHIFT for key, _ in split.failed if key is not None]
        if split.unopened:
            # Rows that no key took: were the slots only claimed by the others, a later hit would read zeros here.
            self.counters.lost_steps += 1
            self._log_lost(batch.runs)
        else:
            clones = self._clone_deferred(split)
            page.sequence = self.session.append(
                Record(
                    0,
                    Kind.SAVE,
                    page=page.page,
                    rows=batch.tokens,
                    unit_runs=batch.runs.ndim == 1,
                    keys=np.array(modes, np.uint32),
                    runs=batch.runs,
                )
            )
            if clones:
                self._add_deferred(batch, clones, page.sequence)
        if plan.hits:
            self._gather_behind(plan, batch)

    def _gather_behind(self, plan: StepPlan, batch: Batch) -> None:
        """Hits that touch this step's slots are gathered (again), now behind the write; so are keys opened now (H6)."""
        size = self._geometry.block_size
        with self._lock:
            planned = self._hits.plan(plan.hits, self._keys.hit_keys())
        fresh = {id(gather) for _, gather in planned}
        for hit in self._touched(plan, batch):
            again = (gather for name, gather in hit.gathers.items() if name in self._keys.open)
            planned += [(hit, gather) for gather in again if id(gather) not in fresh]
        if not planned:
            return
        if self._deferred.open:
            blocks = {block for hit, _ in planned for block in hit.blocks}
            self._guarded(lambda: self._deferred.flush(self._deferred.touching(blocks, size)))
        self._log_gathers(planned)

    def _spoil(self, plan: StepPlan, batch: Batch) -> None:
        """Hits on rows of this very step, which is not logged: what was gathered for them is an older tenant's."""
        for hit in self._touched(plan, batch):
            for gather in hit.gathers.values():
                gather.error = DaemonLostError(f"request {hit.req_id} hits rows of a step that the daemon did not get")

    def _touched(self, plan: StepPlan, batch: Batch) -> list[Hit]:
        """Hits that name a block which this step writes."""
        if not plan.hits:
            return []
        size = self._geometry.block_size
        written = set((batch.slots() // size).tolist())
        return [hit for hit in plan.hits if not written.isdisjoint(hit.blocks[hit.low // size :])]

    def _claim_page(self, step_id: int) -> PageUse | None:
        """A page for a step; None while the daemon is away: the step then keeps its rows for itself.

        Raises:
            StagingTimeoutError: the house stayed full.
        """
        if self.session.away or self.session.has_ended():
            return None
        claimed = self._pages.try_claim(step_id)
        if claimed is not None:
            return claimed
        found: list[PageUse] = []

        def ready() -> bool:
            use = self._pages.try_claim(step_id)
            if use is not None:
                found.append(use)
            return use is not None

        try:
            self.session.wait(ready, self._claim_timeout_s, "a staging page", self._pages.wait)
        except DaemonLostError:
            return None
        except StageCacheError:
            if self.session.has_ended():
                return None
            raise self._pages.timeout_error(self._claim_timeout_s) from None
        return found[0]

    def _close_key(self, key: StagedKey) -> None:
        keys = np.array([key.key_id | int(KeyMode.ROWS) << MODE_SHIFT], np.uint32)
        # Away, the daemon keeps a pool that nothing will name again.
        with contextlib.suppress(StageCacheError):
            self.session.append(Record(0, Kind.CLOSE_KEY, keys=keys))

    # --------------------------------------------------------------- deferred

    def _clone_deferred(self, split: Split) -> list[tuple[StagedKey, torch.Tensor]]:
        clones = []
        for key, rows in split.deferred:
            self._guarded(lambda rows=rows: self._deferred.make_room(rows.numel() * rows.element_size()))
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
            clone = StepClone(key, rows, slots, sequence, 0)
            self._guarded(lambda clone=clone: self._deferred.add(clone, parts))

    def _claim_flush_page(self, key: StagedKey) -> int:
        pages = self._flush_pages.get(key.key_id)
        if pages is None:
            pages = self._flush_pages[key.key_id] = FlushPages(self._geometry.staging_depth)
        self.session.wait_consumed(pages.next_free_at, self._claim_timeout_s, f"a flush page of key {key.schema.name}")
        return pages.take()

    def _flush_logged(self, key: StagedKey, page: int, sequence: int) -> None:
        self._flush_pages[key.key_id].logged(page, sequence)

    def _guarded(self, action: Any) -> None:
        """Do something to deferred rows; where the log cannot be reached, the epoch rises later instead."""
        try:
            action()
        except StageCacheError:
            self._unlogged = True

    # ------------------------------------------------------------ materialize

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> StageCacheOutputs:
        """Merged outputs of a saved step for some or all of its requests. Any thread, once a step.

        Raises:
            StepConsumedError: unknown step, or consumed before (S1).
            UnknownRequestError: an id that was not in the batch at save (S2); the step stays unconsumed.
            UnreadableHitError: rows of a hit are not there (H4). The step is consumed.
            SchemaMismatchError: a key was refused in this step (K3). The step is consumed.
            DaemonLostError, SessionFailedError, CallDeadlineError: a hit could not be brought. The step is consumed.
        """
        begun = time.perf_counter_ns()
        wanted = list(req_ids)
        with self._lock:
            step = self._steps.get(step_id)
            if step is None:
                raise self._consumed_error(step_id)
            if wanted != step.batch.req_ids and not set(wanted) <= set(step.batch.req_ids):
                strangers = sorted(set(wanted) - set(step.batch.req_ids))
                raise UnknownRequestError(
                    f"materialize(step {step_id}) asked for {strangers[:8]}, not in the batch when it was saved.",
                    remedy="Pass ids of the save, not of the live batch.",
                )
            del self._steps[step_id]
            self._in_flight.add(step_id)
            clipped = windows(step, wanted, self._bounds) if self._requests.chained else None
        try:
            if step.failed:
                raise step.failed[0]
            outputs = assemble(step, wanted, clipped, self._read_hit, self._hand_out)
            with self._lock:
                self._delivered(step, wanted, clipped)
        finally:
            self._end_step(step)
        self.counters.materialized += 1
        self.counters.phase_ns["materialize"] += time.perf_counter_ns() - begun
        return outputs

    def discard_step(self, step_id: int) -> None:
        """Consume a step whose outputs nobody wants. Its rows are kept all the same. Any thread.

        Raises:
            StepConsumedError: unknown step, or consumed before (S1).
        """
        with self._lock:
            step = self._steps.pop(step_id, None)
            if step is None:
                raise self._consumed_error(step_id)
        self._end_step(step)
        self.counters.discarded += 1

    def _consumed_error(self, step_id: int) -> StepConsumedError:
        return StepConsumedError(
            f"step {step_id} was consumed before, or never saved; unconsumed are {sorted(self._steps)[:8]}.",
            remedy="Consume each step id once, by materialize or discard_step.",
        )

    def _bounds(self, row: int) -> tuple[int, int]:
        period = self._requests.period_of(row)
        if len(period.chain) == 1:
            return 0, NO_END
        return self._requests.low(period), self._requests.high(period)

    def _delivered(self, step: SavedStep, wanted: list[str], clipped: dict[str, tuple[int, int]] | None) -> None:
        batch = step.batch
        if clipped is None and batch.counts is None and wanted == batch.req_ids:
            self._requests.handed_out_all(batch.rows, batch.ends)
            return
        of = windows(step, wanted, lambda _: (0, NO_END)) if clipped is None else clipped
        index_of = {req_id: index for index, req_id in enumerate(batch.req_ids)}
        for req_id, (begin, end) in of.items():
            if end > begin:
                self._requests.handed_out(int(batch.rows[index_of[req_id]]), begin, end)

    def _read_hit(self, hit: Hit, name: str, needed: tuple[int, int]) -> torch.Tensor:
        gather = hit.gathers.get(name)
        if gather is None:
            raise DaemonLostError(f"request {hit.req_id}: key {name} has no rows of its hit at the daemon")
        return self._hits.read(hit, gather, needed, self._merge_timeout_s)

    def _hand_out(self, hit: Hit, name: str, rows: torch.Tensor) -> torch.Tensor:
        gather = hit.gathers[name]
        if gather.extent is None:
            return rows
        with self._lock:
            leased = self._arena.lease(gather.extent) if self._arena.may_lease(gather.extent) else None
            if leased is not None:
                gather.extent = None
        if leased is None:
            self.counters.copied_extents += 1
            return clone_rows(rows)
        return torch.from_numpy(leased)[: rows.numel() * rows.element_size()].view(rows.dtype).view(rows.shape)

    def _end_step(self, step: SavedStep) -> None:
        if step.page is not None:
            self._pages.hand_out(step.page)
        with self._lock:
            self._hits.release(gather for hit in step.hits.values() for gather in hit.gathers.values())
            self._in_flight.discard(step.step_id)
            self._requests.reclaim(min(self._in_flight | {next(iter(self._steps), self._next_step_id)}))

    def close(self) -> None:
        """Detach from the daemon; the session's memory is freed. Rows handed out stay good."""
        if not self._closed:
            self._closed = True
            self.session.close()
