"""The engine's plugin costs nothing where it is not asked for, and nothing heavy where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

LOAD = """
import json, sys
from importlib.metadata import entry_points
finders = list(sys.meta_path)
[entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "stagecache"]
register = entry.load()
for _ in range(2):
    register()
ours = sorted(m for m in sys.modules if m.partition(".")[0] in ("stagecache", "stagecached", "stagecache_wire"))
heavy = sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "numpy", "grpc", "vllm", "google", "posix_ipc"})
print(json.dumps({"ours": ours, "heavy": heavy, "hooks": len(sys.meta_path) - len(finders)}))
"""

HOOK = """
import importlib, json, sys
from stagecache.shim.plugin import PatchingLoader, RunnerFinder
import stagecache.shim.plugin as plugin
patched = []
plugin._patch = lambda module: patched.append((module.__name__, hasattr(module, "loads")))
sys.meta_path.insert(0, RunnerFinder({"json.decoder", "colorsys"}))
import colorsys
importlib.import_module("colorsys")
loader = type(colorsys.__spec__.loader).__name__
print(json.dumps({"patched": patched, "loader": loader, "works": colorsys.rgb_to_hsv(1, 1, 1)[2]}))
"""

ENTRY_POINT_ONLY = ["stagecache", "stagecache.shim", "stagecache.shim.plugin"]


def run(code: str, **environ: str) -> dict[str, object]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("STAGECACHE_")} | environ
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_without_the_variable_nothing_but_the_entry_point_is_imported() -> None:
    assert run(LOAD) == {"ours": ENTRY_POINT_ONLY, "heavy": [], "hooks": 0}


def test_an_empty_variable_counts_as_unset() -> None:
    assert run(LOAD, STAGECACHE_SOCKET="") == {"ours": ENTRY_POINT_ONLY, "heavy": [], "hooks": 0}


def test_with_the_variable_one_import_hook_waits_and_nothing_is_imported_yet() -> None:
    """The hook is there once, though the engine calls register in one process more than once."""
    assert run(LOAD, STAGECACHE_SOCKET="/nonexistent/stagecached.sock") == {
        "ours": ENTRY_POINT_ONLY,
        "heavy": [],
        "hooks": 1,
    }


def test_a_watched_module_is_patched_once_after_it_ran_and_keeps_its_own_loader() -> None:
    assert run(HOOK) == {"patched": [["colorsys", False]], "loader": "SourceFileLoader", "works": 1}
