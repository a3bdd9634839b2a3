"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

from enum import Enum
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Final, Optional

import typer

from stagecache.cli.bench import bench
from stagecache_wire.names import DEFAULT_SOCKET

app = typer.Typer(
    name="stagecache",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "A cache daemon for hidden states: completes prefix-cache hits with the rows that the engine skipped.\n\n"
        "See it work:  [bold]stagecache demo[/]\n\n"
        "Ask a daemon:  [bold]stagecache status --socket /run/stagecache/stagecached.sock[/]"
    ),
)


class Dtype(str, Enum):
    """Element types of the demo's model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SocketOption = Annotated[
    Path,
    typer.Option("--socket", envvar="STAGECACHE_SOCKET", help="The daemon's Unix socket.", show_envvar=True),
]
SOCKET: Final = Path(DEFAULT_SOCKET)
"""Where a daemon serves that was told nothing else."""
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds to wait for the daemon.")]


def _examples(*lines: str) -> str:
    """The foot of a command's help."""
    return "[bold]Examples[/]\n\n" + "\n\n".join(f"    {line}" for line in lines)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stagecache {distribution_version('stagecache')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        "stagecache demo",
        "stagecache demo --requests 96 --dtype bfloat16 --report /tmp/demo.html",
    )
)
def demo(
    requests: Annotated[int, typer.Option(min=1, help="Requests to run: turns of conversations.")] = 32,
    hidden: Annotated[
        int, typer.Option(min=64, max=4096, help="Width of the model's hidden rows, a multiple of 64.")
    ] = 256,
    dtype: Annotated[Dtype, typer.Option(help="Element type of weights and rows.")] = Dtype.float32,
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("stagecache-demo.html"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoint and logs, and say where.")] = False,
) -> None:
    """Run real conversations on a real engine, with and without the cache, and compare every row.

    It needs vLLM in this environment and nothing else: the daemon, the model and the text are made here. The command
    ends with status 1 when a row differs from the run without prefix caching, or when a deliberately shifted row would
    not have been noticed.
    """
    from stagecache.cli.demo import run

    raise typer.Exit(run(requests=requests, hidden=hidden, dtype=dtype.value, report=report, keep=keep))


@app.command(
    "hidden-states",
    epilog=_examples(
        "stagecache hidden-states --model ./model --prompts prompts.jsonl --out rows/",
        "stagecache hidden-states --socket /run/stagecache.sock --model ./model --prompts p.jsonl --out rows/",
    ),
)
def hidden_states(
    model: Annotated[Path, typer.Option(help="The model's directory.", exists=True, file_okay=False)],
    prompts: Annotated[
        Path,
        typer.Option(
            help='One JSON value a line: [1, 2, 3], "a text", or {"id": "x", "tokens": [1, 2, 3]} (or "text").',
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the files, one a prompt.", file_okay=False)],
    socket: Annotated[
        Optional[Path],  # noqa: UP045  typer reads it at run time, on Python 3.10 too
        typer.Option(envvar="STAGECACHE_SOCKET", help="A running daemon's socket; without it, one is started."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type; auto is vLLM's choice, which halves float32.")] = "auto",
    block_size: Annotated[Optional[int], typer.Option(help="Tokens in a KV block.")] = None,  # noqa: UP045
    max_len: Annotated[Optional[int], typer.Option(help="Longest prompt, in tokens.")] = None,  # noqa: UP045
    max_batched_tokens: Annotated[int, typer.Option(min=32, help="Tokens of one engine step.")] = 2048,
    max_seqs: Annotated[int, typer.Option(min=1, help="Prompts in one engine step.")] = 16,
    kv_mib: Annotated[int, typer.Option("--kv-mib", min=1, help="MiB of the engine's KV cache.")] = 256,
) -> None:
    """Write the hidden states of every position of each prompt as safetensors, with prefix caching on.

    Each file DIR/ID.safetensors holds one tensor, hidden_states, of shape (prompt tokens, hidden size), and in its
    metadata how many rows came from the cache. A prompt that fails leaves DIR/ID.error.json; then the status is 1.
    """
    from stagecache.cli.hidden_states import run

    arguments = {
        "model": str(model),
        "dtype": dtype,
        "max_num_seqs": max_seqs,
        "kv_cache_memory_bytes": kv_mib << 20,
        "max_num_batched_tokens": max_batched_tokens,
    }
    arguments |= {"block_size": block_size} if block_size is not None else {}
    arguments |= {"max_model_len": max_len} if max_len is not None else {}
    raise typer.Exit(run(arguments, model=model, prompts=prompts, out_directory=out, socket=socket))


@app.command(
    epilog=_examples(
        "stagecache status --socket /run/stagecache/stagecached.sock",
        "stagecache status --json | jq '.sessions[].hit_rows'",
    )
)
def status(
    socket: SocketOption = SOCKET,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, field names as on the wire.")] = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Show what a daemon holds: memory, sessions, keys, hits."""
    from stagecache.cli.control import show_status

    show_status(socket, as_json=json, timeout_s=timeout)


@app.command(
    epilog=_examples(
        "stagecache top --socket /run/stagecache/stagecached.sock",
        "stagecache top --once",
    )
)
def top(
    socket: SocketOption = SOCKET,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Watch a daemon at work: sessions, hits, memory, errors. Ctrl-C ends it."""
    from stagecache.cli.top import show_top

    show_top(socket, interval_s=interval, once=once, timeout_s=timeout)


@app.command(
    epilog=_examples(
        "stagecache ping --socket /run/stagecache/stagecached.sock && echo serving",
    )
)
def ping(socket: SocketOption = SOCKET, timeout: TimeoutOption = 5.0) -> None:
    """Ask whether a daemon serves: status 0 when it does, 1 when it does not."""
    from stagecache.cli.control import show_ping

    show_ping(socket, timeout_s=timeout)


@app.command(
    epilog=_examples(
        "stagecache reset thinker",
        "stagecache reset thinker --force",
    )
)
def reset(
    stage: Annotated[str, typer.Argument(help="The stage to forget.")],
    socket: SocketOption = SOCKET,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also when the engine would keep its prefix cache; later hits then fail."),
    ] = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Make a stage forget every row saved so far, as after a change of weights.

    Without --force it is refused when no scheduler-side shim would make the engine forget its block hashes too: the
    engine would go on hitting blocks whose rows are gone, and those requests would fail.
    """
    from stagecache.cli.control import show_reset

    show_reset(socket, stage, force=force, timeout_s=timeout)


app.command(epilog=_examples("stagecache bench", "stagecache bench --only decode --requests 32 --rounds 30"))(bench)
