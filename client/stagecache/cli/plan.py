"""``stagecache plan``: the host memory of a deployment, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from stagecache.cli.app import _examples, app
from stagecache.cli.console import out, show_error

if TYPE_CHECKING:
    from rich.table import Table

    from stagecache.plan import DeploymentPlan, StagePlan, StageSpec

_FLAGS = "One stage, in place of a file"


@app.command(
    epilog=_examples(
        "stagecache plan --num-blocks 15092 --key __hidden_states__:bfloat16:2048",
        "stagecache plan --num-blocks 16180 --key codes.audio:int64:16 --key text:int64 --replicas 2 --tp 4",
        "stagecache plan --num-blocks 15092 --key __hidden_states__:bfloat16:2048 --replicas 2 --shared-bytes 8GiB",
        "stagecache plan deployment.toml --json | jq .total_bytes",
    )
)
def plan(
    file: Annotated[
        Optional[Path],  # noqa: UP045  typer reads it at run time, on Python 3.10 too
        typer.Argument(help="Stages as TOML, YAML or JSON: a list `stages` of tables, fields as the flags below."),
    ] = None,
    num_blocks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Blocks of the engine's KV cache, as its log says.", rich_help_panel=_FLAGS),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.", rich_help_panel=_FLAGS)] = 16,
    key: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="NAME:DTYPE:SHAPE of a key, e.g. codes.audio:int64:16; repeatable.", rich_help_panel=_FLAGS),
    ] = None,
    stage: Annotated[str, typer.Option(help="Name of the stage.", rich_help_panel=_FLAGS)] = "stage0",
    replicas: Annotated[int, typer.Option(min=1, help="Engines of the stage.", rich_help_panel=_FLAGS)] = 1,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "--tp", min=1, help="Ranks of each engine.", rich_help_panel=_FLAGS)
    ] = 1,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an engine step.", rich_help_panel=_FLAGS)
    ] = 8192,
    staging_depth: Annotated[
        int, typer.Option(min=1, help="Steps that may be unconsumed at once.", rich_help_panel=_FLAGS)
    ] = 4,
    shared_bytes: Annotated[
        str, typer.Option(help="The daemon's --shared-bytes: blocks that replicas share, like 8GiB.")
    ] = "0",
    shared_namespaces: Annotated[
        int, typer.Option(min=1, max=64, help="Equal parts of it, one for each model and stage that shares.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
) -> None:
    """Compute the shared memory that a node's daemon will take, before anything starts.

    Each tensor-parallel rank of each replica is a session of its own. The numbers are those that attach then takes:
    both use the same functions.
    """
    from stagecache.plan import SharedPlan, parse_bytes, plan_deployment, read_stages, stage_of

    if (file is None) == (num_blocks is None):
        show_error("give a file of stages, or --num-blocks and --key of one stage")
        raise typer.Exit(2)
    if file is not None:
        stages: list[StageSpec] = read_stages(file)
    else:
        fields: dict[str, Any] = {
            "name": stage,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "keys": key or [],
            "replicas": replicas,
            "tensor_parallel": tensor_parallel,
            "max_num_batched_tokens": max_num_batched_tokens,
            "staging_depth": staging_depth,
        }
        stages = [stage_of(fields, f"stage {stage}")]
    deployment = plan_deployment(stages, SharedPlan(parse_bytes(shared_bytes), shared_namespaces))
    if as_json:
        print(json.dumps(deployment.as_dict(), indent=2))
    else:
        _show(deployment)


def _show(deployment: DeploymentPlan) -> None:
    for stage in deployment.stages:
        out.print(_stage_table(stage))
    if deployment.shared.total_bytes:
        out.print(_shared_table(deployment))
    out.print(_needs_table(deployment))


def _shared_table(deployment: DeploymentPlan) -> Table:
    """How much of each stage the node keeps for its replicas."""
    from rich.markup import escape
    from rich.table import Table

    shared = deployment.shared
    title = f"shared blocks: {human_bytes(shared.total_bytes)} in {shared.namespaces} namespace(s)"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("stage", "memory", "blocks", "tokens"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in deployment.stages:
        blocks = shared.blocks(stage)
        table.add_row(
            escape(stage.spec.name),
            human_bytes(shared.namespace_bytes),
            f"{blocks:,}",
            f"{blocks * stage.geometry.block_size:,}",
        )
    return table


def _stage_table(stage: StagePlan) -> Table:
    """One session of the stage, part by part, and all of its sessions."""
    from rich.markup import escape
    from rich.table import Table

    spec, geometry = stage.spec, stage.geometry
    title = f"stage {escape(spec.name)}: {geometry.num_blocks:,} blocks of {geometry.block_size} tokens"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("part", "dtype", "row", "pool", "staging", "tables", "total"):
        table.add_column(name, justify="left" if name in ("part", "dtype", "row") else "right")
    for key in stage.keys:
        schema = key.schema
        table.add_row(
            escape(schema.name),
            schema.dtype,
            f"{'x'.join(map(str, schema.row_shape)) or 'scalar'} ({schema.row_bytes:,} B)",
            human_bytes(key.pool_bytes),
            human_bytes(key.staging_bytes),
            human_bytes(key.table_bytes),
            human_bytes(key.total_bytes),
        )
    table.add_row("slot words", "", "", "", "", human_bytes(stage.slots_bytes), human_bytes(stage.slots_bytes))
    table.add_row("merge arena", "", "", "", "", "", human_bytes(stage.arena_bytes))
    table.add_row("log and results", "", "", "", "", "", human_bytes(stage.control_bytes), end_section=True)
    table.add_row("[bold]one session[/]", "", "", "", "", "", f"[bold]{human_bytes(stage.session_bytes)}[/]")
    if spec.sessions > 1:
        times = f"{spec.replicas} replicas x {spec.tensor_parallel} ranks"
        table.add_row(f"[bold]{times}[/]", "", "", "", "", "", f"[bold]{human_bytes(stage.total_bytes)}[/]")
    return table


def _needs_table(deployment: DeploymentPlan) -> Table:
    """What to set where."""
    from rich.table import Table

    sessions = f"these {deployment.sessions} sessions" if deployment.sessions > 1 else "this session"
    budget = f"--memory-budget {-(-deployment.total_bytes // (1 << 20))}M, or more"
    table = Table(title=f"a node with {sessions} needs at least", title_justify="left", title_style="bold", box=None)
    table.add_column("", justify="left")
    table.add_column("", justify="right")
    table.add_column("", justify="left")
    sharing = deployment.shared.total_bytes
    blocks = [("shared blocks", sharing, "--shared-bytes, beside the budget")] if sharing else []
    for what, size, where in (
        ("shared memory", deployment.total_bytes, budget),
        *blocks,
        ("/dev/shm", deployment.shm_bytes, "its size, where --memory-budget is set"),
        ("", deployment.shm_bytes_default_budget, "its size, with the default budget of 80 % of it"),
        ("locked memory", deployment.locked_bytes, "ulimit -l, LimitMEMLOCK=: so that nothing is swapped"),
        ("container limit", deployment.container_bytes, "memory of the daemon's container, to which all is charged"),
    ):
        table.add_row(what, f"[bold]{human_bytes(size)}[/]", where)
    return table


def human_bytes(size: int) -> str:
    """``0.92 GiB`` from half a GiB on, else ``31.6 MiB``, ``12.0 KiB``, ``8 B``."""
    if size >= 1 << 29:
        return f"{size / (1 << 30):,.2f} GiB"
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
