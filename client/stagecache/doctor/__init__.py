"""What can be wrong with a node, looked at before it hurts: each finding says how to mend it.

    report = examine(Path("/run/stagecache/stagecached.sock"))
    for finding in report.findings:
        print(finding.status.value, finding.check, finding.found, finding.remedy)

A check is a function from ``Subject`` to findings; it reads and asks, and changes nothing. ``CHECKS`` is all of them,
in the order in which they are shown. One that raises becomes a finding itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagecache.doctor import access_checks, cpu_checks, engine_checks, limit_checks, shm_checks
from stagecache.doctor.host import Host
from stagecache.doctor.report import Finding, Report, Status
from stagecache.doctor.subject import Subject, look

__all__ = ["CHECKS", "Finding", "Report", "Status", "examine", "run_checks"]

Check = Callable[[Subject], Iterator[Finding]]

CHECKS: Final[tuple[Check, ...]] = (
    shm_checks.check_mount,
    shm_checks.check_size,
    shm_checks.check_shared,
    shm_checks.check_leftovers,
    access_checks.check_path,
    access_checks.check_modes,
    access_checks.check_daemon,
    access_checks.check_user,
    limit_checks.check_memlock,
    limit_checks.check_files,
    limit_checks.check_cgroup,
    limit_checks.check_logind,
    limit_checks.check_kernel,
    cpu_checks.check_affinity,
    engine_checks.check_vllm,
    engine_checks.check_omni,
    engine_checks.check_plugin,
    engine_checks.check_environment,
    cpu_checks.check_kernels,
)


def examine(
    socket: Path,
    *,
    host: Host | None = None,
    environ: Mapping[str, str] = os.environ,
    timeout_s: float = 2.0,
) -> Report:
    """Run every check for the daemon at ``socket``. timeout_s: for each question to it."""
    return run_checks(look(socket, host or Host(), environ, timeout_s))


def run_checks(subject: Subject, checks: Sequence[Check] = CHECKS) -> Report:
    """Run checks on a subject; none can keep the others from being run."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(subject))
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(name, Status.WARNING, f"the check itself failed: {type(error).__name__}: {error}"))
    return Report(tuple(findings))
