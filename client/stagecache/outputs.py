"""What materialize hands out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StageCacheOutputs(NamedTuple):
    """Merged outputs of one step.

    hidden_states: by request, [rows, *row_shape]; None when the policy does not want them.
    mm_outputs: by key, by request: per-token rows merged with the hit's, or the leftover value.
    """

    hidden_states: dict[str, torch.Tensor] | None
    mm_outputs: dict[str, dict[str, Any]]
