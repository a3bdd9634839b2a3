"""Limits of the daemon's process, or of this one where no daemon runs; and what of the system may take memory away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from stagecache.doctor.host import CAP_IPC_LOCK, UNLIMITED
from stagecache.doctor.report import Finding, Status
from stagecache.doctor.subject import Subject
from stagecache.doctor.text import size
from stagecache.plan import BUDGET_SHARE, PAGE_TABLE_SHARE, PROCESS_BYTES
from stagecache_wire.shm import SHM_DIRECTORY

ELSEWHERE: Final = "the daemon's process cannot be seen from here: run doctor in its container."
WANTED_FILES: Final = 4096
"""Descriptors that the sessions of a large node need: three segments a session and three a key, each keeps one."""
PEERPIDFD_KERNEL: Final = (6, 5)
POPULATE_KERNEL: Final = (5, 14)
FIRST_USER_UID: Final = 1000


def check_memlock(subject: Subject) -> Iterator[Finding]:
    """The daemon may lock its pools, or nothing here is ever swapped."""
    pid, host = subject.daemon_pid, subject.host
    if pid is None:
        yield Finding("limits.memlock", Status.SKIPPED, ELSEWHERE)
        return
    limit, budget = host.limit(pid, "Max locked memory"), subject.budget_bytes or 0
    stats = subject.daemon.stats
    unlocked = [key for session in (stats.sessions if stats else ()) for key in session.keys if not key.locked]
    left = [one for one in (stats.namespaces if stats else ()) if not one.locked]
    privileged = host.has_capability(pid, CAP_IPC_LOCK)
    if limit is None:
        yield Finding("limits.memlock", Status.SKIPPED, "the limit of locked memory cannot be read.")
    elif not unlocked and not left and (privileged or limit == UNLIMITED or (budget and limit >= budget)):
        how = "without limit" if privileged or limit == UNLIMITED else f"up to {size(limit)}"
        yield Finding("limits.memlock", Status.OK, f"memory may be locked {how}.")
    else:
        swap = host.meminfo("SwapTotal")
        parts = [f"{len(some)} {name}" for some, name in ((unlocked, "keys"), (left, "namespaces")) if some]
        what = f"{' and '.join(parts)} are not locked in memory" if parts else "pools cannot be locked in memory"
        yield Finding(
            "limits.memlock",
            Status.WARNING if swap else Status.NOTE,
            f"{what}: the limit is {'none' if limit == UNLIMITED else size(limit)}, and "
            + (f"{size(swap)} of swap may take their rows." if swap else "there is no swap, so it costs nothing."),
            "Raise it for the daemon: LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1:-1 (docker), `ulimit -l`; "
            "in Kubernetes keep swap off for the pod.",
        )


def check_files(subject: Subject) -> Iterator[Finding]:
    """The daemon may open as many files as its sessions have segments."""
    pid, host = subject.daemon_pid, subject.host
    if pid is None:
        yield Finding("limits.nofile", Status.SKIPPED, ELSEWHERE)
        return
    limit, used = host.limit(pid, "Max open files"), host.open_files(pid) or 0
    remedy = (
        "Raise it for the daemon: LimitNOFILE=65536 (systemd), --ulimit nofile=65536:65536 (docker), `ulimit -n 65536`."
    )
    if limit is None:
        yield Finding("limits.nofile", Status.SKIPPED, "the limit of open files cannot be read.")
    elif limit != UNLIMITED and subject.daemon.pid and used > limit * 4 // 5:
        text = f"the daemon has {used} files open and may have {limit}: the next attach may fail."
        yield Finding("limits.nofile", Status.PROBLEM, text, remedy)
    elif limit != UNLIMITED and limit < WANTED_FILES:
        text = f"{limit} open files are allowed; a session takes about 10, and 3 more for each of its keys."
        yield Finding("limits.nofile", Status.WARNING, text, remedy)
    else:
        yield Finding("limits.nofile", Status.OK, f"{'any number of' if limit == UNLIMITED else limit} open files.")


def check_cgroup(subject: Subject) -> Iterator[Finding]:
    """The control group of who owns the segments has room for all of them: they are charged to it."""
    pid, host = subject.daemon_pid, subject.host
    if pid is None:
        yield Finding("memory.cgroup", Status.SKIPPED, ELSEWHERE)
        return
    group = host.cgroup_memory(pid)
    if group is None:
        yield Finding("memory.cgroup", Status.SKIPPED, "the control group's memory limit cannot be read.")
        return
    budget = subject.budget_bytes
    if budget is None:
        budget = int(host.room(host.at(SHM_DIRECTORY)).size * BUDGET_SHARE)
    needed = budget + budget // PAGE_TABLE_SHARE + PROCESS_BYTES
    memory = host.meminfo("MemTotal") or 0
    if group.limit_bytes != UNLIMITED and group.limit_bytes < needed:
        yield Finding(
            "memory.cgroup",
            Status.PROBLEM if subject.daemon.pid else Status.WARNING,
            f"the container or unit may use {size(group.limit_bytes)}, the daemon's budget alone is {size(budget)}: "
            "it is killed when the pools fill.",
            f"Raise the memory limit to {size(needed)} or more, or lower --memory-budget; shared memory is charged to "
            "the daemon, who allocates it.",
        )
    elif group.limit_bytes == UNLIMITED and memory and budget > memory * 9 // 10:
        yield Finding(
            "memory.cgroup",
            Status.WARNING,
            f"the budget is {size(budget)} of {size(memory)} of memory.",
            "Lower --memory-budget, so that the engines have room.",
        )
    else:
        limit = "no limit" if group.limit_bytes == UNLIMITED else f"a limit of {size(group.limit_bytes)}"
        yield Finding("memory.cgroup", Status.OK, f"{limit} of memory for a budget of {size(budget)}.")
    if group.oom_kills:
        yield Finding(
            "memory.cgroup",
            Status.WARNING,
            f"{group.oom_kills} processes of this control group were killed for memory.",
            "`stagecache plan` computes the limit that the daemon's container needs.",
        )


def check_logind(subject: Subject) -> Iterator[Finding]:
    """systemd-logind removes the shared memory of a user whose last session ends, unless that is a system user."""
    host = subject.host
    uid = subject.daemon.uid if subject.daemon.uid is not None else subject.euid
    if not host.at("/run/systemd/users").is_dir() or host.container():
        yield Finding("memory.logind", Status.SKIPPED, "systemd-logind does not run here.")
    elif uid < FIRST_USER_UID:
        yield Finding("memory.logind", Status.OK, f"uid {uid} is a system user, whose segments logind leaves alone.")
    elif _removes_ipc(subject):
        yield Finding(
            "memory.logind",
            Status.WARNING,
            f"systemd-logind deletes the shared memory of uid {uid} when its last login session ends (RemoveIPC=yes).",
            "Run the daemon as a system user (deploy/systemd), or `loginctl enable-linger`, or set RemoveIPC=no in "
            "logind.conf.",
        )
    else:
        yield Finding("memory.logind", Status.OK, "logind is told to leave shared memory alone (RemoveIPC=no).")


def _removes_ipc(subject: Subject) -> bool:
    """What logind's files say last; yes where they say nothing."""
    host = subject.host
    files = [host.at("/etc/systemd/logind.conf"), *sorted(host.at("/etc/systemd/logind.conf.d").glob("*.conf"))]
    said = "yes"
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for found in re.finditer(r"^\s*RemoveIPC\s*=\s*(\S+)", text, re.MULTILINE):
            said = found[1].lower()
    return said not in ("no", "false", "0", "off")


def check_kernel(subject: Subject) -> Iterator[Finding]:
    """The kernel has what makes deaths known at once and prefaulting quick."""
    kernel = subject.host.kernel()
    name = ".".join(map(str, kernel))
    if kernel == (0, 0):
        yield Finding("kernel", Status.SKIPPED, "the kernel's release cannot be read.")
    elif kernel < PEERPIDFD_KERNEL:
        slow = "" if kernel >= POPULATE_KERNEL else " and prefaults pools byte by byte"
        yield Finding(
            "kernel",
            Status.NOTE,
            f"Linux {name} gives no pidfd of a peer, so a worker's death is noticed within 0.5 s{slow}.",
            "Linux 6.5 has both; nothing is wrong without.",
        )
    else:
        yield Finding("kernel", Status.OK, f"Linux {name}: a worker's death is known at once.")
