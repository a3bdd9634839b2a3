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
    REASON_UNSUPPORTED_HASH: _ClassVar[Reason]
    REASON_UNKNOWN_NAMESPACE: _ClassVar[Reason]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_HIT: _ClassVar[BlockState]
    BLOCK_STATE_PENDING: _ClassVar[BlockState]
    BLOCK_STATE_MISS: _ClassVar[BlockState]

class PrefixEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_END_UNSPECIFIED: _ClassVar[PrefixEnd]
    PREFIX_END_WHOLE: _ClassVar[PrefixEnd]
    PREFIX_END_NOT_STORED: _ClassVar[PrefixEnd]
    PREFIX_END_EVICTED: _ClassVar[PrefixEnd]
    PREFIX_END_RESET: _ClassVar[PrefixEnd]
    PREFIX_END_BEING_COPIED: _ClassVar[PrefixEnd]
    PREFIX_END_PARTIAL_BLOCK: _ClassVar[PrefixEnd]
    PREFIX_END_NOT_JOINED: _ClassVar[PrefixEnd]
    PREFIX_END_OFF: _ClassVar[PrefixEnd]

class PublishState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUBLISH_STATE_UNSPECIFIED: _ClassVar[PublishState]
    PUBLISH_STATE_STORED: _ClassVar[PublishState]
    PUBLISH_STATE_KNOWN: _ClassVar[PublishState]
    PUBLISH_STATE_NOT_PRESENT: _ClassVar[PublishState]
    PUBLISH_STATE_NO_ROOM: _ClassVar[PublishState]
    PUBLISH_STATE_CHANGED: _ClassVar[PublishState]
    PUBLISH_STATE_NOT_JOINED: _ClassVar[PublishState]
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
REASON_UNSUPPORTED_HASH: Reason
REASON_UNKNOWN_NAMESPACE: Reason
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_HIT: BlockState
BLOCK_STATE_PENDING: BlockState
BLOCK_STATE_MISS: BlockState
PREFIX_END_UNSPECIFIED: PrefixEnd
PREFIX_END_WHOLE: PrefixEnd
PREFIX_END_NOT_STORED: PrefixEnd
PREFIX_END_EVICTED: PrefixEnd
PREFIX_END_RESET: PrefixEnd
PREFIX_END_BEING_COPIED: PrefixEnd
PREFIX_END_PARTIAL_BLOCK: PrefixEnd
PREFIX_END_NOT_JOINED: PrefixEnd
PREFIX_END_OFF: PrefixEnd
PUBLISH_STATE_UNSPECIFIED: PublishState
PUBLISH_STATE_STORED: PublishState
PUBLISH_STATE_KNOWN: PublishState
PUBLISH_STATE_NOT_PRESENT: PublishState
PUBLISH_STATE_NO_ROOM: PublishState
PUBLISH_STATE_CHANGED: PublishState
PUBLISH_STATE_NOT_JOINED: PublishState

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
    __slots__ = ("abi", "model", "stage", "pid", "geometry", "keys", "open_remembered_keys", "rank", "engine")
    ABI_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REMEMBERED_KEYS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    abi: int
    model: str
    stage: str
    pid: int
    geometry: Geometry
    keys: _containers.RepeatedCompositeFieldContainer[KeySchema]
    open_remembered_keys: bool
    rank: int
    engine: str
    def __init__(self, abi: _Optional[int] = ..., model: _Optional[str] = ..., stage: _Optional[str] = ..., pid: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeySchema, _Mapping]]] = ..., open_remembered_keys: _Optional[bool] = ..., rank: _Optional[int] = ..., engine: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("key", "key_id", "pool_bytes", "staging_bytes", "rows_scattered", "rows_gathered", "present_slots", "locked", "lockable_bytes", "locked_bytes", "unlocked_why")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_SCATTERED_FIELD_NUMBER: _ClassVar[int]
    ROWS_GATHERED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    LOCKABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNLOCKED_WHY_FIELD_NUMBER: _ClassVar[int]
    key: KeySchema
    key_id: int
    pool_bytes: int
    staging_bytes: int
    rows_scattered: int
    rows_gathered: int
    present_slots: int
    locked: bool
    lockable_bytes: int
    locked_bytes: int
    unlocked_why: str
    def __init__(self, key: _Optional[_Union[KeySchema, _Mapping]] = ..., key_id: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., rows_scattered: _Optional[int] = ..., rows_gathered: _Optional[int] = ..., present_slots: _Optional[int] = ..., locked: _Optional[bool] = ..., lockable_bytes: _Optional[int] = ..., locked_bytes: _Optional[int] = ..., unlocked_why: _Optional[str] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "model", "stage", "pid", "rank", "geometry", "keys", "head", "consumed", "epoch", "steps", "bytes", "state", "failure", "hits", "hit_rows", "unknown_rows", "adopted", "attached_unix_s", "pinned_bytes", "unpinned_bytes", "engine", "namespace_id", "generation")
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
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
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
    engine: str
    namespace_id: str
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., stage: _Optional[str] = ..., pid: _Optional[int] = ..., rank: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeyStats, _Mapping]]] = ..., head: _Optional[int] = ..., consumed: _Optional[int] = ..., epoch: _Optional[int] = ..., steps: _Optional[int] = ..., bytes: _Optional[int] = ..., state: _Optional[str] = ..., failure: _Optional[str] = ..., hits: _Optional[int] = ..., hit_rows: _Optional[int] = ..., unknown_rows: _Optional[int] = ..., adopted: _Optional[bool] = ..., attached_unix_s: _Optional[float] = ..., pinned_bytes: _Optional[int] = ..., unpinned_bytes: _Optional[int] = ..., engine: _Optional[str] = ..., namespace_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "stage", "model_fingerprint", "hash_algorithm", "hash_seed", "dtype", "block_size", "tensor_parallel_size", "keys", "bytes", "block_bytes", "num_blocks", "held", "cached", "free", "generation", "members", "leases", "lookup_hashes", "hit_hashes", "published", "known", "skipped", "filled", "evictions", "created_unix_s", "used_unix_s", "oldest_s", "locked")
    class SkippedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HASHES_FIELD_NUMBER: _ClassVar[int]
    HIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    USED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    stage: str
    model_fingerprint: str
    hash_algorithm: str
    hash_seed: str
    dtype: str
    block_size: int
    tensor_parallel_size: int
    keys: _containers.RepeatedCompositeFieldContainer[KeySchema]
    bytes: int
    block_bytes: int
    num_blocks: int
    held: int
    cached: int
    free: int
    generation: int
    members: int
    leases: int
    lookup_hashes: int
    hit_hashes: int
    published: int
    known: int
    skipped: _containers.ScalarMap[str, int]
    filled: int
    evictions: _containers.ScalarMap[str, int]
    created_unix_s: float
    used_unix_s: float
    oldest_s: float
    locked: bool
    def __init__(self, namespace_id: _Optional[str] = ..., stage: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[KeySchema, _Mapping]]] = ..., bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., held: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ..., generation: _Optional[int] = ..., members: _Optional[int] = ..., leases: _Optional[int] = ..., lookup_hashes: _Optional[int] = ..., hit_hashes: _Optional[int] = ..., published: _Optional[int] = ..., known: _Optional[int] = ..., skipped: _Optional[_Mapping[str, int]] = ..., filled: _Optional[int] = ..., evictions: _Optional[_Mapping[str, int]] = ..., created_unix_s: _Optional[float] = ..., used_unix_s: _Optional[float] = ..., oldest_s: _Optional[float] = ..., locked: _Optional[bool] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "boot_id", "budget_bytes", "budget_used_bytes", "sessions", "uptime_s", "resident_bytes", "schedulers", "namespaces", "shared_limit_bytes", "shared_used_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SHARED_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: int
    budget_bytes: int
    budget_used_bytes: int
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    uptime_s: float
    resident_bytes: int
    schedulers: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    shared_limit_bytes: int
    shared_used_bytes: int
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., budget_used_bytes: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., schedulers: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., shared_limit_bytes: _Optional[int] = ..., shared_used_bytes: _Optional[int] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("stage", "engine")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    engine: str
    def __init__(self, stage: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

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

class JoinNamespaceRequest(_message.Message):
    __slots__ = ("model_fingerprint", "hash_algorithm", "hash_seed", "dtype", "tensor_parallel_size", "key_ids", "sequence")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    hash_algorithm: str
    hash_seed: str
    dtype: str
    tensor_parallel_size: int
    key_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., key_ids: _Optional[_Iterable[int]] = ..., sequence: _Optional[int] = ...) -> None: ...

class JoinNamespaceResponse(_message.Message):
    __slots__ = ("on", "why", "namespace_id", "num_blocks", "block_bytes", "generation", "cached_blocks")
    ON_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    on: bool
    why: str
    namespace_id: str
    num_blocks: int
    block_bytes: int
    generation: int
    cached_blocks: int
    def __init__(self, on: _Optional[bool] = ..., why: _Optional[str] = ..., namespace_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class NamespaceRef(_message.Message):
    __slots__ = ("namespace_id", "stage", "engine")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    stage: str
    engine: str
    def __init__(self, namespace_id: _Optional[str] = ..., stage: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class SpanIdentity(_message.Message):
    __slots__ = ("lora_name", "cache_salt", "mm_identifiers", "mm_offsets", "mm_lengths", "embeds_digests")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MM_IDENTIFIERS_FIELD_NUMBER: _ClassVar[int]
    MM_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MM_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    cache_salt: str
    mm_identifiers: _containers.RepeatedScalarFieldContainer[str]
    mm_offsets: _containers.RepeatedScalarFieldContainer[int]
    mm_lengths: _containers.RepeatedScalarFieldContainer[int]
    embeds_digests: bytes
    def __init__(self, lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., mm_identifiers: _Optional[_Iterable[str]] = ..., mm_offsets: _Optional[_Iterable[int]] = ..., mm_lengths: _Optional[_Iterable[int]] = ..., embeds_digests: _Optional[bytes] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("namespace", "hashes", "span_blocks", "token_ids", "span_tokens", "identities", "per_key")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SPAN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    PER_KEY_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    hashes: bytes
    span_blocks: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    span_tokens: _containers.RepeatedScalarFieldContainer[int]
    identities: _containers.RepeatedCompositeFieldContainer[SpanIdentity]
    per_key: bool
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., hashes: _Optional[bytes] = ..., span_blocks: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., span_tokens: _Optional[_Iterable[int]] = ..., identities: _Optional[_Iterable[_Union[SpanIdentity, _Mapping]]] = ..., per_key: _Optional[bool] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("namespace_id", "block_size", "generation", "hit_blocks", "hit_tokens", "states", "ends", "key_names", "key_states", "hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMES_FIELD_NUMBER: _ClassVar[int]
    KEY_STATES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    block_size: int
    generation: int
    hit_blocks: _containers.RepeatedScalarFieldContainer[int]
    hit_tokens: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedScalarFieldContainer[BlockState]
    ends: _containers.RepeatedScalarFieldContainer[PrefixEnd]
    key_names: _containers.RepeatedScalarFieldContainer[str]
    key_states: _containers.RepeatedScalarFieldContainer[BlockState]
    hashes: bytes
    def __init__(self, namespace_id: _Optional[str] = ..., block_size: _Optional[int] = ..., generation: _Optional[int] = ..., hit_blocks: _Optional[_Iterable[int]] = ..., hit_tokens: _Optional[_Iterable[int]] = ..., states: _Optional[_Iterable[_Union[BlockState, str]]] = ..., ends: _Optional[_Iterable[_Union[PrefixEnd, str]]] = ..., key_names: _Optional[_Iterable[str]] = ..., key_states: _Optional[_Iterable[_Union[BlockState, str]]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class AcquireBlocksRequest(_message.Message):
    __slots__ = ("namespace", "request_ids", "hashes", "span_blocks", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SPAN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRef
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    hashes: bytes
    span_blocks: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    def __init__(self, namespace: _Optional[_Union[NamespaceRef, _Mapping]] = ..., request_ids: _Optional[_Iterable[str]] = ..., hashes: _Optional[bytes] = ..., span_blocks: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ...) -> None: ...

class AcquireBlocksResponse(_message.Message):
    __slots__ = ("namespace_id", "generation", "held", "boot_id", "why_none")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_NONE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    generation: int
    held: _containers.RepeatedScalarFieldContainer[int]
    boot_id: int
    why_none: PrefixEnd
    def __init__(self, namespace_id: _Optional[str] = ..., generation: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., boot_id: _Optional[int] = ..., why_none: _Optional[_Union[PrefixEnd, str]] = ...) -> None: ...

class ReleaseBlocksRequest(_message.Message):
    __slots__ = ("request_ids", "all")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class ReleaseBlocksResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class PublishBlocksRequest(_message.Message):
    __slots__ = ("sequence", "block_ids", "hashes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    def __init__(self, sequence: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PublishBlocksResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[PublishState]
    def __init__(self, states: _Optional[_Iterable[_Union[PublishState, str]]] = ...) -> None: ...
