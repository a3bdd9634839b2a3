"""Settings: where they come from, which wins, and what is said of one that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagecache_wire.shm import SHM_DIRECTORY
from stagecached.config import ConfigError, load, parse_size


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STAGECACHED_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        ("12GiB", 12 << 30),
        ("12G", 12 << 30),
        ("12gb", 12 << 30),
        ("1.5 M", 3 << 19),
        ("2T", 2 << 40),
        ("7k", 7 << 10),
    ],
)
def test_size_for_people(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_size_as_a_share_of_shared_memory() -> None:
    whole = os.statvfs(SHM_DIRECTORY)
    assert parse_size("50%") == whole.f_blocks * whole.f_frsize // 2


@pytest.mark.parametrize("text", ["", "G", "12Q", "-1", "0", "0%", "1e9", "12 GiB extra", "nan"])
def test_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no size|no bytes"):
        parse_size(text)


def test_defaults_serve() -> None:
    settings = load([])
    assert str(settings.socket) == "/run/stagecache/stagecached.sock"
    assert settings.memory_budget == parse_size("80%")
    assert settings.access.gid is None


def test_flag_beats_variable_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('memory_budget = "1G"\nmax_sessions = 1\nmerge_threads = 1\nlog_level = "debug"\n')
    monkeypatch.setenv("STAGECACHED_MAX_SESSIONS", "2")
    monkeypatch.setenv("STAGECACHED_MERGE_THREADS", "2")
    settings = load(["--config", str(file), "--merge-threads", "3"])
    assert (settings.log_level, settings.memory_budget) == ("debug", 1 << 30)
    assert (settings.max_sessions, settings.merge_threads) == (2, 3)


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("16KiB", 16384), ("2G", 2 << 30)])
def test_shared_blocks_are_off_unless_they_get_a_size(text: str, size: int, tmp_path: Path) -> None:
    assert load([]).shared_bytes == 0
    assert load(["--shared-bytes", text]).shared_bytes == size
    file = tmp_path / "c.toml"
    file.write_text(f"shared_bytes = {size}\n")
    assert load(["--config", str(file)]).shared_bytes == size


def test_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_sessions = 9\n")
    monkeypatch.setenv("STAGECACHED_CONFIG", str(file))
    assert load([]).max_sessions == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory-budget", "lots"], ["memory_budget", "'lots'", "12GiB"]),
        (["--shared-bytes", "some"], ["shared_bytes", "'some'", "12GiB"]),
        (["--shared-namespaces", "0"], ["shared_namespaces", "greater than or equal to 1"]),
        (["--max-sessions", "0"], ["max_sessions", "greater than or equal to 1"]),
        (["--log-format", "xml"], ["log_format", "'console' or 'json'"]),
        (["--group", "no-such-group-here"], ["group", "no-such-group-here", "create it"]),
        (["--socket", "/tmp/" + "x" * 100], ["socket", "bytes", "shorter"]),
        (["--config", "/no/such/file.toml"], ["/no/such/file.toml", "No such file", "--config"]),
    ],
)
def test_error_names_the_setting_and_the_remedy(arguments: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "text", ["memory_bugdet = 1", "max_sessions = 'many'", "= =", "group = '\xe9'", "group = " + "[" * 100_000]
)
def test_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"memory_bugdet|max_sessions|no TOML"):
        load(["--config", str(file)])


def test_help_shows_every_setting_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--socket PATH", "--memory-budget SIZE", "--group", "--drain-timeout-s", "examples:", "SIGUSR1"):
        assert word in text
