"""``stagecache index`` and ``stagecache lookup``: what the node shares, and where a prefix ends in it and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from stagecache.cli.app import SOCKET, SocketOption, TimeoutOption, _examples, app

_Text = Optional[str]  # noqa: UP045  typer reads it at run time, on Python 3.10 too
_File = Optional[Path]  # noqa: UP045


@app.command(
    epilog=_examples(
        "stagecache index --socket /run/stagecache/stagecached.sock",
        "stagecache index --json | jq '.namespaces[] | {stage, hit_hashes, lookup_hashes}'",
    )
)
def index(
    socket: SocketOption = SOCKET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, field names as on the wire.")] = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Show the blocks that replicas of a stage share on this node: namespaces, blocks, bytes, hit ratio, age."""
    from stagecache.cli.shared_blocks import show_index

    show_index(socket, as_json=as_json, timeout_s=timeout)


@app.command(
    epilog=_examples(
        "stagecache lookup --tokens prompt.json",
        "stagecache lookup --tokens prompt.json --salt tenant-7 --stage thinker",
        "stagecache lookup --hashes block_hashes.txt --namespace 3f9a --json",
    )
)
def lookup(
    socket: SocketOption = SOCKET,
    tokens: Annotated[
        _File,
        typer.Option(
            help="Token ids: a JSON list, numbers with spaces between, or an object "
            '{"tokens": [1, 2], "salt": "x", "lora": "y", "images": [{"identifier": "i", "offset": 1, "length": 9}]}.',
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    hashes: Annotated[
        _File, typer.Option(help="The engine's block hashes, 64 hex digits a line.", exists=True, dir_okay=False)
    ] = None,
    salt: Annotated[_Text, typer.Option(help="Cache salt of the request.")] = None,
    lora: Annotated[_Text, typer.Option(help="Name of the request's LoRA.")] = None,
    stage: Annotated[_Text, typer.Option(help="Only namespaces of this stage.")] = None,
    namespace: Annotated[_Text, typer.Option(help="Only the namespace whose id begins so.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object a namespace.")] = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Say how much of a prefix the node's shared blocks hold, where it ends, and why. Changes nothing.

    By token ids only where the engine hashes with sha256_cbor; by its own hashes always. Status 1: a namespace or file
    is not usable.
    """
    if (tokens is None) == (hashes is None):
        raise typer.BadParameter("give one of --tokens and --hashes")
    from stagecache.cli.shared_blocks import show_lookup

    show_lookup(
        socket,
        tokens=tokens,
        hashes=hashes,
        salt=salt,
        lora=lora,
        stage=stage,
        namespace=namespace,
        as_json=as_json,
        timeout_s=timeout,
    )
