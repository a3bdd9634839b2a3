"""Run a program as the systemd unit would confine it, as far as one process can do that to itself.

    python confine.py COMMAND...

The unit's system-call filter, no capabilities, no new privileges, no memory that is
writable and executable, its umask. What needs systemd as init is left out: mounts, address filters, control groups.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

from tests.unit.deploy.files import unit

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 38, 65
LAST_CAPABILITY = 63


def system_calls(name: str) -> set[str]:
    """System calls of one of systemd's groups (``@chown``), or the one named."""
    if not name.startswith("@"):
        return {name}
    text = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.strip() for line in text.splitlines()[1:]]
    return {call for line in lines if line and not line.startswith("#") for call in system_calls(line)}


def allowed_calls() -> set[str]:
    """What the unit's SystemCallFilter= lines leave, one after another."""
    allowed: set[str] = set()
    for value in unit()["SystemCallFilter"]:
        named = {call for name in value.lstrip("~").split() for call in system_calls(name)}
        allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed


def confine() -> None:
    """Confine this process and what it becomes."""
    calls, number = allowed_calls(), unit().get("SystemCallErrorNumber")
    refuse = ERRNO | getattr(errno, number[0]) if number else KILL_PROCESS
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = [ctypes.c_uint32]
    seccomp.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    seccomp.seccomp_load.argtypes = [ctypes.c_void_p]
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for option in (PR_SET_NO_NEW_PRIVS, PR_SET_MDWE):
        if libc.prctl(option, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")
    os.umask(int(unit()["UMask"][0], 8))
    rules = seccomp.seccomp_init(refuse)
    for call in sorted(calls):
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number >= 0 and seccomp.seccomp_rule_add(rules, ALLOW, number, 0) != 0:
            raise OSError(f"no rule for {call}")
    if seccomp.seccomp_load(rules) != 0:
        raise OSError("the filter cannot be loaded")


if __name__ == "__main__":
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])
