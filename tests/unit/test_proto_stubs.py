"""The committed stubs are what the .proto file says, and they run with the oldest releases that we allow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "proto" / "stagecache_wire" / "v1"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    subprocess.run([sys.executable, ROOT / "tools" / "gen_proto.py", "--out", out], check=True, timeout=60)
    return out


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_committed_stubs_are_complete(generated: Path) -> None:
    assert _files(COMMITTED) == _files(generated), "run `make proto` and commit the result"


@pytest.mark.parametrize(
    "name",
    [
        "__init__.py",
        "stagecache_pb2.py",
        "stagecache_pb2.pyi",
        "stagecache_pb2_grpc.py",
        "stagecache_pb2_grpc.pyi",
    ],
)
def test_committed_stub_is_what_the_proto_generates(generated: Path, name: str) -> None:
    assert (COMMITTED / name).read_bytes() == (generated / name).read_bytes(), "run `make proto` and commit the result"


def _lower_bound(distribution: str) -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'"{distribution}>=([0-9.]+)', text)
    assert found, f"pyproject.toml gives {distribution} no lower bound"
    return found[1]


def test_oldest_allowed_grpcio_runs_the_stubs() -> None:
    text = (COMMITTED / "stagecache_pb2_grpc.py").read_text(encoding="utf-8")
    assert f"GRPC_GENERATED_VERSION = '{_lower_bound('grpcio')}'" in text


def test_oldest_allowed_protobuf_runs_the_stubs() -> None:
    text = (COMMITTED / "stagecache_pb2.py").read_text(encoding="utf-8")
    assert f"# Protobuf Python Version: {_lower_bound('protobuf')}\n" in text


def test_message_names_live_in_the_public_package() -> None:
    from stagecache_wire.v1 import stagecache_pb2

    assert stagecache_pb2.DESCRIPTOR.package == "stagecache.v1"
