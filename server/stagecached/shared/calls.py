"""The gRPC calls of node-shared blocks: which namespace is meant, every number checked, then the store is asked.

What is short runs on the event loop; long lookups and copies run in threads. A namespace that is not there is no error
for who only asks: the answer says why nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.auth import Caller
from stagecached.background import Background
from stagecached.index import HASH_BYTES, BlockIndexError
from stagecached.refusal import Refusal
from stagecached.session import Session
from stagecached.shared.leases import TooManyLeasesError
from stagecached.shared.manager import SharedBlocks
from stagecached.shared.owners import LeaseOwners
from stagecached.shared.questions import Question, questions_of
from stagecached.shared.space import Space
from stagecached.shared.store import Found, PublishOutcome
from stagecached.shared.transfer import publish_blocks

MAX_HASHES: Final = 65_536
"""Hashes of one call, all spans."""
MAX_SPANS: Final = 4096
MAX_TOKENS: Final = 1 << 20
SHORT: Final = 2048
"""Hashes or tokens up to which a call is done on the event loop: about a millisecond."""
MAX_REQUEST_ID_BYTES: Final = 512

Result = TypeVar("Result")
Target = tuple[Space, int]
"""A namespace and the generation in which the caller reads it."""


class SharedCalls:
    """One instance a daemon, on its event loop."""

    def __init__(
        self, shared: SharedBlocks, owners: LeaseOwners, sessions: Callable[[], list[Session]], background: Background
    ) -> None:
        self._shared = shared
        self._owners = owners
        self._sessions = sessions
        self._background = background

    # ---------------------------------------------------------------- lookup

    async def lookup(self, caller: Caller, request: pb.LookupBlocksRequest) -> pb.LookupBlocksResponse:
        """By hashes or by token ids.

        Raises:
            Refusal: numbers that do not fit together, too many of them, or tokens where only the engine can hash.
        """
        spans, what = (request.span_tokens, "token ids") if request.span_tokens else (request.span_blocks, "hashes")
        given = len(request.token_ids) if request.span_tokens else len(request.hashes) // HASH_BYTES
        _check_spans(spans, given, what, MAX_TOKENS if request.span_tokens else MAX_HASHES)
        if request.span_tokens and request.hashes:
            raise _bad("a lookup goes by hashes or by token ids, not by both.")
        target = self._target(caller, request.namespace)
        if not isinstance(target, tuple):
            count = len(spans)
            return pb.LookupBlocksResponse(
                hit_blocks=[0] * count,
                hit_tokens=[0] * count,
                states=[pb.BLOCK_STATE_MISS] * count,
                ends=[target] * count,
            )
        return await self._on(target[0], given, lambda: _lookup(target, request))

    # ---------------------------------------------------------------- leases

    async def acquire(self, caller: Caller, request: pb.AcquireBlocksRequest, boot_id: int) -> pb.AcquireBlocksResponse:
        """Raises: Refusal, where the caller's death would not show, or the numbers do not fit together."""
        if len(request.request_ids) != len(request.span_blocks):
            raise _bad(f"{len(request.request_ids)} requests, {len(request.span_blocks)} spans.")
        if len(set(request.request_ids)) != len(request.request_ids):
            raise _bad("a request is named twice.")
        if any(not 0 < len(name.encode()) <= MAX_REQUEST_ID_BYTES for name in request.request_ids):
            raise _bad(f"a request id has no bytes, or more than {MAX_REQUEST_ID_BYTES}.")
        given = len(request.hashes) // HASH_BYTES
        _check_spans(request.span_blocks, given, "hashes", MAX_HASHES)
        spans = _split(request.hashes, request.span_blocks)
        if caller.role != "worker":
            self._owners.check_alive(caller.session_id)
        target = self._target(caller, request.namespace, own=True)
        if not isinstance(target, tuple):
            if request.all:
                self._shared.owner_gone(caller.session_id)
            return pb.AcquireBlocksResponse(held=[0] * len(spans), boot_id=boot_id, why_none=target)
        space, generation = target
        owner, names = caller.session_id, list(request.request_ids)

        def work() -> list[int]:
            space.leases.check_room(owner, names)
            held = [
                space.leases.acquire(owner, name, span, generation) for name, span in zip(names, spans, strict=True)
            ]
            if request.all:
                space.leases.release_owner(owner, keep=names)
            return held

        try:
            held = await self._on(space, given, work)
        except TooManyLeasesError as error:
            raise Refusal(pb.REASON_TOO_MANY, f"{error}.", "Release leases of requests that are over.") from error
        if request.all:
            for other in self._shared.all():
                if other is not space:
                    other.leases.release_owner(owner)
        return pb.AcquireBlocksResponse(
            namespace_id=space.namespace_id, generation=generation, held=held, boot_id=boot_id
        )

    def release(self, caller: Caller, request: pb.ReleaseBlocksRequest) -> pb.ReleaseBlocksResponse:
        owner, spaces = caller.session_id, self._shared.all()
        if request.all:
            return pb.ReleaseBlocksResponse(released=sum(space.leases.release_owner(owner) for space in spaces))
        return pb.ReleaseBlocksResponse(
            released=sum(space.leases.release(owner, name) for space in spaces for name in request.request_ids)
        )

    # ---------------------------------------------------------------- publish

    async def publish(self, session: Session, request: pb.PublishBlocksRequest) -> pb.PublishBlocksResponse:
        """The log is consumed up to the request's sequence.

        Raises:
            Refusal: a block outside the geometry, or not one hash a block.
        """
        count, num_blocks = len(request.block_ids), session.segments.geometry.num_blocks
        _check_spans([count], len(request.hashes) // HASH_BYTES, "hashes", MAX_HASHES)
        if any(block_id >= num_blocks for block_id in request.block_ids):
            raise _bad(f"a block lies outside the {num_blocks} of the session.")
        (hashes,) = _split(request.hashes, [count])
        membership, segments = session.segments.shared, session.segments
        if membership is None:
            self._shared.totals.not_joined(count)
            return pb.PublishBlocksResponse(states=[pb.PUBLISH_STATE_NOT_JOINED] * count)
        block_ids = list(request.block_ids)

        def work() -> list[PublishOutcome]:
            return publish_blocks(segments, membership, block_ids, hashes)

        with session.in_use():
            outcomes = await self._background.in_thread(work)
        return pb.PublishBlocksResponse(states=[cast("pb.PublishState", int(outcome)) for outcome in outcomes])

    # ---------------------------------------------------------------- which namespace

    def _target(self, caller: Caller, ref: pb.NamespaceRef, *, own: bool = False) -> Target | pb.PrefixEnd:
        """The namespace that a call means, or why there is none. own: only one in which the caller's engine is.

        Raises:
            Refusal: UNKNOWN_NAMESPACE.
        """
        if not self._shared.is_on:
            return pb.PREFIX_END_OFF
        named = self._shared.get(ref.namespace_id) if ref.namespace_id else None
        if ref.namespace_id and named is None:
            raise Refusal(
                pb.REASON_UNKNOWN_NAMESPACE,
                f"the daemon keeps no namespace {ref.namespace_id[:64]}.",
                "`stagecache index` lists them.",
            )
        found = self._of_caller(caller, ref)
        if found is not None and named in (None, found[0]):
            return found
        if named is not None and not own:
            return named, named.store.base_generation
        return pb.PREFIX_END_NOT_JOINED

    def _of_caller(self, caller: Caller, ref: pb.NamespaceRef) -> Target | None:
        """Of a worker its own; of a scheduler that of its engine's workers, where all are in one generation of one."""
        if caller.role == "worker":
            sessions = [caller.session_id]
        else:
            sessions = [
                session.session_id
                for session in self._sessions()
                if ref.engine and session.manifest.engine == ref.engine and ref.stage in ("", session.manifest.stage)
            ]
        found = [self._shared.membership(session_id) for session_id in sessions]
        targets = {None if one is None else (one[0].namespace_id, one[1].generation) for one in found}
        if len(targets) != 1 or found[0] is None:
            return None
        space, membership = found[0]
        return space, membership.generation

    async def _on(self, space: Space, items: int, work: Callable[[], Result]) -> Result:
        """Do it here where it is short, else in a thread; the namespace is not dropped meanwhile."""
        if items <= SHORT:
            return work()
        space.users += 1
        try:
            return await self._background.in_thread(work)
        finally:
            space.users -= 1


def _lookup(target: Target, request: pb.LookupBlocksRequest) -> pb.LookupBlocksResponse:
    space, generation = target
    size = space.manifest.block_size
    try:
        questions = questions_of(space.namespace, request) if request.span_tokens else [
            Question(hashes, len(hashes) * size) for hashes in _split(request.hashes, request.span_blocks)
        ]  # fmt: skip
    except BlockIndexError as error:
        raise Refusal(pb.REASON_UNSUPPORTED_HASH, f"{error}.") from error
    found = [_end_of(space.store.look(question.hashes, generation), question, size) for question in questions]
    names = [schema.name for schema in space.store.geometry.keys] if request.per_key else []
    return pb.LookupBlocksResponse(
        namespace_id=space.namespace_id,
        block_size=size,
        generation=generation,
        hit_blocks=[one.blocks for one in found],
        hit_tokens=[one.blocks * size for one in found],
        states=[one.state for one in found],
        ends=[one.end for one in found],
        key_names=names,
        key_states=[one.state for one in found for _ in names],
        hashes=b"".join(block_hash for question in questions for block_hash in question.hashes)
        if request.span_tokens
        else b"",
    )


def _end_of(found: Found, question: Question, block_size: int) -> Found:
    if found.blocks == len(question.hashes) and question.tokens > found.blocks * block_size:
        return Found(found.blocks, pb.BLOCK_STATE_MISS, pb.PREFIX_END_PARTIAL_BLOCK)
    return found


def _check_spans(spans: Sequence[int], given: int, what: str, most: int) -> None:
    if len(spans) > MAX_SPANS or given > most:
        raise _bad(f"{len(spans)} spans of {given} {what}, allowed are {MAX_SPANS} and {most}.")
    if sum(spans) != given:
        raise _bad(f"spans of {sum(spans)} {what}, {given} were given.")


def _split(raw: bytes, spans: Sequence[int]) -> list[list[bytes]]:
    """Hashes of each span. Raises: Refusal, where the bytes are no whole hashes."""
    if len(raw) % HASH_BYTES:
        raise Refusal(
            pb.REASON_UNSUPPORTED_HASH,
            f"{len(raw)} bytes are no whole number of hashes of {HASH_BYTES} bytes.",
            "Set the engine's prefix_caching_hash_algo to sha256 or sha256_cbor.",
        )
    found, at = [], 0
    for count in spans:
        end = at + count * HASH_BYTES
        found.append([raw[start : start + HASH_BYTES] for start in range(at, end, HASH_BYTES)])
        at = end
    return found


def _bad(message: str) -> Refusal:
    return Refusal(pb.REASON_OUT_OF_RANGE, message)
