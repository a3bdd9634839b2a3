"""Which stages may have a row cache (docs/semantics.md, G1, G2, G3): one function, one table of reasons.

:func:`check_stage` answers in one of three ways. It returns the stage's :class:`StageFacts` when the cache may be set
up; it returns None when the stage simply has no cache (G1: prefix caching is off, or it pools); it raises
:class:`GateRefusal` when the stage would be given wrong rows, and the text says what to change. A runner of any kind,
GPU, CPU or NPU, V1 or V2, asks here and nowhere else.

The facts are read by name from the engine's configuration objects, so this module needs no engine to be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stagecache.errors import StageCacheError
from stagecache.shim.shared_blocks import shared_blocks_wanted


class GateRefusal(StageCacheError):
    """The stage's settings cannot be served exactly, so the cache refuses to be set up.

    Attributes:
        rule: the rule that refuses, e.g. ``"G3"``.
        found: what was found, without the remedy.
        remedy: what to change.
    """

    def __init__(self, rule: str, found: str, remedy: str) -> None:
        super().__init__(f"stagecache cannot serve this stage ({rule}): {found}.", remedy=remedy)
        self.rule = rule
        self.found = found

    def __reduce__(self) -> tuple[type[GateRefusal], tuple[str, str, str]]:
        return type(self), (self.rule, self.found, self.remedy)


@dataclass(frozen=True)
class StageFacts:
    """What the gates look at. Everything is a plain value; defaults are those of an ordinary stage.

    Attributes:
        prefix_caching: the engine's enable_prefix_caching.
        pooling: the stage pools (it returns embeddings or scores, no tokens).
        v2_runner: the stage runs vLLM's V2 model runner, which this build does not wrap.
        kv_consumer: the stage's KV may come from a connector (kv_consumer or kv_both).
        shared_blocks: node-shared blocks are on for the stage, and the scheduler-side shim cuts what a connector offers
            to what the node has rows of.
        recomputes_failed_loads: KV that could not be loaded is computed in a later step; else its request fails.
        speculative: the method of speculative decoding, None when off.
        block_size: tokens in a block, as the scheduler hashes it.
        prefix_match_unit: tokens in the unit by which prefixes match, None when it is the block.
        kv_groups: class name and block size of each KV cache group's spec; ("full", n) when it is full attention.
        kernel_block_size: tokens in a block of the attention kernel, None when not known yet.
        decode_context_parallel: ranks that share a request's decode KV.
        prefill_context_parallel: ranks that share a request's prefill tokens.
        fast_prefill: kv_sharing_fast_prefill, which skips layers for prompt tokens.
        policy: the scheduler's policy.
        priority_guard: the scheduler-side shim takes back hashes of blocks that policy priority leaves uncomputed.
    """

    prefix_caching: bool = True
    pooling: bool = False
    v2_runner: bool = False
    kv_consumer: bool = False
    shared_blocks: bool = False
    recomputes_failed_loads: bool = False
    speculative: str | None = None
    block_size: int = 16
    prefix_match_unit: int | None = None
    kv_groups: tuple[tuple[str, int], ...] = (("full", 16),)
    kernel_block_size: int | None = None
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    fast_prefill: bool = False
    policy: str = "fcfs"
    priority_guard: bool = False


@dataclass(frozen=True)
class Reason:
    """One row of the table: when it applies, what the text names as found, and what to change.

    A remedy may name ``{kv_block}`` and ``{kernel_block}``, the block sizes in tokens of the KV cache group and of the
    attention kernel.
    """

    rule: str
    applies: Callable[[StageFacts], bool]
    found: Callable[[StageFacts], str]
    remedy: str


_OFF = "or turn prefix caching off for this stage (enable_prefix_caching=False)"

#: Stages without a cache (G1). The names are for logs.
NO_CACHE: tuple[tuple[str, Callable[[StageFacts], bool]], ...] = (
    ("prefix caching is off", lambda f: not f.prefix_caching),
    ("the stage pools", lambda f: f.pooling),
)

#: Stages that are refused, in the order in which they are asked.
REFUSALS: tuple[Reason, ...] = (
    Reason(
        "G3",
        lambda f: f.v2_runner,
        lambda f: "it runs vLLM's V2 model runner, and the shim wraps the V1 runner",
        "Set VLLM_USE_V2_MODEL_RUNNER=0 in the engine's environment",
    ),
    Reason(
        "G2",
        lambda f: f.kv_consumer and not f.shared_blocks,
        lambda f: "its KV may come from a connector (kv_role kv_consumer or kv_both), and a hit on such KV has no rows",
        f"Share blocks on the node (STAGECACHE_SHARED_BLOCKS=1, and a daemon with --shared-bytes), make the stage "
        f"kv_producer, {_OFF}",
    ),
    Reason(
        "G2",
        lambda f: f.kv_consumer and f.recomputes_failed_loads,
        lambda f: "kv_load_failure_policy is recompute: rows of a step whose KV was not loaded were handed out by then",
        f"Set kv_load_failure_policy=fail, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.speculative is not None,
        lambda f: f"speculative decoding is on (method {f.speculative}), so positions change after the forward",
        f"Remove speculative_config, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.prefix_match_unit is not None and f.prefix_match_unit != f.block_size,
        lambda f: f"prefix_match_unit={f.prefix_match_unit} with block_size={f.block_size} lets hits end within blocks",
        f"Unset prefix_match_unit, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: len(f.kv_groups) != 1,
        lambda f: f"it has {len(f.kv_groups)} KV cache groups ({_group_names(f)}), and slots follow exactly one",
        f"Use a model with full attention in every layer, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.kv_groups[0][0] != "full",
        lambda f: f"its KV cache group is {_group_names(f)}, not full attention, so a prefix may lack blocks",
        f"Use a model with full attention in every layer, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.kv_groups[0][1] != f.block_size,
        lambda f: f"the KV cache group has blocks of {f.kv_groups[0][1]} tokens, the scheduler of {f.block_size}",
        "Set --block-size to {kv_block}, " + _OFF,
    ),
    Reason(
        "G3",
        lambda f: f.kernel_block_size is not None and f.kernel_block_size != f.block_size,
        lambda f: f"the attention kernel splits blocks of {f.block_size} tokens into blocks of {f.kernel_block_size}",
        "Set --block-size to {kernel_block}, " + _OFF,
    ),
    Reason(
        "G3",
        lambda f: f.decode_context_parallel != 1,
        lambda f: f"decode context parallelism is on ({f.decode_context_parallel} ranks) and stripes tokens over ranks",
        f"Set decode_context_parallel_size=1, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.prefill_context_parallel != 1,
        lambda f: f"prefill context parallelism is on ({f.prefill_context_parallel} ranks): no rank has all rows",
        f"Set prefill_context_parallel_size=1, {_OFF}",
    ),
    Reason(
        "G3",
        lambda f: f.fast_prefill,
        lambda f: "kv_sharing_fast_prefill skips layers for prompt tokens, so their hidden states are not computed",
        "Set kv_sharing_fast_prefill=False",
    ),
    Reason(
        "G3",
        lambda f: f.policy == "priority" and not f.priority_guard,
        lambda f: "the scheduler policy is priority, which may publish blocks that were never computed",
        f"Set scheduling_policy=fcfs, {_OFF}",
    ),
)


def _group_names(facts: StageFacts) -> str:
    return ", ".join("full attention" if name == "full" else name for name, _ in facts.kv_groups)


def no_cache_reason(facts: StageFacts) -> str | None:
    """Why the stage has no cache at all (G1), None when it may have one."""
    return next((name for name, applies in NO_CACHE if applies(facts)), None)


def check_facts(facts: StageFacts) -> StageFacts | None:
    """Decide on facts already read; result and errors as :func:`check_stage`."""
    if no_cache_reason(facts) is not None:
        return None
    for reason in REFUSALS:
        if reason.applies(facts):
            remedy = reason.remedy.format(
                kv_block=facts.kv_groups[0][1] if facts.kv_groups else 0, kernel_block=facts.kernel_block_size
            )
            raise GateRefusal(reason.rule, reason.found(facts), remedy)
    return facts


def check_stage(
    vllm_config: Any,
    kv_cache_config: Any | None,
    *,
    block_table: Any | None = None,
    v2_runner: bool = False,
) -> StageFacts | None:
    """Decide whether a stage may have a row cache.

    Args:
        vllm_config: the engine's VllmConfig.
        kv_cache_config: its KVCacheConfig; None before the KV cache is laid out (then the groups are not judged).
        block_table: the input batch's block table of the first group, which knows the kernel's block size.
        v2_runner: the caller is vLLM's V2 model runner.

    Returns:
        The stage's facts, or None when the stage has no cache (G1).

    Raises:
        GateRefusal: G2 or G3; the text says what was found and what to change.
    """
    return check_facts(read_facts(vllm_config, kv_cache_config, block_table=block_table, v2_runner=v2_runner))


def read_facts(
    vllm_config: Any,
    kv_cache_config: Any | None,
    *,
    block_table: Any | None = None,
    v2_runner: bool = False,
) -> StageFacts:
    """Read the facts from the engine's objects; arguments as :func:`check_stage`."""
    cache = vllm_config.cache_config
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    speculative = getattr(vllm_config, "speculative_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    block_size = int(cache.block_size or 0)
    groups: tuple[tuple[str, int], ...] = (("full", block_size),)
    if kv_cache_config is not None:
        groups = tuple(_group_fact(group) for group in kv_cache_config.kv_cache_groups)
    kernel_block_size = None
    decode_cp = int(getattr(parallel, "decode_context_parallel_size", 1))
    if block_table is not None:
        kernel_block_size = block_size // int(getattr(block_table, "blocks_per_kv_block", 1))
        decode_cp = max(decode_cp, int(getattr(block_table, "dcp_world_size", 1)))
    policy = str(getattr(vllm_config.scheduler_config, "policy", "fcfs"))
    return StageFacts(
        prefix_caching=bool(cache.enable_prefix_caching),
        pooling=getattr(vllm_config.model_config, "runner_type", "generate") == "pooling",
        v2_runner=v2_runner,
        kv_consumer=bool(getattr(transfer, "is_kv_consumer", False)),
        shared_blocks=shared_blocks_wanted() and _guarded(vllm_config),
        recomputes_failed_loads=getattr(transfer, "kv_load_failure_policy", "fail") == "recompute",
        speculative=None if speculative is None else str(getattr(speculative, "method", "unknown")),
        block_size=block_size,
        prefix_match_unit=getattr(cache, "prefix_match_unit", None),
        kv_groups=groups,
        kernel_block_size=kernel_block_size,
        decode_context_parallel=decode_cp,
        prefill_context_parallel=int(getattr(parallel, "prefill_context_parallel_size", 1)),
        fast_prefill=bool(getattr(cache, "kv_sharing_fast_prefill", False)),
        policy=policy,
        priority_guard=policy == "priority" and _guarded(vllm_config),
    )


def _guarded(vllm_config: Any) -> bool:
    from stagecache.shim.scheduler import guard_active

    return guard_active(vllm_config)


def _group_fact(group: Any) -> tuple[str, int]:
    """Class name ("full" for full attention and what derives from it) and block size in tokens of a KV cache group."""
    spec = group.kv_cache_spec
    full = any(cls.__name__ == "FullAttentionSpec" for cls in type(spec).__mro__)
    return ("full" if full else type(spec).__name__), int(getattr(spec, "block_size", 0))
