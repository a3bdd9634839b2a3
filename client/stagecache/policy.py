"""What a model wants cached, decided once at load_model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HIDDEN_KEY = "__hidden_states__"
"""Reserved key of the hidden states; multimodal keys are flat dotted names."""

KeyRole = Literal["token", "global"]
"""token: one row a token. global: the same value for all requests, never cut (K2)."""


@dataclass(frozen=True)
class ModelCachePolicy:
    """How a model's outputs are treated (K2, K5).

    needs_full_hidden_states: False where the model needs only this step's hidden rows; they are then neither saved
        nor merged.
    deferred_keys: keys whose rows stay on the device until finish, abort, preemption or the byte budget (W3).
    key_roles: declared roles by key; a declared role beats the shape.
    span_keys: keys that are handed out for a hit also by a step that brings no rows of them, as hidden states are (H7).
    """

    needs_full_hidden_states: bool = True
    deferred_keys: frozenset[str] = frozenset()
    key_roles: Mapping[str, KeyRole] = field(default_factory=dict)
    span_keys: frozenset[str] = frozenset()

    @classmethod
    def from_model(cls, model: Any) -> ModelCachePolicy:
        """Read the attributes that vLLM-Omni's models carry; a model without them gets the defaults."""
        return cls(
            needs_full_hidden_states=bool(getattr(model, "requires_full_prefix_cached_hidden_states", True)),
            deferred_keys=frozenset(getattr(model, "deferred_prefix_cache_mm_keys", ()) or ()),
            key_roles=dict(getattr(model, "prefix_cache_key_roles", {}) or {}),
        )
