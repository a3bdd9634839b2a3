"""A consumer that takes every row, and knows afterwards whether each position came once and with the right bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagecache.shim.steps import StepRows, external_id

if TYPE_CHECKING:
    import torch


@dataclass
class Seen:
    """Of one request: positions [0, end) came, in order, unless ``gaps`` counts steps that did not go on at ``end``.

    computed, from_cache: rows by where they came from, prompt and output. first: the rows of its first step
    [rows, hidden_size], which hold the prefix.
    """

    end: int = 0
    gaps: int = 0
    computed: int = 0
    from_cache: int = 0
    first: torch.Tensor | None = None


class RowsSeen:
    """What each request got. ``keep``: hold the rows of first steps, until ``forget``."""

    def __init__(self, *, keep: bool = False) -> None:
        self.by_name: dict[str, Seen] = {}
        self.keep = keep

    def __call__(self, rows: StepRows) -> None:
        for req_id in rows.req_ids:
            taken = rows.hidden[req_id]
            seen = self.by_name.setdefault(external_id(req_id), Seen())
            seen.gaps += rows.first_position(req_id) != seen.end
            if self.keep and seen.end == 0:
                seen.first = taken
            seen.end = rows.end_position(req_id)
            seen.computed += rows.num_scheduled[req_id]
            seen.from_cache += rows.rows_from_cache(req_id)

    def forget(self, name: str) -> Seen:
        """What a request got, which is no longer kept."""
        return self.by_name.pop(name, Seen())


def complete(seen: Seen, prompt: int, output: int, hit: int) -> bool:
    """Whether a request that ran to its end got every row: its prompt's, and all of its output's but the last token's.

    prompt, output: its tokens. hit: prompt tokens that the engine did not compute.
    """
    positions = prompt + output - 1
    return seen.gaps == 0 and seen.end == positions and seen.from_cache == hit and seen.computed == positions - hit


def equal_prefix(rows: torch.Tensor, wanted: torch.Tensor, hit: int) -> bool:
    """Whether the first ``hit`` of ``rows`` are ``wanted``'s, bit for bit; both [rows or more, hidden_size].

    Raises:
        ValueError: rows shifted by one would pass as well, so the comparison would say nothing.
    """
    import torch

    if hit > 1 and torch.equal(wanted[1:hit], wanted[: hit - 1]):
        raise ValueError("the model's rows do not depend on the position: rows at a wrong one could not be told")
    return bool(torch.equal(rows[:hit], wanted[:hit]))
