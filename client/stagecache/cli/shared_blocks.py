"""What ``stagecache index`` and ``stagecache lookup`` ask and print."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from stagecache.cli.console import out, show_table
from stagecache.cli.control import _bytes, _duration
from stagecache.control import Observer, message_to_dict
from stagecache.errors import StageCacheError, UnsupportedHashError
from stagecache.prefix_file import PrefixFileError, read_hashes, read_tokens
from stagecache_wire.v1 import stagecache_pb2 as pb

#: Why a prefix ends, for people.
ENDS: Final[dict[int, str]] = {
    pb.PREFIX_END_WHOLE: "all of it is stored",
    pb.PREFIX_END_NOT_STORED: "nobody published this block, or it was evicted long ago; another salt, LoRA, image or "
    "hash seed makes another hash of the same tokens",
    pb.PREFIX_END_EVICTED: "it was evicted for another block: raise --shared-bytes if that happens often",
    pb.PREFIX_END_RESET: "it was stored before a reset of the stage; what was computed then is not read any more",
    pb.PREFIX_END_BEING_COPIED: "it is being copied in just now",
    pb.PREFIX_END_PARTIAL_BLOCK: "the tokens that follow do not fill a block; only full blocks are stored",
    pb.PREFIX_END_NOT_JOINED: "no worker of this engine has joined the namespace",
    pb.PREFIX_END_OFF: "shared blocks are off: the daemon runs with --shared-bytes 0",
}


class NoNamespaceError(StageCacheError):
    """No namespace is what was asked for; the text lists those that there are."""


def show_index(socket: Path, *, as_json: bool, timeout_s: float) -> None:
    """Print one snapshot of the shared blocks."""
    with Observer(socket, timeout_s=timeout_s) as daemon:
        stats = daemon.stats()
    if as_json:
        fields = message_to_dict(stats)
        names = ("shared_limit_bytes", "shared_used_bytes", "namespaces")
        print(json.dumps({name: fields[name] for name in names}, indent=2))
        return
    if not stats.shared_limit_bytes:
        out.print("Shared blocks are off: start the daemon with --shared-bytes SIZE.")
        return
    out.print(f"shared blocks: {_bytes(stats.shared_used_bytes)} of {_bytes(stats.shared_limit_bytes)}")
    if not stats.namespaces:
        out.print("No namespace: no worker has joined one.")
        return
    show_table(_namespace_table(stats, time.time()))


def _namespace_table(stats: pb.StatsResponse, now: float) -> Table:
    table = Table(title="namespaces", title_justify="left")
    left = ("namespace", "stage", "model", "keys")
    for name in (
        *left,
        "blocks",
        "memory",
        "stored",
        "held",
        "hit ratio",
        "published",
        "evicted",
        "members",
        "locked",
        "age",
        "oldest",
    ):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for one in stats.namespaces:
        table.add_row(
            one.namespace_id[:12],
            escape(one.stage),
            escape(f"{one.model_fingerprint[:24]} ({one.hash_algorithm})"),
            escape(", ".join(key.name for key in one.keys)),
            f"{one.num_blocks:,} x {one.block_size}",
            _bytes(one.bytes),
            f"{one.num_blocks - one.free:,}",
            f"{one.held:,} by {one.leases}" if one.leases else f"{one.held:,}",
            f"{one.hit_hashes / one.lookup_hashes:.0%} of {one.lookup_hashes:,}" if one.lookup_hashes else "-",
            f"{one.published:,}",
            f"{sum(one.evictions.values()):,}",
            str(one.members),
            "yes" if one.locked else "no",
            _duration(now - one.created_unix_s),
            _duration(one.oldest_s) if one.oldest_s else "-",
        )
    return table


def show_lookup(
    socket: Path,
    *,
    tokens: Path | None,
    hashes: Path | None,
    salt: str | None,
    lora: str | None,
    stage: str | None,
    namespace: str | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Look a prefix up in every namespace that is meant, and print where it ends. One of tokens and hashes is given.

    Raises:
        PrefixFileError: the file cannot be used.
        NoNamespaceError: no namespace is meant.
        UnsupportedHashError: by token ids, where only the engine can make the only namespace's hashes.
    """
    if hashes is not None and (salt or lora):
        raise PrefixFileError("--salt and --lora are part of the hashes already: give them with --tokens only.")
    if tokens is not None:
        request = read_tokens(tokens, salt=salt, lora=lora)
    else:
        assert hashes is not None
        request = read_hashes(hashes)
    with Observer(socket, timeout_s=timeout_s) as daemon:
        found = _chosen(daemon.stats(), stage, namespace)
        answers = [(one, _ask(daemon, one, request, alone=len(found) == 1)) for one in found]
    if as_json:
        print(json.dumps([_as_dict(one, answer) for one, answer in answers], indent=2))
        return
    for one, answer in answers:
        _explain(one, answer, request)


def _chosen(stats: pb.StatsResponse, stage: str | None, namespace: str | None) -> list[pb.NamespaceStats]:
    """Raises: NoNamespaceError."""
    found = [
        one
        for one in stats.namespaces
        if stage in (None, one.stage) and one.namespace_id.startswith((namespace or "").lower())
    ]
    if found:
        return found
    if not stats.shared_limit_bytes:
        raise NoNamespaceError(
            "shared blocks are off on this node.", remedy="Start the daemon with --shared-bytes SIZE."
        )
    there = ", ".join(f"{one.namespace_id[:12]} of stage {one.stage}" for one in stats.namespaces) or "none"
    asked = " ".join(f"{what} {value!r}" for what, value in (("stage", stage), ("id", namespace)) if value)
    raise NoNamespaceError(f"no namespace{' with ' + asked if asked else ''}; there are: {there}.")


def _ask(
    daemon: Observer, namespace: pb.NamespaceStats, request: pb.LookupBlocksRequest, *, alone: bool
) -> pb.LookupBlocksResponse | str:
    """The answer, or why there is none where others may have one."""
    asked = pb.LookupBlocksRequest()
    asked.CopyFrom(request)
    asked.namespace.namespace_id = namespace.namespace_id
    asked.per_key = True
    try:
        return daemon.lookup_blocks(asked)
    except UnsupportedHashError as error:
        if alone:
            raise
        return str(error)


def _explain(
    namespace: pb.NamespaceStats, answer: pb.LookupBlocksResponse | str, request: pb.LookupBlocksRequest
) -> None:
    head = f"[bold]{namespace.namespace_id[:12]}[/] stage {escape(namespace.stage)}"
    if isinstance(answer, str):
        out.print(f"{head}: {escape(answer)}")
        return
    size, blocks, end = answer.block_size, answer.hit_blocks[0], answer.ends[0]
    hashes = answer.hashes or request.hashes
    asked = request.span_tokens[0] if request.span_tokens else len(hashes) // 32 * size
    out.print(f"{head}: {blocks * size} of {asked} tokens are stored, {blocks} of {-(-asked // size)} blocks")
    if end == pb.PREFIX_END_WHOLE:
        return
    name = hashes[32 * blocks : 32 * blocks + 32].hex()[:16]
    where = f"block {blocks}, tokens {blocks * size} to {min((blocks + 1) * size, asked) - 1}"
    out.print(f"  ends at {where}{f', hash {name}...' if name else ''}: {ENDS[end]}")


def _as_dict(namespace: pb.NamespaceStats, answer: pb.LookupBlocksResponse | str) -> dict[str, Any]:
    who = {"namespace_id": namespace.namespace_id, "stage": namespace.stage}
    if isinstance(answer, str):
        return {**who, "error": answer}
    end = answer.ends[0]
    return {
        **who,
        "block_size": answer.block_size,
        "hit_blocks": answer.hit_blocks[0],
        "hit_tokens": answer.hit_tokens[0],
        "state": pb.BlockState.Name(answer.states[0]).removeprefix("BLOCK_STATE_"),
        "end": pb.PrefixEnd.Name(end).removeprefix("PREFIX_END_"),
        "why": ENDS[end],
        "keys": {
            name: pb.BlockState.Name(state).removeprefix("BLOCK_STATE_")
            for name, state in zip(answer.key_names, answer.key_states, strict=True)
        },
        "hashes": [answer.hashes[at : at + 32].hex() for at in range(0, len(answer.hashes), 32)],
    }
