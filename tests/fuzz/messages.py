"""Mutations of a call: of its message by its fields, of the message's bytes, of who calls and of what is called."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from stagecache_wire.layout import ABI
from stagecache_wire.v1 import stagecache_pb2 as pb

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
UNSIGNED = (
    0,
    1,
    2,
    3,
    4,
    15,
    16,
    17,
    255,
    256,
    4095,
    4096,
    (1 << 16) + 1,
    1 << 20,
    (1 << 24) + 1,
    (1 << 31) - 1,
    1 << 31,
    U32,
)
SIGNED = (0, 1, -1, 2, 7, 1 << 15, (1 << 31) - 1, -(1 << 31))
NAMES = (
    "",
    "x",
    "m",
    "s",
    "victim",
    "__hidden_states__",
    "a/../../b",
    "\0",
    "é" * 40,
    "n" * 512,
    "n" * 513,
    "%s{}",
    "x" * 70_000,
)
DTYPES = ("float32", "bfloat16", "bool", "complex128", "", "float", "object", "float32\0")


def geometry(**sizes: int) -> pb.Geometry:
    """Small, so that what is accepted costs little."""
    of = {"num_blocks": 16, "block_size": 4, "staging_capacity_tokens": 16, "staging_depth": 2, "arena_bytes": 1 << 16}
    return pb.Geometry(**{**of, "max_results": 64, **sizes})


def key(name: str, dtype: str = "float32", shape: tuple[int, ...] = (8,), **more: Any) -> pb.KeySchema:
    return pb.KeySchema(name=name, dtype=dtype, row_shape=shape, **more)


def _attach(rng: Random) -> Message:
    keys = [key("__hidden_states__"), key("late", "int64", (2,)), key("bits", "bool", (), provisional=True)]
    return pb.AttachRequest(
        abi=ABI, model="m", stage="victim", pid=rng.randrange(1 << 22), geometry=geometry(),
        keys=keys[: rng.randint(0, 3)], open_remembered_keys=rng.random() < 0.3, rank=rng.randrange(4),
    )  # fmt: skip


def _open_key(rng: Random) -> Message:
    name = rng.choice(("__hidden_states__", "late", "bits", f"k{rng.randrange(6)}"))
    return pb.OpenKeyRequest(key=key(name, rng.choice(("float32", "int64")), rng.choice(((8,), (2,), ()))))


def _merge(rng: Random) -> Message:
    return pb.MergeRequest(sequence=rng.randint(1, 4), results=[rng.randrange(64) for _ in range(rng.randint(0, 3))])


def _lookup(rng: Random) -> Message:
    tokens = [rng.randint(1, 16) for _ in range(rng.randint(1, 3))]
    blocks = [rng.randrange(16) for count in tokens for _ in range(-(-count // 4))]
    return pb.LookupRequest(block_ids=blocks, span_tokens=tokens, key_ids=rng.choice(([], [0], [0, 1])))


def _reset(rng: Random) -> Message:
    return pb.ResetRequest(stage="victim", force=rng.random() < 0.5, cause="fuzz")


def _hashes(rng: Random, count: int) -> bytes:
    return b"".join(bytes([rng.randrange(6)]) * 32 for _ in range(count))


def _join(rng: Random) -> Message:
    return pb.JoinNamespaceRequest(
        model_fingerprint="m@1", hash_algorithm=rng.choice(("sha256", "sha256_cbor")), hash_seed="0", dtype="float32",
        tensor_parallel_size=1, key_ids=rng.choice(([], [0])), sequence=rng.randint(0, 4),
    )  # fmt: skip


def _lookup_blocks(rng: Random) -> Message:
    if rng.random() < 0.5:
        spans = [rng.randint(0, 3) for _ in range(rng.randint(1, 3))]
        return pb.LookupBlocksRequest(hashes=_hashes(rng, sum(spans)), span_blocks=spans, per_key=rng.random() < 0.3)
    spans = [rng.randint(0, 12) for _ in range(rng.randint(1, 3))]
    one = pb.SpanIdentity(mm_identifiers=["a"], mm_offsets=[1], mm_lengths=[2], cache_salt="s", embeds_digests=b"")
    return pb.LookupBlocksRequest(
        token_ids=[rng.randrange(99) for _ in range(sum(spans))], span_tokens=spans,
        identities=rng.choice(([], [one] * len(spans))),
    )  # fmt: skip


def _acquire(rng: Random) -> Message:
    spans = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    names = [f"r{rng.randrange(5)}-{index}" for index in range(len(spans))]
    return pb.AcquireBlocksRequest(request_ids=names, hashes=_hashes(rng, sum(spans)), span_blocks=spans)


def _release(rng: Random) -> Message:
    return pb.ReleaseBlocksRequest(request_ids=[f"r{rng.randrange(5)}-0"], all=rng.random() < 0.2)


def _publish(rng: Random) -> Message:
    blocks = rng.sample(range(16), rng.randint(1, 3))
    return pb.PublishBlocksRequest(sequence=rng.randint(1, 4), block_ids=blocks, hashes=_hashes(rng, len(blocks)))


VALID: dict[str, Callable[[Random], Message]] = {
    "Attach": _attach,
    "OpenKey": _open_key,
    "Merge": _merge,
    "Lookup": _lookup,
    "JoinNamespace": _join,
    "LookupBlocks": _lookup_blocks,
    "AcquireBlocks": _acquire,
    "ReleaseBlocks": _release,
    "PublishBlocks": _publish,
    "Reset": _reset,
    "Stats": lambda rng: pb.StatsRequest(),
    "Detach": lambda rng: pb.DetachRequest(),
    "Watch": lambda rng: pb.WatchRequest(stage="victim"),
}
"""A valid request of each method."""

REQUESTS: dict[str, type[Message]] = {name: type(make(Random(0))) for name, make in VALID.items()}


def value_for(rng: Random, field: FieldDescriptor) -> Any:
    """A value that the field's type holds, and that programs stumble over."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 64, 3200)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(DTYPES if field.name == "dtype" else NAMES)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
        return rng.choice((*UNSIGNED, 1 << 22, 1 << 26, 1 << 32, (1 << 42) + 1, 1 << 63, U64, rng.randrange(U64)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
        return rng.choice((*SIGNED, 1 << 62, (1 << 63) - 1, -(1 << 63)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return rng.choice(SIGNED)
    return rng.choice((*UNSIGNED, rng.randrange(U32)))


def mutate_fields(rng: Random, message: Message) -> None:
    """Change one field, of the message or of one inside it."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None:
            if value and rng.random() < 0.7:
                mutate_fields(rng, rng.choice(value))
            elif value and rng.random() < 0.5:
                value.extend([value[0]] * rng.choice((1, 2, 257)))
            elif rng.random() < 0.5:
                value.add()
            else:
                del value[:]
        elif value and rng.random() < 0.5:
            value[rng.randrange(len(value))] = value_for(rng, field)
        elif rng.random() < 0.3:
            del value[: rng.randint(1, 3)]
        else:
            value.extend(value_for(rng, field) for _ in range(rng.choice((1, 2, 9, 300))))
    elif field.message_type is not None:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            mutate_fields(rng, value)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, value_for(rng, field))


def too_much(rng: Random, message: Message) -> None:
    """More than the budget or a session holds, where the message asks for memory at all."""
    if isinstance(message, pb.AttachRequest):
        how = rng.randrange(3)
        if how == 0:
            message.geometry.num_blocks = rng.choice((1 << 23, 1 << 25))
        elif how == 1:
            message.geometry.arena_bytes = rng.choice((1 << 28, 1 << 40))
        else:
            message.keys.extend([key(f"k{index}") for index in range(257)])
    elif isinstance(message, pb.OpenKeyRequest):
        message.key.CopyFrom(key(f"wide{rng.randrange(9)}", "float32", (1 << rng.randint(20, 22),)))


def mutate_bytes(rng: Random, raw: bytes) -> bytes:
    """Change the wire form: bits, lengths, tags, unknown fields, an end too early."""
    out = bytearray(raw)
    how = rng.randrange(7)
    if how == 0 and out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif how == 1 and out:
        del out[rng.randrange(len(out)) :]
    elif how == 2:
        at = rng.randrange(len(out) + 1)
        out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
    elif how == 3:  # an unknown field, of any wire type
        out += bytes([0x80 | rng.randrange(8) | 0x78, rng.randint(1, 9)]) + rng.randbytes(rng.randint(0, 12))
    elif how == 4:  # a varint without end, or a length beyond the message
        out += bytes([rng.randrange(1, 9) << 3 | rng.choice((0, 2))]) + b"\xff" * rng.choice((4, 9, 10, 11, 40))
    elif how == 5:
        out += bytes(out)
    else:
        out = bytearray(rng.randbytes(rng.choice((0, 1, 7, 100, 5000))))
    return bytes(out)
