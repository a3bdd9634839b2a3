"""What a diffusion stage did: tokens and blocks, counted where they happen."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class DiffusionCounts:
    """Running totals of a stage.

    requests: finished. hashed_blocks: block hashes made. hit_blocks: prefix blocks that were not computed, each row's
    counted. loaded_blocks: brought from the node. failed_loads: requests whose hit could not be brought, and that
    computed everything. saved_blocks: handed to the node. unsaved_requests: whose blocks the node did not take.
    first_step_tokens, later_step_tokens: tokens that the model computed.
    """

    requests: int = 0
    hashed_blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    saved_blocks: int = 0
    unsaved_requests: int = 0
    first_step_tokens: int = 0
    later_step_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Of all steps and rows."""
        return self.first_step_tokens + self.later_step_tokens

    def since(self, earlier: DiffusionCounts) -> DiffusionCounts:
        """The difference to an earlier copy."""
        return DiffusionCounts(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def copy(self) -> DiffusionCounts:
        return DiffusionCounts(*(getattr(self, f.name) for f in fields(self)))
