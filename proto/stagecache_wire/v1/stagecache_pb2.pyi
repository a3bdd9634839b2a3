from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_ABI_MISMATCH: _ClassVar[Reason]
    REASON_UNAUTHENTICATED: _ClassVar[Reason]
    REASON_UNKNOWN_SESSION: _ClassVar[Reason]
    REASON_WORKER_LOCK_FREE: _ClassVar[Reason]
    REASON_BAD_GEOMETRY: _ClassVar[Reason]
    REASON_BUDGET_EXCEEDED: _ClassVar[Reason]
    REASON_SHM_FULL: _ClassVar[Reason]
    REASON_SCHEMA_MISMATCH: _ClassVar[Reason]
    REASON_UNKNOWN_KEY: _ClassVar[Reason]
    REASON_OUT_OF_RANGE: _ClassVar[Reason]
    REASON_SESSION_FAILED: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_NO_SCHEDULER_SHIM: _ClassVar[Reason]
    REASON_SHUTTING_DOWN: _ClassVar[Reason]
    REASON_TOO_MANY: _ClassVar[Reason]
    REASON_UNKNOWN_STAGE: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_ABI_MISMATCH: Reason
REASON_UNAUTHENTICATED: Reason
REASON_UNKNOWN_SESSION: Reason
REASON_WORKER_LOCK_FREE: Reason
REASON_BAD_GEOMETRY: Reason
REASON_BUDGET_EXCEEDED: Reason
REASON_SHM_FULL: Reason
REASON_SCHEMA_MISMATCH: Reason
REASON_UNKNOWN_KEY: Reason
REASON_OUT_OF_RANGE: Reason
REASON_SESSION_FAILED: Reason
REASON_DEADLINE: Reason
REASON_NO_SCHEDULER_SHIM: Reason
REASON_SHUTTING_DOWN: Reason
REASON_TOO_MANY: Reason
REASON_UNKNOWN_STAGE: Reason
REASON_INTERNAL: Reason

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "remedy", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: Reason
    message: str
    remedy: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("num_blocks", "block_size", "staging_capacity_tokens", "staging_depth", "arena_bytes", "max_results")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STAGING_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGING_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESULTS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    staging_capacity_tokens: int
    staging_depth: int
    arena_bytes: int
    max_results: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., staging_capacity_tokens: _Optional[int] = ..., staging_depth: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., max_results: _Optional[int] = ...) -> None: ...

class KeySchema(_message.Message):
    __slots__ = ("name", "dtype", "row_shape", "row_bytes", "provisional")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_SHAPE_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    row_shape: _containers.RepeatedScalarFieldContainer[int]
    row_bytes: int
    provisional: bool
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., row_shape: _Optional[_Iterable[int]] = ..., row_bytes: _Optional[int] = ..., provisional: _Optional[bool] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("abi", "model", "stage", "pid", "geometry", "keys", "open_remembered_keys", "rank")
    ABI_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REMEMBERED_KEYS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    abi: int
    model: str
    stage: str
    pid: int
    geometry: Geometry
    keys: _containers.RepeatedCompositeFieldContainer[KeySchema]
    open_remembered_keys: bool
    rank: int
    def __init__(self, abi: _Optional[int] = ..., model: _Optional[str] = ..., stage: _Optional[str] = ..., pid: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeySchema, _Mapping]]] = ..., open_remembered_keys: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("boot_id", "geometry", "control_segment", "arena_segment", "daemon_doorbell", "worker_doorbell", "keys", "epoch")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    CONTROL_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ARENA_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    DAEMON_DOORBELL_FIELD_NUMBER: _ClassVar[int]
    WORKER_DOORBELL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    geometry: Geometry
    control_segment: str
    arena_segment: str
    daemon_doorbell: str
    worker_doorbell: str
    keys: _containers.RepeatedCompositeFieldContainer[OpenKeyResponse]
    epoch: int
    def __init__(self, boot_id: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., control_segment: _Optional[str] = ..., arena_segment: _Optional[str] = ..., daemon_doorbell: _Optional[str] = ..., worker_doorbell: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[OpenKeyResponse, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenKeyRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: KeySchema
    def __init__(self, key: _Optional[_Union[KeySchema, _Mapping]] = ...) -> None: ...

class OpenKeyResponse(_message.Message):
    __slots__ = ("key_id", "key", "staging_segment")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STAGING_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    key_id: int
    key: KeySchema
    staging_segment: str
    def __init__(self, key_id: _Optional[int] = ..., key: _Optional[_Union[KeySchema, _Mapping]] = ..., staging_segment: _Optional[str] = ...) -> None: ...

class MergeRequest(_message.Message):
    __slots__ = ("sequence", "results")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    results: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., results: _Optional[_Iterable[int]] = ...) -> None: ...

class MergeResponse(_message.Message):
    __slots__ = ("consumed", "sequences", "rows", "unknown", "absent", "first_missing")
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_FIELD_NUMBER: _ClassVar[int]
    consumed: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    absent: _containers.RepeatedScalarFieldContainer[int]
    first_missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, consumed: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., unknown: _Optional[_Iterable[int]] = ..., absent: _Optional[_Iterable[int]] = ..., first_missing: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("block_ids", "span_tokens", "key_ids")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    span_tokens: _containers.RepeatedScalarFieldContainer[int]
    key_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., span_tokens: _Optional[_Iterable[int]] = ..., key_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("key_ids", "readable", "first_missing_slot", "pending", "absent", "unknown", "consumed")
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_SLOT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    key_ids: _containers.RepeatedScalarFieldContainer[int]
    readable: _containers.RepeatedScalarFieldContainer[int]
    first_missing_slot: _containers.RepeatedScalarFieldContainer[int]
    pending: _containers.RepeatedScalarFieldContainer[int]
    absent: _containers.RepeatedScalarFieldContainer[int]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    consumed: int
    def __init__(self, key_ids: _Optional[_Iterable[int]] = ..., readable: _Optional[_Iterable[int]] = ..., first_missing_slot: _Optional[_Iterable[int]] = ..., pending: _Optional[_Iterable[int]] = ..., absent: _Optional[_Iterable[int]] = ..., unknown: _Optional[_Iterable[int]] = ..., consumed: _Optional[int] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("stage", "force", "cause")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    force: bool
    cause: str
    def __init__(self, stage: _Optional[str] = ..., force: _Optional[bool] = ..., cause: _Optional[str] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("sessions", "schedulers")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    schedulers: int
    def __init__(self, sessions: _Optional[int] = ..., schedulers: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeyStats(_message.Message):
    __slots__ = ("key", "key_id", "pool_bytes", "staging_bytes", "rows_scattered", "rows_gathered", "present_slots", "locked")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_SCATTERED_FIELD_NUMBER: _ClassVar[int]
    ROWS_GATHERED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    key: KeySchema
    key_id: int
    pool_bytes: int
    staging_bytes: int
    rows_scattered: int
    rows_gathered: int
    present_slots: int
    locked: bool
    def __init__(self, key: _Optional[_Union[KeySchema, _Mapping]] = ..., key_id: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., rows_scattered: _Optional[int] = ..., rows_gathered: _Optional[int] = ..., present_slots: _Optional[int] = ..., locked: _Optional[bool] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "model", "stage", "pid", "rank", "geometry", "keys", "head", "consumed", "epoch", "steps", "bytes", "state", "failure", "hits", "hit_rows", "unknown_rows", "adopted", "attached_unix_s", "pinned_bytes", "unpinned_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HIT_ROWS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ROWS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNPINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    stage: str
    pid: int
    rank: int
    geometry: Geometry
    keys: _containers.RepeatedCompositeFieldContainer[KeyStats]
    head: int
    consumed: int
    epoch: int
    steps: int
    bytes: int
    state: str
    failure: str
    hits: int
    hit_rows: int
    unknown_rows: int
    adopted: bool
    attached_unix_s: float
    pinned_bytes: int
    unpinned_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., stage: _Optional[str] = ..., pid: _Optional[int] = ..., rank: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeyStats, _Mapping]]] = ..., head: _Optional[int] = ..., consumed: _Optional[int] = ..., epoch: _Optional[int] = ..., steps: _Optional[int] = ..., bytes: _Optional[int] = ..., state: _Optional[str] = ..., failure: _Optional[str] = ..., hits: _Optional[int] = ..., hit_rows: _Optional[int] = ..., unknown_rows: _Optional[int] = ..., adopted: _Optional[bool] = ..., attached_unix_s: _Optional[float] = ..., pinned_bytes: _Optional[int] = ..., unpinned_bytes: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "boot_id", "budget_bytes", "budget_used_bytes", "sessions", "uptime_s", "resident_bytes", "schedulers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: int
    budget_bytes: int
    budget_used_bytes: int
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    uptime_s: float
    resident_bytes: int
    schedulers: int
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., budget_used_bytes: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., schedulers: _Optional[int] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("kind", "boot_id", "cause", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[WatchEvent.Kind]
        KIND_HELLO: _ClassVar[WatchEvent.Kind]
        KIND_RESET: _ClassVar[WatchEvent.Kind]
        KIND_FAILED: _ClassVar[WatchEvent.Kind]
        KIND_SHUTDOWN: _ClassVar[WatchEvent.Kind]
    KIND_UNSPECIFIED: WatchEvent.Kind
    KIND_HELLO: WatchEvent.Kind
    KIND_RESET: WatchEvent.Kind
    KIND_FAILED: WatchEvent.Kind
    KIND_SHUTDOWN: WatchEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: WatchEvent.Kind
    boot_id: int
    cause: str
    reason: Reason
    def __init__(self, kind: _Optional[_Union[WatchEvent.Kind, str]] = ..., boot_id: _Optional[int] = ..., cause: _Optional[str] = ..., reason: _Optional[_Union[Reason, str]] = ...) -> None: ...
