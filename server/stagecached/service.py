"""The RPCs of ``stagecache.v1.StageCache``: checks the request, asks the manager, packs the answer.

Callers and errors are dealt with before and after (``stagecached.interceptor``); what waits or reads much runs in
threads, so one session's call does not hold up another's.
"""
# ruff: noqa: N802 - gRPC names the methods

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np
import structlog

from stagecache_wire import layout
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecache_wire.v1 import stagecache_pb2_grpc as pb_grpc
from stagecached import convert
from stagecached.auth import Caller, caller_of
from stagecached.lookup import LookupAnswer
from stagecached.peer import abi_mismatch
from stagecached.refusal import Refusal
from stagecached.session import Session, State
from stagecached.sessions import SessionManager
from stagecached.shared.calls import SharedCalls
from stagecached.shared.manager import Off
from stagecached.stats import package_version, resident_bytes, session_stats

MAX_MERGE_WAIT_S: Final = 60.0
MERGE_SLICE_S: Final = 0.25
"""A merge that waits looks this often whether its session or its caller has gone."""
ANSWER_MARGIN_S: Final = 0.02
"""Time kept of a call's deadline to still answer why it was not enough."""
MAX_LOOKUP_TOKENS: Final = 1 << 24

log = structlog.get_logger()


class StageCacheService(pb_grpc.StageCacheServicer):
    """One instance a daemon, on its event loop."""

    def __init__(self, manager: SessionManager, calls: SharedCalls) -> None:
        self._manager = manager
        self._shared = manager.shared
        self._calls = calls
        self._hub = manager.hub
        self._started = time.monotonic()

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        if request.abi != layout.ABI:
            raise abi_mismatch(request.abi)
        session = await self._manager.attach(_caller(context).session_id, convert.attach_spec(request))
        return convert.attach_response(session, self._manager.boot_id)

    async def OpenKey(self, request: pb.OpenKeyRequest, context: Any) -> pb.OpenKeyResponse:
        session = self._session(context)
        store = await self._manager.open_key(session.session_id, convert.checked_schema(request.key))
        return convert.open_key_response(session.segments, store)

    async def Detach(self, request: pb.DetachRequest, context: Any) -> pb.DetachResponse:
        await self._manager.end(_caller(context).session_id, "its worker detached")
        return pb.DetachResponse()

    async def Merge(self, request: pb.MergeRequest, context: Any) -> pb.MergeResponse:
        session = self._session(context)
        segments, limit = session.segments, session.segments.geometry.max_results
        if not 1 <= request.sequence <= segments.head:
            raise _out_of_range(f"sequence {request.sequence} was not logged, the newest is {segments.head}.")
        if len(request.results) > limit or any(index >= limit for index in request.results):
            raise _out_of_range(f"a result index or their number lies outside the table of {limit} entries.")
        with session.in_use():
            await self._wait_consumed(session, request.sequence, context.time_remaining())
            found = session.consumer.read_results(request.results)
            consumed = segments.consumed
        return pb.MergeResponse(
            consumed=consumed,
            sequences=[entry.sequence for entry in found],
            rows=[entry.rows for entry in found],
            unknown=[entry.unknown for entry in found],
            absent=[entry.absent for entry in found],
            first_missing=[entry.first_missing for entry in found],
        )

    async def _wait_consumed(self, session: Session, sequence: int, remaining_s: float | None) -> None:
        """Wait in slices, on a thread of the session.

        Raises:
            Refusal: DEADLINE, or the session failed or ended meanwhile.
        """
        limit_s = min(MAX_MERGE_WAIT_S if remaining_s is None else remaining_s - ANSWER_MARGIN_S, MAX_MERGE_WAIT_S)
        deadline = time.monotonic() + limit_s
        consumer, loop = session.consumer, asyncio.get_running_loop()
        while session.segments.consumed < sequence:
            session.check_usable()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                consumed = session.segments.consumed
                raise Refusal(
                    pb.REASON_DEADLINE,
                    f"waited {limit_s:.2f} s for record {sequence}; the log is consumed up to {consumed}.",
                    "Repeat the call: it may be asked for again.",
                    {"sequence": sequence, "consumed": consumed},
                )
            slice_s = min(left_s, MERGE_SLICE_S)
            try:
                await loop.run_in_executor(session.merges, consumer.wait_consumed, sequence, slice_s)
            except (RuntimeError, asyncio.CancelledError):
                if session.state is State.ENDED:  # its threads are gone, and the waits in them
                    session.check_usable()
                raise

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        session = self._session(context)
        if sum(request.span_tokens) > MAX_LOOKUP_TOKENS:
            raise _out_of_range(f"a lookup of more than {MAX_LOOKUP_TOKENS} tokens.")
        if any(block >= session.segments.geometry.num_blocks for block in request.block_ids):
            raise _out_of_range(f"a block lies outside the {session.segments.geometry.num_blocks} of the session.")
        blocks = np.fromiter(request.block_ids, np.int64, len(request.block_ids))
        spans, keys = list(request.span_tokens), list(request.key_ids)

        def work() -> LookupAnswer:
            try:
                return session.consumer.lookup(blocks, spans, keys)
            except KeyError as error:
                raise Refusal(pb.REASON_UNKNOWN_KEY, f"key id {error} is not open in this session.") from error
            except ValueError as error:
                raise _out_of_range(f"{error}.") from error

        with session.in_use():
            answer = await self._manager.background.in_thread(work)
        return pb.LookupResponse(
            key_ids=answer.key_ids,
            readable=answer.readable,
            first_missing_slot=answer.first_missing_slot,
            pending=answer.pending,
            absent=answer.absent,
            unknown=answer.unknown,
            consumed=answer.consumed,
        )

    async def JoinNamespace(self, request: pb.JoinNamespaceRequest, context: Any) -> pb.JoinNamespaceResponse:
        session = self._session(context)
        with session.in_use():
            await self._logged(session, request.sequence, context)
            keys = convert.joined_keys(session, request.key_ids)
            joined = await self._shared.join(session, convert.joined_namespace(session, request, keys.values()), keys)
        if isinstance(joined, Off):
            return pb.JoinNamespaceResponse(on=False, why=joined.why)
        geometry = joined.store.geometry
        return pb.JoinNamespaceResponse(
            on=True,
            namespace_id=joined.namespace_id,
            num_blocks=geometry.num_blocks,
            block_bytes=geometry.block_bytes,
            generation=joined.members[session.session_id].generation,
            cached_blocks=joined.store.counts()["cached"],
        )

    async def LookupBlocks(self, request: pb.LookupBlocksRequest, context: Any) -> pb.LookupBlocksResponse:
        return await self._calls.lookup(_caller(context), request)

    async def AcquireBlocks(self, request: pb.AcquireBlocksRequest, context: Any) -> pb.AcquireBlocksResponse:
        caller = _caller(context)
        if caller.role == "worker":
            self._session(context)
        return await self._calls.acquire(caller, request, self._manager.boot_id)

    async def ReleaseBlocks(self, request: pb.ReleaseBlocksRequest, context: Any) -> pb.ReleaseBlocksResponse:
        return self._calls.release(_caller(context), request)

    async def PublishBlocks(self, request: pb.PublishBlocksRequest, context: Any) -> pb.PublishBlocksResponse:
        session = self._session(context)
        with session.in_use():
            await self._logged(session, request.sequence, context)
            return await self._calls.publish(session, request)

    async def _logged(self, session: Session, sequence: int, context: Any) -> None:
        """Wait until the log is consumed up to ``sequence``; 0: whatever it is."""
        if sequence > session.segments.head:
            raise _out_of_range(f"sequence {sequence} was not logged, the newest is {session.segments.head}.")
        await self._wait_consumed(session, sequence, context.time_remaining())

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        """Schedulers are told, who make their engine forget and carry the epoch to the workers in order (R5).

        With ``force``, where a stage has no scheduler-side shim, its workers are told themselves. An empty stage
        means every stage. A worker, which asks after it lost rows, speaks for its own stage only, and never by force.
        """
        if _caller(context).role == "worker":
            request = pb.ResetRequest(stage=self._session(context).manifest.stage, cause=request.cause)
        sessions = [s for s in self._manager.all() if request.stage in ("", s.manifest.stage)]
        stages = sorted({session.manifest.stage for session in sessions})
        if not stages:
            raise Refusal(
                pb.REASON_UNKNOWN_STAGE,
                f"no session of stage {request.stage!r} is attached." if request.stage else "no session is attached.",
                "`stagecache status` lists the stages.",
            )
        alone = [stage for stage in stages if not self._hub.schedulers(stage)]
        if alone and not request.force:
            raise Refusal(
                pb.REASON_NO_SCHEDULER_SHIM,
                f"no scheduler-side shim watches stage {', '.join(alone)}: its engine would keep its block hashes, and "
                "their hits would fail until they are evicted.",
                "Reset the engine's prefix cache instead, or force it.",
            )
        told = sum(self._hub.reset_schedulers(stage, request.cause) for stage in stages)
        for session in sessions:
            if session.manifest.stage in alone:
                self._hub.reset_session(session.session_id, request.cause)
        log.info("reset", stages=stages, schedulers=told, sessions=len(sessions), cause=request.cause)
        return pb.ResetResponse(sessions=len(sessions), schedulers=told)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        sessions = [await self._session_stats(session) for session in self._manager.all()]
        return pb.StatsResponse(
            version=package_version(),
            boot_id=self._manager.boot_id,
            budget_bytes=self._manager.budget.limit_bytes,
            budget_used_bytes=self._manager.budget.used_bytes,
            sessions=[session for session in sessions if session is not None],
            uptime_s=time.monotonic() - self._started,
            resident_bytes=resident_bytes(),
            schedulers=self._hub.schedulers(),
            namespaces=[space.stats() for space in self._shared.all()],
            shared_limit_bytes=self._shared.limit_bytes,
            shared_used_bytes=self._shared.used_bytes,
        )

    async def _session_stats(self, session: Session) -> pb.SessionStats | None:
        """None where the session ended while others were read."""
        if session.state is State.ENDED:
            return None
        with session.in_use():
            return await self._manager.background.in_thread(lambda: session_stats(session))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        caller = _caller(context)
        session = self._manager.get(caller.session_id) if caller.role == "worker" else None
        watcher = self._hub.open(caller, request.stage if session is None else session.manifest.stage)
        try:
            if session is not None and session.state is State.FAILED:
                watcher.tell(self._hub.failed_event(session.failure))
            async for event in watcher.events():
                yield event
        finally:
            self._hub.close(watcher)
            self._manager.liveness.look(caller.session_id)

    def _session(self, context: Any) -> Session:
        """The caller's session. Raises: Refusal, where there is none or it takes no calls."""
        session = self._manager.get(_caller(context).session_id)
        session.check_usable()
        return session


def _caller(context: Any) -> Caller:
    """Who calls; the interceptor has checked the token."""
    return caller_of(context.invocation_metadata())[0]


def _out_of_range(message: str) -> Refusal:
    return Refusal(pb.REASON_OUT_OF_RANGE, message)
