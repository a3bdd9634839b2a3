"""Keys that workers of a (model, stage) have opened before, so that the next one opens them when it attaches.

A hint, never a truth: a file that cannot be read is begun anew, and a key that no longer fits is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog
from pydantic import BaseModel, ValidationError

from stagecache_wire.geometry import MAX_KEYS, BadGeometryError, KeySchema
from stagecached.files import write_atomically

MAX_STAGES: Final = 256
"""(model, stage) pairs that are remembered; the one not seen for longest goes first."""

log = structlog.get_logger()


class _Key(BaseModel):
    name: str
    dtype: str
    row_shape: tuple[int, ...]


class _Stage(BaseModel):
    model: str
    stage: str
    keys: list[_Key] = []


class _File(BaseModel):
    version: int = 1
    stages: list[_Stage] = []


class KeyMemory:
    """Remembered keys, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stages: dict[tuple[str, str], dict[str, KeySchema]] = {}
        try:
            content = _File.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            log.warning("remembered keys are lost", error=str(error))
            return
        for entry in content.stages:
            keys = self._stages.setdefault((entry.model, entry.stage), {})
            for key in entry.keys:
                try:
                    keys[key.name] = KeySchema(key.name, key.dtype, key.row_shape).checked()
                except BadGeometryError as error:
                    log.warning("a remembered key is lost", error=str(error))

    def recall(self, model: str, stage: str) -> list[KeySchema]:
        """Keys to open, in the order in which they were first seen."""
        return list(self._stages.get((model, stage), {}).values())

    def remember(self, model: str, stage: str, schema: KeySchema) -> None:
        """Note an open key; the last dtype and shape of a name win. Provisional keys are not noted (K1)."""
        if schema.provisional:
            return
        keys = self._stages.pop((model, stage), {})
        self._stages[model, stage] = keys
        if keys.get(schema.name) == schema or (schema.name not in keys and len(keys) >= MAX_KEYS):
            return
        keys[schema.name] = schema
        while len(self._stages) > MAX_STAGES:
            del self._stages[next(iter(self._stages))]
        self._write()

    def _write(self) -> None:
        content = _File(
            stages=[
                _Stage(
                    model=model,
                    stage=stage,
                    keys=[_Key(name=k.name, dtype=k.dtype, row_shape=k.row_shape) for k in keys.values()],
                )
                for (model, stage), keys in self._stages.items()
            ]
        )
        write_atomically(self._path, content.model_dump_json(indent=1))
