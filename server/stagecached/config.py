"""Settings of the daemon: flags, then ``STAGECACHED_*`` variables, then a TOML file, then defaults that serve."""

from __future__ import annotations

import argparse
import grp
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from stagecache_wire.names import DEFAULT_SOCKET, RunPaths
from stagecache_wire.shm import SHM_DIRECTORY
from stagecached.access import Access
from stagecached.logs import LogFormat, LogLevel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_BUDGET: Final = "80%"
MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path that the kernel binds a Unix socket to."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(?:i?b)?|(%))", re.IGNORECASE)

_METAVARS: Final = {
    "socket": "PATH",
    "config": "FILE",
    "memory_budget": "SIZE",
    "shared_bytes": "SIZE",
    "shared_namespaces": "N",
    "max_sessions": "N",
    "merge_threads": "N",
    "drain_timeout_s": "SECONDS",
    "watchdog_s": "SECONDS",
    "metrics_port": "PORT",
    "metrics_address": "ADDRESS",
    "group": "GROUP",
}

_EPILOG: Final = f"""\
examples:
  stagecached --socket /run/stagecache/stagecached.sock
  stagecached --socket /tmp/sc/d.sock --memory-budget 12GiB --log-format json
  stagecached --socket /tmp/sc/d.sock --shared-bytes 4GiB --shared-namespaces 2
  STAGECACHED_MEMORY_BUDGET=50% stagecached --config /etc/stagecache/stagecached.toml

Each setting may come from a flag, from the variable STAGECACHED_<NAME>, or from the TOML file (memory_budget =
"12GiB"); the first of these wins. Sizes take K, M, G, T (powers of 1024) or a percentage of {SHM_DIRECTORY}.

signals:
  SIGTERM, SIGINT   drain, end the sessions, give all shared memory back
  SIGUSR1           drain and stop, but keep the sessions: the next daemon on this socket adopts them
  SIGUSR2           collect garbage and log the memory that is left: is it held, or only not yet given back?
"""


class ConfigError(ValueError):
    """A setting that cannot be used; the text names it and says what to do."""


def parse_size(text: str) -> int:
    """Bytes of ``12GiB``, ``512M``, ``1073741824`` or ``80%`` (of the size of /dev/shm).

    Raises:
        ValueError: no size of that form, or one of no bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 12GiB, 512M, a number of bytes, or 80% of {SHM_DIRECTORY}")
    number, unit, percent = float(match[1]), match[2], match[3]
    if percent and number > 100:
        raise ValueError(f"{text!r} is more than all of {SHM_DIRECTORY}")
    if percent:
        stat = os.statvfs(SHM_DIRECTORY)
        size = int(stat.f_blocks * stat.f_frsize * number / 100)
    else:
        size = int(number * _UNITS[(unit or "").lower()])
    if size < 1:
        raise ValueError(f"{text!r} is no bytes at all")
    return size


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _size_or_none(value: object) -> object:
    return 0 if value in ("0", 0) else _size(value)


class Settings(BaseSettings):
    """The cache daemon of a GPU node: keeps the rows of stage workers in shared memory and completes their hits."""

    model_config = SettingsConfigDict(env_prefix="STAGECACHED_", extra="forbid", validate_default=True)

    socket: Path = Field(
        default=Path(DEFAULT_SOCKET),
        description="Unix socket of the service; the run directory is beside it, with .d appended",
    )
    config: Path | None = Field(default=None, description="TOML file with further settings")
    memory_budget: Annotated[int, BeforeValidator(_size)] = Field(
        default=DEFAULT_BUDGET,  # type: ignore[assignment]  # validated like any other value
        description="shared memory of all sessions together, in bytes or like 12GiB or 80%",
        ge=1,
    )
    shared_bytes: Annotated[int, BeforeValidator(_size_or_none)] = Field(
        default=0,
        description="shared memory of the blocks that replicas of a stage share, beside memory_budget, like 4GiB or "
        "20%; 0: nothing is shared",
        ge=0,
    )
    shared_namespaces: int = Field(
        default=1, ge=1, le=64, description="equal parts of shared_bytes, one for each model and stage that shares"
    )
    max_sessions: int = Field(default=64, ge=1, le=4096, description="workers attached at once")
    merge_threads: int = Field(default=4, ge=1, le=64, description="merges of one session that may wait at once")
    drain_timeout_s: float = Field(
        default=5.0, ge=0, le=600, description="longest time to work off the logs at a stop, in seconds"
    )
    watchdog_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="time after which a daemon whose event loop or consumer is stuck ends itself, with status 4, so "
        "that the next one adopts its sessions, in seconds, at least 1; 0: never",
    )
    group: str = Field(
        default="", description="group whose members may connect too, by name or number; none: only this user"
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="TCP port of /metrics and of the status page; 0 takes a free one; none: only the Unix socket "
        "http.sock in the run directory",
    )
    metrics_address: str = Field(
        default="127.0.0.1", description="address that the metrics port is bound to; 0.0.0.0 for all"
    )
    tracing: bool = Field(
        default=False,
        description="send a span of each record to the OpenTelemetry collector at OTEL_EXPORTER_OTLP_ENDPOINT; "
        "needs stagecache[tracing]",
    )
    log_format: LogFormat = Field(default="console", description="how log lines look")
    log_level: LogLevel = Field(default="info", description="least level that is logged")

    @field_validator("socket")
    @classmethod
    def _socket_fits(cls, value: Path) -> Path:
        if not value.name:
            raise ValueError("it names no file")
        peer = os.fsencode(RunPaths.of(value).peer_socket)
        if len(peer) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"the path of its peer socket would have {len(peer)} bytes, the kernel allows "
                f"{MAX_SOCKET_PATH_BYTES}: choose a shorter one"
            )
        return value

    @field_validator("watchdog_s")
    @classmethod
    def _watchdog_is_patient(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError("less than a second is no time to be stuck: 0 turns the watchdog off")
        return value

    @field_validator("group")
    @classmethod
    def _group_exists(cls, value: str) -> str:
        if value:
            _gid_of(value)
        return value

    @property
    def access(self) -> Access:
        return Access(_gid_of(self.group) if self.group else None)

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.socket)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(PydanticBaseSettingsSource):
    """The TOML file that an earlier source names as ``config``."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("config")
        if not name:
            return {}
        path = Path(name)
        try:
            with path.open("rb") as file:
                return tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"config {path} cannot be read: {error.strerror}. Fix --config or its mode.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"config {path} is no TOML: {error}") from error


def _gid_of(group: str) -> int:
    try:
        number = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        if number >= 1 << 31:
            raise KeyError(group)
        return number
    except KeyError:
        raise ValueError(f"there is no group {group!r} here: create it, or give its number") from None


def load(argv: Sequence[str] | None = None) -> Settings:
    """The settings of a command line (default: that of this process). ``--help`` prints and exits.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="stagecached",
        description=Settings.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        Settings, root_parser=parser, cli_kebab_case=True, cli_hide_none_type=True, cli_avoid_json=True
    )
    for action in parser._actions:
        action.metavar = _METAVARS.get(action.dest, action.metavar)
    try:
        return Settings(_cli_settings_source=flags(args=list(sys.argv[1:] if argv is None else argv)))  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"there is no setting {name!r}: `stagecached --help` lists them"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message[0].lower()}{message[1:]}"
