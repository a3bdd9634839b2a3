"""Real engines of one stage: KV goes through a connector, the rows of what it spares them through the daemon (G2)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stagecache.local_daemon import LocalDaemon

from .adapters import write_adapter
from .scenarios import BLOCK, tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("connector_engine.py")
PROMPTS = {name: tokens(40 + number, 150) for number, name in enumerate(("first", "alone", "later", "salted", "plain"))}
HIT = 4 * BLOCK
"""Tokens of a prompt in full blocks, but for its last one."""
ENGINE = {"enable_lora": True, "max_lora_rank": 8}


class EngineProcess:
    """An engine in a process of its own; requests go one at a time."""

    def __init__(self, checkpoint: Path, kv_folder: Path, environment: dict[str, str], log: Path) -> None:
        path = os.pathsep.join((str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")))
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(checkpoint), str(kv_folder)],
                env=environment | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the engine has ended:\n{self._log.read_text()[-4000:]}")

    def ask(self, **order: Any) -> dict[str, Any]:
        self.send(order)
        return self.answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


class Stage:
    """A stage with its engines, its daemon and the rows that its prompts must give."""

    def __init__(self, folder: Path, checkpoint: Path, environment: dict[str, str], daemon: LocalDaemon) -> None:
        self.folder = folder
        self.kv = folder / "kv"
        self.kv.mkdir()
        self.daemon = daemon
        self._checkpoint = checkpoint
        self._environment = environment | {"STAGECACHE_SOCKET": str(daemon.socket), "STAGECACHE_SHARED_BLOCKS": "1"}
        self._engines: list[EngineProcess] = []

    def start(self) -> EngineProcess:
        """A process that makes its engine; ``answer`` it once."""
        process = EngineProcess(self._checkpoint, self.kv, self._environment, self.folder / "engine.log")
        self._engines.append(process)
        process.send({"engine": ENGINE})
        return process

    def rows_are_right(self, name: str, mine: Path) -> bool:
        """Bit for bit those of an engine without any cache, and not a shifted form of them."""
        rows = load_file(mine)["hidden_states"]
        expected = load_file(self.folder / f"{name}.safetensors")["hidden_states"]
        return torch.equal(rows, expected) and not torch.equal(rows.roll(1, dims=0), expected)

    def run(self, engine: EngineProcess, name: str, like: str = "", **more: Any) -> dict[str, Any]:
        """A prompt on an engine; ``right``: whether its rows are those of ``like``, of itself unless named."""
        out = self.folder / "mine.safetensors"
        out.unlink(missing_ok=True)
        found = engine.ask(id=name, tokens=PROMPTS[name], out=str(out), **more)
        return {**found, "right": out.exists() and self.rows_are_right(like or name, out)}

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, engine_environment: dict[str, str]
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("s")
    with LocalDaemon(folder, arguments=["--shared-bytes", "8MiB"]) as daemon:
        made = Stage(folder, checkpoint, engine_environment, daemon)
        yield made
        made.close()


def test_what_one_engine_computed_another_is_served_whatever_dies(stage: Stage) -> None:
    """G2, and the rows are those of an uncached run, bit for bit."""
    one = EngineProcess(stage._checkpoint, stage.kv, stage._environment, stage.folder / "engine.log")
    stage._engines.append(one)
    loras = {name: ("style", str(stage.folder / f"{name}.lora")) for name in ("painted", "drawn")}
    for seed, (_, folder) in enumerate(loras.values()):
        write_adapter(Path(folder), seed)
    wanted = PROMPTS | dict.fromkeys(loras, PROMPTS["plain"])
    one.send({"reference": str(stage.folder), "prompts": wanted, "loras": loras, "with": ENGINE})
    other = stage.start()
    assert one.answer() == {"written": len(wanted)}
    assert one.ask(engine=ENGINE) == {"serves": True}
    assert other.answer() == {"serves": True}

    computed = stage.run(one, "first")
    assert (computed["cached"], computed["computed"], computed["right"]) == (0, 150, True)
    served = stage.run(other, "first")
    assert (served["cached"], served["computed"], served["from_cache"]) == (HIT, 150 - HIT, HIT), served
    assert served["right"], served
    assert served["answer"] == computed["answer"]
    local = stage.run(other, "first")
    assert (local["cached"], local["from_cache"], local["right"]) == (HIT, HIT, True)

    # A salt that differs: the connector offers the same KV, and no row of it is shared.
    assert stage.run(one, "salted", salt="mine")["right"]
    apart = stage.run(other, "salted", salt="yours")
    assert (apart["cached"], apart["computed"], apart["right"]) == (0, 150, True), apart

    # So do an adapter and none, in engines that were given equal tokens; the same adapter is served.
    assert stage.run(one, "plain", "painted", lora=loras["painted"])["right"]
    found = stage.run(other, "plain", "painted", lora=loras["painted"])
    assert (found["cached"], found["from_cache"], found["right"]) == (HIT, HIT, True), found
    bare = stage.run(other, "plain")
    assert (bare["cached"], bare["computed"], bare["right"]) == (0, 150, True), bare

    one.kill()
    alone = stage.run(other, "alone")
    assert (alone["cached"], alone["right"]) == (0, True)
    again = stage.start()
    assert again.answer() == {"serves": True}
    for name in ("first", "alone"):
        found = stage.run(again, name)
        assert (found["cached"], found["from_cache"], found["right"]) == (HIT, HIT, True), found

    # Another adapter under the same name has the same hashes in vLLM, and other files.
    drawn = stage.run(again, "plain", "drawn", lora=loras["drawn"])
    assert (drawn["cached"], drawn["computed"], drawn["right"]) == (0, 150, True), drawn

    os.kill(stage.daemon.pid or 0, signal.SIGKILL)
    stage.daemon.start()
    assert stage.run(again, "later")["right"]
    found = stage.run(other, "later")
    assert found["right"], found
