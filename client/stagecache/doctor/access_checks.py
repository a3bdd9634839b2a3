"""The socket and who may come near it: paths, modes, users, and mounts that hide what is needed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagecache import errors
from stagecache.doctor.report import Finding, Status
from stagecache.doctor.subject import Subject, holder_pid

NETWORK_FILE_SYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre")
MAX_SOCKET_PATH_BYTES: Final = 107
_MOUNT_DIRECTORY: Final = (
    "Mount the directory that holds the socket, not the file: the run directory beside it is needed too, and a "
    "restarted daemon makes a new socket that a mounted file does not show."
)


def check_path(subject: Subject) -> Iterator[Finding]:
    """The socket's path is one: short enough, on a local file system, no trap of a bind mount."""
    path, host = subject.socket, subject.host
    length = len(os.fsencode(subject.paths.peer_socket))
    if length > MAX_SOCKET_PATH_BYTES:
        text = f"the path of the peer socket has {length} bytes, the kernel allows {MAX_SOCKET_PATH_BYTES}."
        yield Finding("socket.path", Status.PROBLEM, text, "Choose a shorter --socket.")
        return
    if host.mount_at(path) is not None and not host.at(path).is_dir():
        yield Finding(
            "socket.path", Status.PROBLEM, f"the socket file {path} itself is mounted here.", _MOUNT_DIRECTORY
        )
        return
    if host.at(path).is_dir():
        yield Finding(
            "socket.path",
            Status.PROBLEM,
            f"{path} is a directory: a container runtime makes one where the file to be mounted does not exist yet.",
            f"Remove it. {_MOUNT_DIRECTORY}",
        )
        return
    mount = host.mount_of(path)
    if mount is not None and mount.fstype in NETWORK_FILE_SYSTEMS:
        text = f"{path} lies on a {mount.fstype} file system, where sockets and locks of this node do not work."
        yield Finding("socket.path", Status.PROBLEM, text, "Choose a --socket below /run or /tmp.")
    elif mount is not None and mount.fstype == "overlay" and host.container():
        yield Finding(
            "socket.path",
            Status.WARNING if subject.daemon.uid is not None else Status.PROBLEM,
            f"{path.parent} belongs to this container alone: nobody outside sees a socket in it, and it is lost with "
            "the container.",
            "Mount a volume or a host directory there, in the daemon's container and in the workers'.",
        )
    else:
        yield Finding("socket.path", Status.OK, f"{path} lies on a {mount.fstype if mount else 'local'} file system.")


def check_modes(subject: Subject) -> Iterator[Finding]:
    """Nobody but the daemon's user and group may use the run directory."""
    directory = subject.host.at(subject.paths.directory)
    parent = directory.parent
    try:
        own = directory.stat()
        above = parent.stat()
    except FileNotFoundError:
        yield Finding("socket.modes", Status.SKIPPED, f"there is no run directory {subject.paths.directory} yet.")
        return
    except OSError as error:
        yield Finding(
            "socket.modes",
            Status.PROBLEM,
            f"the run directory cannot be looked at by uid {subject.euid}: {error.strerror}.",
            "Run as the daemon's user, or put this user into the group that the daemon was started with (--group).",
        )
        return
    mode = stat.S_IMODE(own.st_mode)
    if mode & 0o027:
        yield Finding(
            "socket.modes",
            Status.PROBLEM,
            f"the run directory has mode {mode:04o}: others may come near the tokens' key.",
            f"`chmod 0700 {subject.paths.directory}`, and start the daemon again.",
        )
    elif above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        yield Finding(
            "socket.modes",
            Status.WARNING,
            f"anybody may rename or remove what stands in {subject.socket.parent}.",
            f"`chmod o-w {subject.socket.parent}`, or set its sticky bit.",
        )
    else:
        yield Finding("socket.modes", Status.OK, f"run directory of uid {own.st_uid}, mode {mode:04o}.")


def check_daemon(subject: Subject) -> Iterator[Finding]:
    """A daemon serves here and talks to this user."""
    daemon, paths = subject.daemon, subject.paths
    if daemon.stats is not None:
        version = daemon.stats.version
        uptime = f"up {daemon.stats.uptime_s:.0f} s, {len(daemon.stats.sessions)} sessions"
        yield Finding("daemon", Status.OK, f"stagecached {version} serves {paths.socket} ({uptime}).")
        yield from _check_version(version)
        yield from _check_failures(subject)
        return
    remedy = getattr(daemon.error, "remedy", "")
    if isinstance(daemon.error, errors.TokenRefusedError):
        yield Finding("daemon", Status.PROBLEM, _without(daemon.error), remedy)
    elif isinstance(daemon.error, errors.AbiMismatchError):
        yield Finding("daemon", Status.PROBLEM, f"it is of another release: {_without(daemon.error)}", remedy)
    elif daemon.uid is not None:
        text = f"somebody listens at {paths.socket} and does not answer as stagecached: {_without(daemon.error)}"
        if not subject.host.at(paths.directory).exists():
            yield Finding("daemon", Status.PROBLEM, f"{text} Its run directory is not here.", _MOUNT_DIRECTORY)
        else:
            yield Finding("daemon", Status.PROBLEM, text, "Its log says why; `stagecache drain`, then start it again.")
    elif daemon.locked:
        pid = holder_pid(subject.host.at(paths.lock))
        text = f"a daemon (pid {pid if pid else 'unknown'}) holds the lock of {paths.socket} and does not answer."
        yield Finding(
            "daemon", Status.PROBLEM, text, "It starts, stops or hangs: ask again in some seconds, then see its log."
        )
    elif _is_socket(subject.host.at(paths.socket)):
        text = f"{paths.socket} was left by a daemon that is dead."
        yield Finding("daemon", Status.PROBLEM, text, f"Start it again: `stagecached --socket {paths.socket}`.")
    else:
        text = f"no daemon serves {paths.socket}."
        yield Finding("daemon", Status.PROBLEM, text, f"Start one: `stagecached --socket {paths.socket}`.")


def _without(error: errors.StageCacheError | None) -> str:
    """An error's text without its remedy, which is shown on its own."""
    return "" if error is None else str(error).removesuffix(error.remedy).rstrip()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _check_version(version: str) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        own = installed("stagecache")
    except PackageNotFoundError:
        return
    if own != version:
        yield Finding(
            "daemon",
            Status.NOTE,
            f"the daemon is of release {version}, this command of {own}; their shared-memory layouts agree.",
            "Upgrade the older one; `systemctl restart` and `stagecache drain --keep-sessions` keep the sessions.",
        )


def _check_failures(subject: Subject) -> Iterator[Finding]:
    stats = subject.daemon.stats
    for session in stats.sessions if stats is not None else ():
        if session.failure:
            yield Finding(
                "daemon",
                Status.PROBLEM,
                f"session {session.session_id[:12]} of stage {session.stage} failed: {session.failure}.",
                "Restart its worker; if it comes again, report it with the daemon's log.",
            )


def check_user(subject: Subject) -> Iterator[Finding]:
    """The daemon's user, and whether this one may talk to it."""
    daemon = subject.daemon
    if daemon.uid is None:
        who = "root, which it does not need" if subject.euid == 0 else f"uid {subject.euid}"
        yield Finding("user", Status.NOTE, f"no daemon runs; one started from here would run as {who}.")
    elif daemon.uid == 0:
        yield Finding(
            "user",
            Status.NOTE,
            "the daemon runs as root, which it does not need.",
            "Give it a user of its own, and with --group a group in which the engines' users are.",
        )
    elif daemon.uid == subject.euid:
        yield Finding("user", Status.OK, f"the daemon and this process are uid {daemon.uid}.")
    elif daemon.stats is not None:
        yield Finding("user", Status.OK, f"the daemon is uid {daemon.uid} and serves uid {subject.euid} by its group.")
    else:
        yield Finding(
            "user",
            Status.PROBLEM,
            f"the daemon is uid {daemon.uid}, this process uid {subject.euid}.",
            "Run both as one user, or start the daemon with --group and put this user into that group.",
        )
