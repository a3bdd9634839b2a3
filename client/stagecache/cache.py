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
never held over a copy or a wait. ``_delivery`` is held by a materialize from beginning to end, so that what one hands
out and what the next one must not repeat is decided in one order (R3); it is taken before ``_lock``, and the engine
thread never needs it. saver.py keeps a step, merge.py puts it together again; the files beside them hold one
table each. A session that is over is replaced: a thread attaches anew (reattach.py), and the next ``new_step_starts``
takes what it made; steps saved before keep the attachment that they were saved under.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stagecache.attachment import Attachment
from stagecache.batch import BatchReader, scheduled_runs, start_positions
from stagecache.counters import Counters
from stagecache.device import CpuDevice
from stagecache.errors import SlotMismatchError, StageCacheError, StepConsumedError, UnknownRequestError
from stagecache.keys import KeyBook
from stagecache.merge import SavedStep, Window, assemble, windows
from stagecache.outputs import StageCacheOutputs
from stagecache.planner import StepPlan, StepPlanner
from stagecache.policy import ModelCachePolicy
from stagecache.reattach import Renewals
from stagecache.requests import NO_END, RequestTable
from stagecache.reset_causes import ATTACHED_ANEW, ATTACHED_LATE
from stagecache.session import Session
from stagecache.sharing import BlockSharing, Joined, Namespace
from stagecache.step import BatchView
from stagecache_wire.geometry import Geometry, KeySchema

logger = logging.getLogger("stagecache")

DRAIN_S = 5.0
"""Longest time that a close waits for copies from the device."""


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
        explicit_acks: bool = False,
        device: CpuDevice | None = None,
        requests: RequestTable | None = None,
        first_step_id: int = 1,
    ) -> None:
        """As ``attach``. requests, first_step_id: where this cache goes on behind another one: what that handed out,
        and ids that it did not give.
        """
        geometry = session.geometry
        self.counters = Counters()
        self.on_renewed: Callable[[], None] = lambda: None
        """Called on the engine thread when another session has taken the place of one that was over."""
        self._geometry = geometry
        self._lock = threading.Lock()
        self._delivery = threading.Lock()
        self._requests = requests or RequestTable(explicit_acks=explicit_acks)
        self._planner = StepPlanner(self._requests, geometry)
        self._batches = BatchReader(view, geometry, self._requests)
        self._attachment = partial(
            Attachment,
            counters=self.counters,
            lock=self._lock,
            device=device or CpuDevice(),
            claim_timeout_s=staging_claim_timeout_s,
            merge_timeout_s=merge_timeout_s,
            gpu_staging_bytes=gpu_staging_bytes,
            split_lists=split_lists,
        )
        self._renewals = Renewals()
        self._closed = False
        self._use(self._attachment(session, KeyBook(session.open_key, policy, declared)))
        self._steps: dict[int, SavedStep] = {}
        self._in_flight: dict[int, Callable[[], object]] = {}
        """Steps that are being materialized, each by a weak reference."""
        self._next_step_id = first_step_id
        self._plan: StepPlan | None = None
        self._missed: list[Any] = []
        """Scheduler outputs of steps that were interrupted before all was noted that they say."""
        self._sharing: BlockSharing | None = None
        """Once a join was tried, also where nothing is shared."""
        self._renewals.watch(self._home)

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
        engine: str = "",
        open_remembered_keys: bool = False,
        staging_claim_timeout_s: float = 30.0,
        merge_timeout_s: float = 30.0,
        daemon_grace_s: float = 2.0,
        gpu_staging_bytes: int = 512 << 20,
        split_lists: bool = True,
        explicit_acks: bool = False,
        device: CpuDevice | None = None,
    ) -> StageCache:
        """Attach this process to the daemon at ``socket`` and open the declared ``keys``.

        geometry: the engine's KV cache and limits. view: the live batch. engine: a name that this engine's scheduler
        gives too, where it holds leases on shared blocks. staging_claim_timeout_s: longest wait of a save for a page
        (W2). merge_timeout_s: longest wait of a materialize for a hit. daemon_grace_s: how long an outage is waited
        for, once. gpu_staging_bytes: device bytes that deferred clones may take (W3). split_lists: give each request
        its entry of a list with one entry a request. explicit_acks: rows count as delivered when ``ack`` says so, not
        when materialize handed them out (R3). device: where the outputs are, host memory by default;
        ``stagecache.cuda.device_for`` makes one for a GPU, for this cache alone.

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
            engine=engine,
            open_remembered_keys=open_remembered_keys,
            daemon_grace_s=daemon_grace_s,
        )
        cache = cls(
            session,
            view,
            policy or ModelCachePolicy(),
            declared=frozenset(key.name for key in keys),
            staging_claim_timeout_s=staging_claim_timeout_s,
            merge_timeout_s=merge_timeout_s,
            gpu_staging_bytes=gpu_staging_bytes,
            split_lists=split_lists,
            explicit_acks=explicit_acks,
            device=device,
        )
        cache._trace(model)
        return cache

    def begin_late(self, model: str) -> None:
        """The engine ran before this cache was attached: nothing of what it has hashes for is here. Before any step."""
        self._saver.epochs.begin_anew(0, ATTACHED_LATE)
        self._trace(model)

    def _trace(self, model: str) -> None:
        if os.environ.get("STAGECACHE_TRACING", "0") not in ("", "0"):
            from stagecache import tracing

            tracing.instrument(self, model)

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Set what the model wants cached (K5). Before the first step."""
        self._keys.policy = policy

    # ---------------------------------------------------------------- sessions

    def _use(self, home: Attachment) -> None:
        self.session = home.session
        self._arena, self._hits, self._keys = home.arena, home.hits, home.keys
        self._saver, self._export = home.saver, home.export
        self._home = home  # Last: it says that all of them are the session's.

    def _take_session(self) -> None:
        """Go on with the session that was attached in the background, where there is one. Engine thread.

        An interrupt may come anywhere in here: until ``watch`` has returned, the next step does all of it again.
        """
        session = self._renewals.session()
        if session is None:
            return
        if self._home.session is not session:
            self._change_to(session)
        home = self._home
        if self._sharing is not None:
            self._sharing = home.saver.sharing  # Also where nothing is shared: fills named must be lost (W8).
        home.saver.sharing.join_intended()
        self.counters.renewals = home.renewals
        logger.warning("stagecache: stage %s is attached anew, as session %s", session.stage, session.session_id)
        self.on_renewed()
        self._renewals.watch(home)

    def _change_to(self, session: Session) -> None:
        """Nothing of the home of before changes that a second try would read, until the next one takes its place."""
        old = self._home
        home = self._attachment(session, old.keys.renewed(session.open_key))
        home.renewals = old.renewals + 1
        epochs = old.saver.epochs
        if old.session.watcher.reset_cause is not None:  # Nobody has followed it.
            epochs.model_may_differ = True
        home.saver.epochs.follow_on(epochs)
        home.saver.epochs.begin_anew(old.session.epoch, ATTACHED_ANEW)
        home.saver.sharing.intend(old.saver.sharing.vouched)
        if old.session.stream is not None:
            old.session.stream.retire()
        with self._lock:
            self._use(home)

    # ------------------------------------------------------------ step begins

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Note a scheduler output. Engine thread, once a step, before finished requests leave the batch.

        Raises:
            HitNotCoveredError: a hit without blocks, or not at a block's end (H3). The step's slots become UNKNOWN.
            FailedWriteError: a deferred write failed earlier (W5); this step was noted all the same: save it.
        """
        begun = time.perf_counter_ns()
        try:
            plan = self._begin(scheduler_output)
        except BaseException:  # An interrupt, or an output that cannot be read.
            self.miss_step(scheduler_output)
            raise
        self.counters.phase_ns["begin"] += time.perf_counter_ns() - begun
        if plan.error is not None:
            raise plan.error.again()
        if self._saver.deferred.errors:
            raise self._saver.deferred.take_error()

    def miss_step(self, scheduler_output: Any) -> None:
        """A step whose output was not noted, or not to the end: an interrupt came in between. Engine thread; may be
        called again.

        Which slots it wrote is in no plan, so the next step begins a new epoch (W8); and it notes what this output says
        of requests, since the engine says once that a request has ended.
        """
        self._saver.epochs.unlogged = True
        if not any(missed is scheduler_output for missed in self._missed):
            self._missed.append(scheduler_output)

    def _begin(self, scheduler_output: Any) -> StepPlan:
        self._abandon()
        if self._renewals.pending is not None:
            self._take_session()
        stream = self.session.stream
        if stream is not None and stream.sender.failures:
            self._saver.note_failures(stream)
        epoch = getattr(scheduler_output, "stagecache_epoch", None)
        if epoch is None:
            self._saver.epochs.follow(None)
        else:
            self._saver.epochs.follow(epoch, getattr(scheduler_output, "stagecache_model", None))
        with self._lock:
            last = self._next_step_id - 1
            plan = self._noted(scheduler_output, last) if self._missed else self._planner.plan(scheduler_output, last)
        self._plan = plan
        if plan.ended:
            self._saver.flush_ended(plan.ended, plan.finished)
        if self._sharing is not None:
            self._sharing.begin(scheduler_output, plan)
        if self._missed:
            self._missed = []
        # Behind something that the log does not know, nothing may be read; where nothing can be logged, this says why.
        if plan.hits and (not self._saver.epochs.unlogged or self.session.away or self.session.has_ended()):
            self._saver.begin_hits(plan.hits)
        return plan

    def _noted(self, scheduler_output: Any, last: int) -> StepPlan:
        """The plan of a step behind missed ones, and what these say. last: newest step saved. Caller holds the lock."""
        earlier = [missed for missed in self._missed if missed is not scheduler_output]
        ended = StepPlan(None, {}, 0)
        self._planner.catch_up(earlier, ended, last)
        plan = self._planner.plan(scheduler_output, last, again=len(earlier) < len(self._missed))
        plan.ended = ended.ended + plan.ended
        plan.finished = ended.finished + plan.finished
        plan.replaced = ended.replaced + plan.replaced
        return plan

    def _abandon(self) -> None:
        """A step began and was never saved: its slots become UNKNOWN (W8)."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._lose(plan)

    def _lose(self, plan: StepPlan) -> None:
        try:
            with self._lock:
                self._hits.release(gather for hit in plan.hits for gather in hit.gathers.values())
                starts = start_positions(plan.source.scheduled_new_reqs or (), plan.source.scheduled_cached_reqs)
                runs = scheduled_runs(plan.scheduled, starts, self._requests, self._geometry)
            self._saver.epochs.lose(runs)
        except SlotMismatchError:  # A block id beyond the cache, or blocks that nobody told: which slots, who knows.
            self._saver.epochs.unlogged = True
        except BaseException:
            self._saver.epochs.unlogged = True
            raise

    def reset(self, cause: str = "", *, same_model: bool = False) -> int:
        """Begin a new epoch: nothing saved before is readable after (R5). Engine thread. Returns the epoch.

        same_model: the model computes the rows that it computed before. Otherwise what other replicas share is not
        this session's any more, until it joins again.

        Rows of hits that were gathered before stay good; steps saved before may still be materialized. The engine keeps
        its block hashes: hits on them fail from now on, unless its prefix cache is reset too (`stagecache reset`).
        """
        self._saver.epochs.unlogged = True
        self._saver.epochs.model_may_differ |= not same_model
        logger.info("stagecache: new epoch of stage %s: %s", self.session.stage, cause or "asked for")
        epoch = self._saver.epochs.reset()
        self._export.refresh(len(self._steps))
        return epoch

    # ---------------------------------------------------------- shared blocks

    def join_namespace(self, namespace: Namespace) -> Joined:
        """Share full blocks with the replicas of this stage on the node: from now on ``publish`` and ``fill`` work, and
        what scheduler outputs say of blocks is followed (``stagecache.sharing``). Engine thread; the answer says
        whether the daemon shares at all. It stays joined when the daemon is restarted, and joins again when it attaches
        anew.

        Joining says that the model is, now, what ``namespace`` names. A reset takes that back but where it is told that
        the model is the same; then join again, with what names the model of then. Blocks have the keys that are open
        and confirmed now.

        Raises:
            UnsupportedHashError: a hash algorithm that may collide.
            StageCacheError: refused, or the daemon does not answer.
        """
        joined = self._saver.sharing.join(namespace)
        self._sharing = self._saver.sharing  # Also where nothing is shared: fills that are named must be lost (W8).
        return joined

    def join_later(self, namespace: Namespace) -> None:
        """As ``join_namespace``, from a thread of its own: for a worker that runs already. A refusal is logged."""
        self._saver.sharing.join_later(namespace)
        self._sharing = self._saver.sharing

    @property
    def keys_settled(self) -> bool:
        """Whether the keys that are open are those that the model brings, as far as steps have shown; what a namespace
        is joined with should be.
        """
        return self._keys.settled

    def publish(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Offer full blocks to the node, as (block id, 32-byte hash): rows of all keys must have been saved, deferred
        ones flushed. A block of which a row is not there is not kept. Engine thread; returns how many were logged, 0
        where no namespace is joined.
        """
        return self._saver.sharing.publish(blocks)

    def fill(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Give blocks the rows that the node keeps for their hashes, before new_step_starts of a step that hits them.
        A block whose hash is not kept is UNKNOWN for every key: a hit on it raises UnreadableHitError. Engine thread;
        returns how many were logged; the others are UNKNOWN too.
        """
        try:
            self._abandon()  # Before the blocks have a new tenant.
            if self._renewals.pending is not None:
                self._take_session()
            self._saver.epochs.follow(None)
            return self._saver.sharing.fill(blocks)
        except BaseException:
            self._saver.epochs.unlogged = True
            raise

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
        step_id = self._next_step_id
        self._next_step_id += 1
        try:
            with self._lock:
                batch = self._batches.read(plan.scheduled, plan.tokens, num_tokens_unpadded)
            step = self._saver.save(step_id, plan, batch, hidden_states, multimodal_outputs or {}, num_tokens_padded)
            step.home = self._home
            if step.page is not None:
                step.page.holder = weakref.ref(step)
            with self._lock:
                self._steps[step_id] = step
            self.counters.steps += 1
            self.counters.computed_rows += batch.tokens
            self.counters.phase_ns["save"] += time.perf_counter_ns() - begun
            self._export.saved(step, len(self._steps))
        except BaseException as error:
            # Also an interrupt between any two lines: the caller never learns the id, so nothing may stay behind it.
            with self._lock:
                self._steps.pop(step_id, None)
            self._saver.pages.abandon(step_id)
            self.counters.refused_saves += 1
            try:
                self._lose(plan)
            finally:
                self._export.refused(error, len(self._steps))
            raise
        return step_id

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
        with self._delivery:
            step, wanted, clipped = self._take(step_id, req_ids)
            try:
                if step.failed:
                    raise step.failed[0].again()
                if step.copies is not None:
                    step.home.land(step)
                outputs = assemble(step, wanted, clipped, step.home.read_hit, step.home.hand_out)
                with self._lock:
                    self._delivered(step, wanted, clipped)
            except BaseException as error:
                self._export.failed(error, len(self._steps))
                raise
            finally:
                self._end_step(step)
            self.counters.materialized += 1
            self.counters.phase_ns["materialize"] += time.perf_counter_ns() - begun
            self._export.handed_out(step, wanted, len(self._steps), self._next_step_id - 1)
        return outputs

    def _take(self, step_id: int, req_ids: Sequence[str]) -> tuple[SavedStep, list[str], dict[str, Window] | None]:
        """Consume a step: the step, the ids that are asked for, each once, and which positions of each are handed out;
        None where that is all of them.
        """
        with self._lock:
            step = self._steps.get(step_id)
            if step is None:
                raise self._consumed_error(step_id)
            wanted = step.batch.req_ids
            if req_ids != wanted:
                wanted = list(dict.fromkeys(req_ids))
                if wanted == step.batch.req_ids:
                    wanted = step.batch.req_ids
            if wanted is not step.batch.req_ids and not set(wanted) <= set(step.batch.req_ids):
                strangers = sorted(set(wanted) - set(step.batch.req_ids))
                raise UnknownRequestError(
                    f"materialize(step {step_id}) asked for {strangers[:8]}, not in the batch when it was saved.",
                    remedy="Pass ids of the save, not of the live batch.",
                )
            self._in_flight[step_id] = weakref.ref(step) if step.page is None else step.page.holder
            del self._steps[step_id]
            return step, wanted, windows(step, wanted, self._bounds) if self._requests.chained else None

    def ack(self, req_id: str, upto: int) -> None:
        """With ``explicit_acks``: the rows of a request below position ``upto`` were received (R3). Any thread.

        Rows that were handed out and not acked come again when the request comes back. An id that ended is ignored.
        """
        with self._lock:
            self._requests.ack(req_id, upto)

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
        self._export.refresh(len(self._steps))

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

    def _delivered(self, step: SavedStep, wanted: list[str], clipped: dict[str, Window] | None) -> None:
        batch, hits = step.batch, step.hits
        if clipped is None and batch.counts is None and wanted is batch.req_ids:
            self._requests.handed_out_all(batch.rows, batch.ends)
            return
        some = None if wanted is batch.req_ids else set(wanted)
        for index, req_id in enumerate(batch.req_ids):
            if some is not None and req_id not in some:
                continue
            if clipped is not None:
                begin, end = clipped[req_id]
            else:
                begin, end = hits[req_id].low if req_id in hits else int(batch.first[index]), int(batch.ends[index])
            if end > begin:
                self._requests.handed_out(int(batch.rows[index]), begin, end)

    def _end_step(self, step: SavedStep) -> None:
        if step.page is not None:
            step.home.saver.pages.hand_out(step.page)
        if step.copies is not None:
            step.copies.release()
        with self._lock:
            if step.hits:
                step.home.release(step)
            self._in_flight.pop(step.step_id, None)
            if self._requests.retired:
                self._reclaim()

    def _reclaim(self) -> None:
        """Free the rows of requests that ended, but of those that a step in flight needs. Caller holds the lock."""
        oldest = next(iter(self._steps), self._next_step_id)
        if self._in_flight:
            gone = [step_id for step_id, reference in self._in_flight.items() if reference() is None]
            for step_id in gone:  # something interrupted them
                self._in_flight.pop(step_id, None)
            oldest = min([*self._in_flight, oldest])
        self._requests.reclaim(oldest)

    def __enter__(self) -> StageCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach from the daemon, which gives up the session. Rows handed out stay good; what this process has mapped
        goes with the last reference to this object and to them: nothing in here refers back to what holds it.
        """
        if not self._closed:
            self._closed = True
            self._renewals.stop(self._home)
            if self.session.stream is not None and not self.session.forked:
                self.session.stream.close(DRAIN_S)
            self.session.close()
            self._saver.deferred.drop_all()
            self._saver.deferred.errors.clear()
