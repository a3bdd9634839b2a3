"""What a daemon finds at its start, mutated: manifests, control headers and segments of sessions whose workers live.

Many sessions are mutated for each start, and one beside them is not: it must be adopted, whatever the others hold.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from stagecache.control import connect_observer
from stagecache_wire import geometry as geometry_module
from stagecache_wire import layout, shm
from stagecache_wire.names import SessionNames
from stagecached import adoption, manifest, segments
from tests.daemon_process import DaemonProcess
from tests.fuzz.beside import Beside
from tests.fuzz.call_fuzz import Worker
from tests.fuzz.messages import U64
from tests.fuzz.mutate import EDGES_64, changed
from tests.fuzz.rules import Rules
from tests.fuzz.sockets import any_value

SESSIONS = 24


@dataclass
class Result:
    """adopted: mutated sessions that were adopted all the same. rules: by which the others were not."""

    rules: list[Rules]
    starts: int = 0
    sessions: int = 0
    adopted: int = 0
    lost: int = 0
    start_s: float = 0.0
    done: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        tables = "\n".join(rules.table() for rules in self.rules)
        return (
            f"{self.sessions} mutated sessions at {self.starts} starts, {self.adopted} adopted, {self.lost} given up; "
            f"slowest start {self.start_s:.2f} s\n{dict(self.done)}\n{tables}"
        )


@dataclass
class Left:
    """What a killed daemon left of one session. names: of its segments; path: its manifest."""

    names: SessionNames
    path: Path

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads(self.path.read_text())
        change(content)
        self.path.write_text(json.dumps(content))


def a_field(rng: Random, left: Left) -> None:
    """Any value at any place of the manifest."""

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        while True:
            at = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[at], dict | list) or not place[at] or rng.random() < 0.15:
                break
            place = place[at]
        if rng.random() < 0.15:
            del place[at]
        elif isinstance(place[at], int) and rng.random() < 0.6:
            place[at] = changed(rng, place[at], EDGES_64, U64)
        else:
            place[at] = any_value(rng)

    left.edit(change)


def a_size(rng: Random, left: Left) -> None:
    def change(content: dict[str, Any]) -> None:
        sizes = content["geometry"]
        name = rng.choice(list(sizes))
        sizes[name] = rng.choice((0, 1, sizes[name] + 1, sizes[name] * 2, 1 << 40))

    left.edit(change)


def a_key(rng: Random, left: Left) -> None:
    def change(content: dict[str, Any]) -> None:
        if not content["keys"]:
            content["keys"] = [{"key_id": 0, "name": "x", "dtype": "float32", "row_shape": [1]}]
        entry = rng.choice(content["keys"])
        how = rng.randrange(6)
        if how == 0:
            entry["dtype"] = rng.choice(("float64", "bool", "object", ""))
        elif how == 1:
            entry["row_shape"] = rng.choice(([], [0], [1], [9], [-1], [1 << 30], [1] * 9, [1 << 62, 4]))
        elif how == 2:
            entry["key_id"] = rng.choice((0, 1, 2, 7, 1 << 24, -1))
        elif how == 3:
            entry["name"] = rng.choice(("", "n" * 513, "\ud800", "__hidden_states__"))
        elif how == 4:
            content["keys"].append(dict(entry))
        else:
            content["next_key_id"] = rng.choice((0, 1, -1, 1 << 30))

    left.edit(change)


def another_abi(rng: Random, left: Left) -> None:
    left.edit(lambda content: content.update(abi=rng.choice((0, 1 << 40, content["abi"] + 1))))


def another_session(rng: Random, left: Left) -> None:
    left.edit(lambda content: content.update(session_id=f"{rng.getrandbits(64):016x}"))


def its_bytes(rng: Random, left: Left) -> None:
    raw = bytearray(left.path.read_bytes())
    how = rng.randrange(4)
    if how == 0:
        del raw[rng.randrange(len(raw)) :]
    elif how == 1:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif how == 2:
        raw = bytearray(rng.randbytes(rng.choice((0, 1, 500))))
    else:
        raw = bytearray(b"[" * 100_000)
    left.path.write_bytes(raw)


def no_manifest(rng: Random, left: Left) -> None:
    left.path.unlink()


def a_header_word(rng: Random, left: Left) -> None:
    words = shm.open_segment(left.names.control).view.cast("Q")
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(13)
        words[at] = changed(rng, words[at], EDGES_64, U64)


def a_daemon_word(rng: Random, left: Left) -> None:
    """Words of worker and daemon: where the log goes on, and as what."""
    words = shm.open_segment(left.names.control).view.cast("Q")
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.choice((layout.W_HEAD, layout.D_CONSUMED, layout.D_STATUS, layout.D_EPOCH, layout.D_EPOCH_SEQUENCE))
        words[at] = changed(rng, words[at], EDGES_64, U64)


def ended(rng: Random, left: Left) -> None:
    shm.open_segment(left.names.control).view.cast("Q")[layout.D_STATUS] = layout.STATUS_ENDED


def parts_of(left: Left) -> list[Path]:
    parts = sorted(shm.SHM_DIRECTORY.glob(f"*{left.names.session_id}.*"))
    return [path for path in parts if not path.name.endswith(".lock")]


def a_length(rng: Random, left: Left) -> None:
    path = rng.choice([path for path in parts_of(left) if not path.name.startswith("sem.")])
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 1, size - 1, size // 2, size + 4096)))


def a_part(rng: Random, left: Left) -> None:
    rng.choice(parts_of(left)).unlink()


MUTATIONS: tuple[Callable[[Random, Left], None], ...] = (
    a_field, a_field, a_size, a_key, a_key, another_abi, another_session, its_bytes, no_manifest, a_header_word,
    a_daemon_word, ended, a_length, a_part,
)  # fmt: skip


def run(daemon: DaemonProcess, seed: int, starts: int) -> Result:
    """Kill the daemon so often, and start it on what is left, mutated.

    Raises:
        AssertionError: it did not start, a mutated session has other sizes than before, or the bystander is touched.
    """
    rng = Random(seed)
    rules = [
        Rules("AdoptError", (adoption, segments)),
        Rules("ManifestError", (manifest,)),
        Rules("BadGeometryError", (geometry_module,)),
    ]
    result = Result(rules)
    with Beside(daemon.socket) as beside:
        for _ in range(starts):
            victims = [Worker(daemon.socket) for _ in range(SESSIONS)]
            before = sizes(daemon)
            daemon.kill()
            noted = len(daemon.log)
            for victim in victims:
                session_id = victim.credentials.session_id
                left = Left(SessionNames(daemon.paths.node, session_id), daemon.paths.sessions / f"{session_id}.json")
                mutation = rng.choice(MUTATIONS)
                mutation(rng, left)
                result.done[mutation.__name__] += 1
            daemon.start()
            beside.look()
            result.starts += 1
            result.start_s = max(result.start_s, daemon.start_s)
            after = sizes(daemon)
            for session_id, (geometry, keys) in after.items():  # a key may count as closed, and no more
                assert geometry == before[session_id][0]
                assert set(keys) <= set(before[session_id][1])
            result.sessions += len(victims)
            result.adopted += len(after) - 1
            for line in daemon.log[noted:].split("\n20"):
                if "cannot be adopted" in line:
                    result.lost += 1
                    assert any(rules.count_text(line) for rules in result.rules), line
            for victim in victims:
                victim.end()
        beside.end()
    return result


def sizes(daemon: DaemonProcess) -> dict[str, tuple[bytes, list[tuple[int, ...]]]]:
    """Geometry of each session and row bytes of its keys, as the daemon has them."""
    with connect_observer(daemon.socket, timeout_s=20.0) as observer:
        return {
            session.session_id: (
                session.geometry.SerializeToString(deterministic=True),
                [(key.key_id, key.key.row_bytes, key.pool_bytes, key.staging_bytes) for key in session.keys],
            )
            for session in observer.stats().sessions
        }
