"""Host memory of a deployment, computed before anything starts.

    plan = plan_deployment([StageSpec(name="thinker", num_blocks=15092, keys=["__hidden_states__:bfloat16:2048"])])
    print(plan.total_bytes)

Each worker that attaches is a session of its own: replicas of a stage, times the tensor-parallel ranks of each, since
every rank merges rows. Sizes come from ``stagecache_wire``, the same functions by which the daemon allocates; a test
attaches for real and holds the two equal.

A file of stages is TOML, YAML or JSON: a list ``stages`` whose items have the fields of ``StageSpec``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stagecache.errors import StageCacheError
from stagecache_wire.geometry import (
    MAX_KEYS,
    BadGeometryError,
    Geometry,
    KeySchema,
    pool_bytes,
    staging_bytes,
    table_bytes,
)
from stagecache_wire.layout import PAGE, ControlLayout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_BATCHED_TOKENS: Final = 8192

BUDGET_SHARE: Final = 0.8
"""Part of /dev/shm that the daemon's default budget is (``stagecached.config.DEFAULT_BUDGET``)."""
DOORBELL_BYTES: Final = 2 * PAGE
"""A session's two semaphores, which the budget does not count: files in /dev/shm of one page each."""
LOCK_BYTES: Final = PAGE
"""The daemon's lock file in /dev/shm."""
PROCESS_BYTES: Final = 256 << 20
"""What a container limit should leave the daemon beside shared memory: 80 MiB resident without pools, the rest for
threads, calls and page cache."""
PAGE_TABLE_SHARE: Final = 256
"""One byte of kernel memory for so many of shared memory: page tables (1/512) and tmpfs's own trees."""

SHARED_HEADER_BYTES: Final = 64
"""Of each shared block, beside its rows (``stagecached.shared.layout.BLOCK_WORDS``)."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_KEY: Final = re.compile(r"(?P<name>.+?):(?P<dtype>[a-z]\w*)(:(?P<shape>\d+(x\d+)*))?")


class PlanError(StageCacheError):
    """A deployment that cannot be computed; the text names the field and what it may be."""


def parse_key(text: str) -> KeySchema:
    """A key written ``NAME:DTYPE`` or ``NAME:DTYPE:SHAPE``, as in STAGECACHE_KEYS: ``codes.audio:int64:16``.

    Raises:
        ValueError: another form, an unknown dtype, or a row of no bytes or too many.
    """
    match = _KEY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not NAME:DTYPE or NAME:DTYPE:SHAPE, as in codes.audio:int64:16 or x:float32:4x8")
    shape = tuple(int(size) for size in match["shape"].split("x")) if match["shape"] else ()
    return KeySchema(match["name"], match["dtype"], shape).checked()


class StageSpec(BaseModel):
    """One stage of a deployment.

    replicas: engine instances of the stage (also data-parallel ones). tensor_parallel: ranks of each; every rank of
    the last pipeline stage attaches. num_blocks, block_size: the engine's KV cache, as it logs them. keys: names with
    dtype and row shape, ``NAME:DTYPE:SHAPE`` or a table of these three. max_num_batched_tokens: the engine's, rows of
    a staging page. staging_depth, arena_bytes, max_results: as the session asks for them; 0 bytes is the default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="stage0", min_length=1)
    num_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    keys: tuple[KeySchema, ...] = ()
    replicas: int = Field(default=1, ge=1, le=4096)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    staging_depth: int = Geometry.staging_depth
    arena_bytes: int = Geometry.arena_bytes
    max_results: int = Geometry.max_results

    @field_validator("keys", mode="before")
    @classmethod
    def _read_keys(cls, value: object) -> object:
        items = value if isinstance(value, (list, tuple)) else [value]
        keys = tuple(_key_of(item) for item in items)
        names = [key.name for key in keys]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"key {twice[0]} is named twice")
        if len(keys) > MAX_KEYS:
            raise ValueError(f"{len(keys)} keys, a session has {MAX_KEYS} at most")
        return keys

    @property
    def sessions(self) -> int:
        return self.replicas * self.tensor_parallel

    def geometry(self) -> Geometry:
        """What each worker attaches with, as it is granted.

        Raises:
            PlanError: a size outside its range.
        """
        try:
            return Geometry(
                self.num_blocks,
                self.block_size,
                self.max_num_batched_tokens,
                self.staging_depth,
                self.arena_bytes,
                self.max_results,
            ).checked()
        except BadGeometryError as error:
            text = str(error).replace("staging_capacity_tokens", "max_num_batched_tokens")
            raise PlanError(f"stage {self.name}: {text}.") from error


def _key_of(item: object) -> KeySchema:
    """A key from its text or from a table of name, dtype and shape."""
    if isinstance(item, KeySchema):
        return item.checked()
    if isinstance(item, str):
        return parse_key(item)
    if not isinstance(item, Mapping) or not {"name", "dtype"} <= set(item) <= {"name", "dtype", "shape"}:
        raise ValueError(f'{item!r} is no key: write "NAME:DTYPE:SHAPE", or a table of name, dtype and shape')
    shape = item.get("shape", [])
    if not isinstance(shape, (list, tuple)) or not all(type(size) is int for size in shape):
        raise ValueError(f"key {item['name']}: shape {shape!r} is no list of sizes")
    return KeySchema(str(item["name"]), str(item["dtype"]), tuple(shape)).checked()


@dataclass(frozen=True)
class KeyPlan:
    """Bytes of one key in one session: whole pages, as tmpfs gives them out."""

    schema: KeySchema
    pool_bytes: int
    staging_bytes: int
    table_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.staging_bytes + self.table_bytes


@dataclass(frozen=True)
class StagePlan:
    """Bytes of one session of a stage, and of all of them."""

    spec: StageSpec
    geometry: Geometry
    keys: tuple[KeyPlan, ...]
    slots_bytes: int
    arena_bytes: int
    control_bytes: int

    @property
    def session_bytes(self) -> int:
        own = self.slots_bytes + self.arena_bytes + self.control_bytes
        return own + sum(key.total_bytes for key in self.keys)

    @property
    def locked_bytes(self) -> int:
        """Of one session, what the daemon locks in memory where the limit allows it: the segments of keys."""
        return sum(key.total_bytes for key in self.keys)

    @property
    def pinned_bytes(self) -> int:
        """Of one session, what a worker on a GPU pins for copies: its staging pages."""
        return sum(key.staging_bytes for key in self.keys)

    @property
    def total_bytes(self) -> int:
        return self.session_bytes * self.spec.sessions


@dataclass(frozen=True)
class SharedPlan:
    """Blocks that replicas of a stage share: ``--shared-bytes`` in ``--shared-namespaces`` equal parts.

    total_bytes: of all namespaces together; they come beside the budget of sessions.
    """

    total_bytes: int = 0
    namespaces: int = 1

    @property
    def namespace_bytes(self) -> int:
        return self.total_bytes // self.namespaces

    def blocks(self, stage: StagePlan) -> int:
        """Blocks of a stage that its namespace has room for, but for the rounding of each key's rows to whole pages."""
        block_bytes = stage.geometry.block_size * sum(key.schema.row_bytes for key in stage.keys)
        room = self.namespace_bytes - PAGE * (2 + len(stage.keys))
        return max(room // (block_bytes + SHARED_HEADER_BYTES), 0) if stage.keys else 0


@dataclass(frozen=True)
class DeploymentPlan:
    """Bytes of a node's daemon. All stages given run on that node."""

    stages: tuple[StagePlan, ...]
    shared: SharedPlan = SharedPlan()

    @property
    def sessions(self) -> int:
        return sum(stage.spec.sessions for stage in self.stages)

    @property
    def total_bytes(self) -> int:
        """Shared memory of all sessions, as the daemon's budget counts it: the least ``--memory-budget``."""
        return sum(stage.total_bytes for stage in self.stages)

    @property
    def locked_bytes(self) -> int:
        """The least RLIMIT_MEMLOCK of the daemon with which all of that, and the shared blocks, is locked."""
        return sum(stage.locked_bytes * stage.spec.sessions for stage in self.stages) + self.shared.total_bytes

    @property
    def shm_bytes(self) -> int:
        """The least size of /dev/shm, with ``--memory-budget`` set and nobody else in it."""
        return self.total_bytes + self.shared.total_bytes + self.sessions * DOORBELL_BYTES + LOCK_BYTES

    @property
    def shm_bytes_default_budget(self) -> int:
        """The least size of /dev/shm with the default budget, a share of it."""
        return max(self.shm_bytes, int(self.total_bytes / BUDGET_SHARE) + PAGE)

    @property
    def container_bytes(self) -> int:
        """A memory limit that fits the daemon: shared memory is charged to whom it was given first, the daemon."""
        return self.shm_bytes + (self.total_bytes + self.shared.total_bytes) // PAGE_TABLE_SHARE + PROCESS_BYTES

    def as_dict(self) -> dict[str, Any]:
        """Every number, for JSON."""
        return {
            "sessions": self.sessions,
            "total_bytes": self.total_bytes,
            "locked_bytes": self.locked_bytes,
            "shm_bytes": self.shm_bytes,
            "shm_bytes_default_budget": self.shm_bytes_default_budget,
            "container_bytes": self.container_bytes,
            "shared": {
                "total_bytes": self.shared.total_bytes,
                "namespaces": self.shared.namespaces,
                "namespace_bytes": self.shared.namespace_bytes,
                "blocks": {stage.spec.name: self.shared.blocks(stage) for stage in self.stages},
            },
            "stages": [_stage_dict(stage) for stage in self.stages],
        }


def _stage_dict(stage: StagePlan) -> dict[str, Any]:
    spec, geometry = stage.spec, stage.geometry
    return {
        "name": spec.name,
        "replicas": spec.replicas,
        "tensor_parallel": spec.tensor_parallel,
        "sessions": spec.sessions,
        "num_blocks": geometry.num_blocks,
        "block_size": geometry.block_size,
        "max_num_batched_tokens": geometry.staging_capacity_tokens,
        "staging_depth": geometry.staging_depth,
        "keys": [
            {
                "name": key.schema.name,
                "dtype": key.schema.dtype,
                "shape": list(key.schema.row_shape),
                "row_bytes": key.schema.row_bytes,
                "pool_bytes": key.pool_bytes,
                "staging_bytes": key.staging_bytes,
                "table_bytes": key.table_bytes,
            }
            for key in stage.keys
        ],
        "slots_bytes": stage.slots_bytes,
        "arena_bytes": stage.arena_bytes,
        "control_bytes": stage.control_bytes,
        "session_bytes": stage.session_bytes,
        "pinned_bytes": stage.pinned_bytes,
        "total_bytes": stage.total_bytes,
    }


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB``, ``512M`` or ``1073741824``, as the daemon reads them; 0 is none.

    Raises:
        PlanError: no such size. A share of /dev/shm is none here: its size is what the plan tells.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{text!r} is no size.", remedy="Write 4GiB, 512M or a number of bytes.")
    return int(float(match[1]) * (1 << 10 * " kmgt".index((match[2] or " ").lower())))


def plan_deployment(stages: Sequence[StageSpec], shared: SharedPlan = SharedPlan()) -> DeploymentPlan:
    """What a node with these stages takes.

    Raises:
        PlanError: no stage, a size outside its range, or shared blocks of which a stage's namespace has room for none.
    """
    if not stages:
        raise PlanError("there is no stage to plan.", remedy="Name one with --num-blocks and --key, or give a file.")
    plan = DeploymentPlan(tuple(plan_stage(stage) for stage in stages), shared)
    for stage in plan.stages:
        if shared.total_bytes and stage.keys and not shared.blocks(stage):
            raise PlanError(
                f"stage {stage.spec.name}: a namespace of {shared.namespace_bytes:,} bytes has no room for a block.",
                remedy="Raise --shared-bytes, or lower --shared-namespaces.",
            )
    return plan


def plan_stage(spec: StageSpec) -> StagePlan:
    """What one stage takes.

    Raises:
        PlanError: a size outside its range.
    """
    geometry = spec.geometry()
    keys = tuple(
        KeyPlan(
            schema,
            _pages(pool_bytes(geometry, schema.row_bytes)),
            _pages(staging_bytes(geometry, schema.row_bytes)),
            _pages(table_bytes(geometry)),
        )
        for schema in spec.keys
    )
    control = _pages(ControlLayout.of(geometry).total_bytes)
    return StagePlan(spec, geometry, keys, _pages(table_bytes(geometry)), _pages(geometry.arena_bytes), control)


def read_stages(path: Path) -> list[StageSpec]:
    """The stages of a file: TOML, YAML or JSON by its suffix.

    Raises:
        PlanError: it cannot be read, is of no such form, or has fields that do not fit.
    """
    try:
        found = _parse(path)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}.") from error
    stages = found.get("stages") if isinstance(found, Mapping) and set(found) == {"stages"} else None
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise PlanError(f"{path} has no list of stages.", remedy="Its one entry is `stages`; `stagecache plan --help`.")
    return [stage_of(stage, f"{path}, stage {stage.get('name', number)}") for number, stage in enumerate(stages, 1)]


def _parse(path: Path) -> object:
    """Raises: OSError, PlanError."""
    suffix = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8-sig")
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            return json.loads(text)
        if suffix not in (".yaml", ".yml"):
            raise PlanError(f"{path} is no .toml, .yaml, .yml or .json file.")
        try:
            yaml = import_module("yaml")
        except ImportError:
            raise PlanError(
                f"{path} is YAML, and PyYAML is not installed here.", remedy="Install it, or write TOML."
            ) from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not UTF-8 ({error}).", remedy="Write it as text, in UTF-8.") from error
    except RecursionError as error:
        raise PlanError(f"{path} is nested too deeply to be a list of stages.") from error
    except ValueError as error:
        raise PlanError(f"{path}: {error}.") from error


def stage_of(fields: Mapping[str, Any], where: str) -> StageSpec:
    """A stage from plain values; ``where`` names it in errors.

    Raises:
        PlanError: a field that is missing, unknown or does not fit.
    """
    try:
        return StageSpec.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise PlanError(
            f"{where}: {field}: {str(first['msg']).removeprefix('Value error, ')}.",
            remedy=f"Fields are {', '.join(StageSpec.model_fields)}.",
        ) from error


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE
