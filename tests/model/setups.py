"""What the random sequences run on: kinds of keys, policies and sizes, each a small session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.model.steps import HIDDEN, Rules, Schema

NUM_BLOCKS = 16
BLOCK_SIZE = 4
CAPACITY = 16


@dataclass(frozen=True)
class Setup:
    """One kind of session.

    keys: all per-token keys that its steps emit, by name; those not in ``rules.schemas`` are discovered.
    per_request: keys with one row a request, which look per-token in pure decode (K1).
    leftovers: whether steps carry lists, nested values and tensors of other shapes too.
    settings: what only the real cache is told.
    reuse: whether one session serves many sequences, with a reset in between; only where no key is discovered, since
        keys outlive a reset.
    """

    name: str
    rules: Rules
    keys: Mapping[str, Schema]
    per_request: tuple[str, ...] = ()
    leftovers: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    reuse: bool = True


def _setup(name: str, keys: dict[str, Schema], *, discovered: bool = False, **more: Any) -> Setup:
    rules = {
        "block_size": BLOCK_SIZE,
        "capacity": CAPACITY,
        "needs_hidden": HIDDEN in keys,
        "schemas": {} if discovered else keys,
    }
    for setting in ("depth", "roles", "deferred", "explicit_acks"):
        if setting in more:
            rules[setting] = more.pop(setting)
    return Setup(name, Rules(**rules), keys, reuse=not discovered, **more)


SETUPS = (
    _setup(
        "plain",
        {HIDDEN: Schema("float32", (3,)), "ctx": Schema("bfloat16", (4,)), "ids": Schema("int64", ())},
        leftovers=True,
    ),
    _setup(
        "deferred",
        {
            HIDDEN: Schema("bfloat16", (8,)),
            "late.wide": Schema("float32", (2, 2)),
            "late.flat": Schema("uint8", ()),
            "now": Schema("bool", (3,)),
        },
        deferred=frozenset({"late.wide", "late.flat"}),
        settings={"gpu_staging_bytes": 600},
    ),
    _setup(
        "without hidden",
        {"ctx": Schema("float16", (2,)), "late": Schema("int64", (2,)), "deep": Schema("float32", (2, 1, 2))},
        deferred=frozenset({"late"}),
        settings={"gpu_staging_bytes": 1 << 20},
    ),
    _setup(
        "small arena",
        {HIDDEN: Schema("float32", (96,)), "ctx": Schema("uint8", (7,))},
        settings={"arena_bytes": 1 << 16, "max_results": 16},
        depth=2,
    ),
    _setup("acks", {HIDDEN: Schema("float32", (1,)), "ctx": Schema("int64", ())}, explicit_acks=True),
    _setup(
        "discovered",
        {HIDDEN: Schema("float32", (3,)), "x": Schema("bfloat16", (2,)), "y": Schema("bool", ())},
        discovered=True,
        per_request=("scores",),
        leftovers=True,
    ),
    _setup(
        "discovered roles",
        {HIDDEN: Schema("float16", (3,)), "late": Schema("float32", (2,)), "told": Schema("int64", (1,))},
        discovered=True,
        deferred=frozenset({"late"}),
        roles={"told": "token", "late": "token", "table": "global"},
        settings={"gpu_staging_bytes": 256},
        leftovers=True,
    ),
)
