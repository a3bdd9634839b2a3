"""A stage that found no daemon when it started: vLLM-Omni's in-process cache serves it until it can change.

vLLM-Omni ends a stage whose hit has no rows, so the change must not lose one:

    attached       in the background (``stagecache.reattach``), while the in-process cache goes on
    reset          the engine is asked to forget its prefix cache, by the way that a worker asks (``engine_resets``)
    changed        with the first step behind that reset in which no request goes on: all were preempted, or have ended.
                   Nothing that is computed from here on can hit a row of before
    drained        steps that were saved before are consumed from the in-process cache, which then is shut down

What was handed out meanwhile is followed with the tables of the cache itself (``requests``, ``planner``, ``batch``), so
that requests which the reset preempted get each position once (R3).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from stagecache.batch import Batch, BatchReader
from stagecache.engine_resets import EngineResets
from stagecache.errors import StageCacheError
from stagecache.planner import StepPlan, StepPlanner
from stagecache.reattach import Attacher
from stagecache.requests import RequestTable
from stagecache.reset_causes import ATTACHED_LATE
from stagecache.session import Session
from stagecache.shim.omni.manager import SidecarPrefixCacheManager
from stagecache.shim.omni.view import OmniBatchView
from stagecache_wire.geometry import Geometry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.stagecache")

ASK_AGAIN_S: Final = 60.0
"""Where no reset followed: nobody may have heard the first request."""

Make = Callable[[Session, RequestTable, int], SidecarPrefixCacheManager]
"""Makes the manager of a session: what was handed out before, and its first step id."""


class Waiting:
    """A stage that waits for its daemon. attach: makes a session, or raises; make: the manager of one."""

    def __init__(
        self, attach: Callable[[], Session], make: Make, stage: str, geometry: Geometry, error: Exception
    ) -> None:
        self.make = make
        self.stage = stage
        self.geometry = geometry
        self.taken: Session | None = None
        """The session that serves now."""
        self._attach = attach
        self.attacher = Attacher(attach, f"stage {stage}", known=error)
        self.attacher.start()

    def session(self) -> Session | None:
        """The session, once there is one that lives. Never waits."""
        session = self.attacher.session
        if session is None or not session.has_ended():
            return session
        self.attacher = Attacher(partial(_attach_again, session, self._attach), f"stage {self.stage}")
        self.attacher.start()
        return None

    def stop(self) -> None:
        """Attach no more; what nobody took is given back."""
        self.attacher.stop(self.taken)


def _attach_again(old: Session, attach: Callable[[], Session]) -> Session:
    old.let_go()
    return attach()


class LateManager:
    """Takes the place of vLLM-Omni's manager on a runner, with the calls of 0.30.0.

    Attributes:
        inner: vLLM-Omni's manager; None once it was shut down.
        changed: the sidecar manager, once it serves. followed: requests that go on with it.
    """

    def __init__(self, runner: Any, inner: Any, waiting: Waiting, group_view: Any) -> None:
        self.changed: SidecarPrefixCacheManager | None = None
        self.followed: tuple[str, ...] = ()
        self._runner = weakref.ref(runner)
        self.inner: Any = inner
        self._waiting = waiting
        self._group_view = group_view
        self._view = OmniBatchView(waiting.geometry.block_size, group_view)
        self._requests = RequestTable()
        self._planner = StepPlanner(self._requests, waiting.geometry)
        self._batches = BatchReader(self._view, waiting.geometry, self._requests)
        self._lock = threading.Lock()
        self._plan: StepPlan | None = None
        self._open: dict[int, Batch | None] = {}
        """Steps that ``inner`` saved and nobody has consumed."""
        self._last_id = 0
        self._resets: tuple[Session, EngineResets] | None = None
        """Who asks for the reset, with the session that waits."""
        self._asked = (0, 0.0)
        """The engine's epoch when it was asked last, and at what time of the monotonic clock."""
        self._told = False

    def register_policy(self, policy: Any) -> None:
        """See ``SidecarPrefixCacheManager``."""
        (self.changed or self.inner).register_policy(policy)

    def new_step_starts(self, scheduler_output: Any) -> None:
        """A step begins; the change may come with it. Engine thread."""
        if self.changed is None:
            session = self._waiting.session()
            if session is not None and self._may_change(session, scheduler_output):
                self._change(session)
        if self.changed is not None:
            self._drain()
            self.changed.new_step_starts(scheduler_output)
            return
        with self._lock:
            self._plan = self._planner.plan(scheduler_output, self._last_id)
        self.inner.new_step_starts(scheduler_output)

    def save_outputs(
        self, hidden_states: torch.Tensor | None, mm_outputs: Any, *, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> int:
        """See ``SidecarPrefixCacheManager``."""
        if self.changed is not None:
            return self.changed.save_outputs(
                hidden_states,
                mm_outputs,
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
            )
        step_id = int(
            self.inner.save_outputs(
                hidden_states,
                mm_outputs,
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
            )
        )
        plan, self._plan = self._plan, None
        with self._lock:
            self._open[step_id] = None if plan is None else self._read(plan, num_tokens_unpadded)
            self._last_id = max(self._last_id, step_id)
        return step_id

    def materialize(self, step_id: int, req_ids: list[str]) -> Any:
        """See ``SidecarPrefixCacheManager``. Any thread."""
        if step_id not in self._open:
            return (self.changed or self.inner).materialize(step_id, req_ids)
        try:
            outputs = self.inner.materialize(step_id, req_ids)
            with self._lock:
                if self.changed is None:
                    self._handed_out(self._open[step_id], set(req_ids))
            return outputs
        finally:
            self._consumed(step_id)

    def discard_step(self, step_id: int) -> None:
        """See ``SidecarPrefixCacheManager``. Any thread."""
        if step_id not in self._open:
            (self.changed or self.inner).discard_step(step_id)
            return
        try:
            self.inner.discard_step(step_id)
        finally:
            self._consumed(step_id)

    def shutdown(self) -> None:
        """End both; twice does nothing."""
        self._waiting.stop()
        self._end_inner()
        if self.changed is not None:
            self.changed.shutdown()

    def _consumed(self, step_id: int) -> None:
        with self._lock:
            self._open.pop(step_id, None)
            if self.changed is None:
                self._requests.reclaim(min(self._open, default=self._last_id + 1))

    def _handed_out(self, batch: Batch | None, req_ids: set[str]) -> None:
        """Caller holds the lock."""
        if batch is None:
            return
        for req_id, row, first, end in zip(batch.req_ids, batch.rows, batch.first, batch.ends, strict=True):
            if req_id in req_ids:
                self._requests.handed_out(int(row), int(first), int(end))

    def _read(self, plan: StepPlan, count: int) -> Batch | None:
        """Whose rows a step has, and which; None where that cannot be told. Caller holds the lock."""
        try:
            return self._batches.read(plan.scheduled, plan.tokens, count)
        except StageCacheError as error:
            logger.info("stagecache: a step of stage %s is not followed: %s", self._waiting.stage, error)
            return None

    def _may_change(self, session: Session, output: Any) -> bool:
        """Whether the engine has forgotten its hashes since the session came, and no request goes on; else ask it."""
        epoch = getattr(output, "stagecache_epoch", None)
        if epoch is None:
            if not self._told:
                self._told = True
                logger.warning(
                    "stagecache: stage %s stays on vLLM-Omni's in-process cache: its scheduler is not hooked, so "
                    "nobody can make it forget what only that cache has. Restart the stage to change.",
                    self._waiting.stage,
                )
            return False
        if self._resets is None or self._resets[0] is not session:
            self._resets = session, EngineResets(session.rpc, self._waiting.stage)
            self._ask(epoch)
            return False
        before, asked_at = self._asked
        if epoch == before:
            if time.monotonic() - asked_at > ASK_AGAIN_S:
                self._ask(epoch)
            return False
        over = {*(output.finished_req_ids or ()), *(getattr(output, "preempted_req_ids", None) or ())}
        if all(state.preempted or req_id in over for req_id, state in self._requests.live.items()):
            return True
        self._ask(epoch)
        return False

    def _ask(self, epoch: int) -> None:
        assert self._resets is not None
        self._asked = epoch, time.monotonic()
        self._resets[1].ask(ATTACHED_LATE)

    def _change(self, session: Session) -> None:
        """From here on the tables belong to the new manager; what is not consumed yet counts as handed out."""
        with self._lock:
            for batch in self._open.values():
                self._handed_out(batch, set() if batch is None else set(batch.req_ids))
            manager = self._waiting.make(session, self._requests, self._last_id + 1)
            manager.bind(self._group_view)
            self.followed = tuple(self._requests.live)
            self._waiting.taken = session
            self.changed = manager
        logger.warning(
            "stagecache: stage %s is attached late, as session %s, and leaves vLLM-Omni's in-process cache",
            self._waiting.stage,
            session.session_id,
        )

    def _drain(self) -> None:
        """The in-process cache goes with its last step, and this object with it."""
        runner = self._runner()
        if not self._open and runner is not None and runner.omni_prefix_cache is self:
            runner.omni_prefix_cache = self.changed
            self._end_inner()

    def _end_inner(self) -> None:
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.shutdown()
