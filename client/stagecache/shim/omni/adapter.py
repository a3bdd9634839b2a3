"""vLLM-Omni 0.32.0rc1: the scheduler adapter that a hooked runner uses instead of vLLM-Omni's.

It hands over what the cache needs as it is: the scheduler output on the step, and the group view as the write layout.
Nothing is translated on the engine thread, and nothing is lost that 0.32.0rc1's step leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SidecarStep:
    """A ``PrefixCacheStep`` by its fields, with the scheduler output behind it."""

    scheduler_output: Any
    scheduled_tokens: tuple[tuple[str, int], ...] = ()
    events: tuple[Any, ...] = ()
    extended_req_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SidecarWriteLayout:
    """A write layout that names the batch instead of copying its slots."""

    group_view: Any
    writes: tuple[Any, ...] = ()
    total_rows: int = 0
    slots_cpu: Any = None


class SidecarSchedulerAdapter:
    """Takes the place of ``PrefixCacheSchedulerAdapter``."""

    def translate_step(self, scheduler_output: Any) -> SidecarStep:
        """The step of a scheduler output."""
        return SidecarStep(scheduler_output)

    def build_write_layout(self, group_view: Any, *, num_scheduled_tokens: Mapping[str, int]) -> SidecarWriteLayout:
        """The layout of the live batch; the counts are the scheduler output's."""
        return SidecarWriteLayout(group_view)
