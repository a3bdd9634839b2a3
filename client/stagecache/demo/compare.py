"""Holds the rows of the run with the cache against those of the run without, and shows that a wrong row is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stagecache.demo.engine import Recording
from stagecache.demo.workload import DemoRequest

if TYPE_CHECKING:
    import torch

Verdict = Literal["equal", "close", "different", "missing"]

#: Widest float32 model at which the engine's CPU kernels gave the same bits for a row in whatever batch it was
#: computed (measured at 128, 256 and 512; at 1024 an uncached run already differs from another uncached run).
EXACT_HIDDEN = 512

#: Largest absolute difference of a row element that batching alone may make elsewhere. Elements have deviation 1, so
#: a wrong row is off by several units.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


@dataclass(frozen=True)
class Standard:
    """What counts as the same row.

    Attributes:
        exact: rows must be the same bits.
        tolerance: largest absolute difference of an element where they need not be.
    """

    exact: bool
    tolerance: float

    @classmethod
    def of(cls, dtype: str, hidden: int) -> Standard:
        return cls(exact=dtype == "float32" and hidden <= EXACT_HIDDEN, tolerance=TOLERANCE[dtype])

    def judge(self, rows: torch.Tensor, reference: torch.Tensor) -> tuple[Verdict, float]:
        """The verdict on rows [tokens, hidden], and the largest absolute difference of an element."""
        import torch

        if rows.shape != reference.shape or rows.dtype != reference.dtype:
            return "different", float("inf")
        if torch.equal(rows, reference):
            return "equal", 0.0
        difference = float((rows.float() - reference.float()).abs().max())
        return ("close" if not self.exact and difference <= self.tolerance else "different"), difference

    def __str__(self) -> str:
        return "the same bits" if self.exact else f"the same within {self.tolerance:g}"


@dataclass(frozen=True)
class RequestResult:
    """What became of one request.

    Attributes:
        request: the request.
        hit_tokens: prompt tokens that the engine took from its prefix cache.
        from_cache: hidden rows that the row cache gave for them.
        computed: hidden rows that the engine computed.
        verdict: the merged rows against those of the run without prefix caching.
        difference: largest absolute difference of an element.
        control_noticed: the same comparison calls the rows different once they are shifted by one position.
    """

    request: DemoRequest
    hit_tokens: int
    from_cache: int
    computed: int
    verdict: Verdict
    difference: float
    control_noticed: bool

    @property
    def ok(self) -> bool:
        """The rows are right, each hit token has its row, and the control was noticed."""
        return self.verdict in ("equal", "close") and self.from_cache == self.hit_tokens and self.control_noticed


def compare(
    waves: Sequence[Sequence[DemoRequest]], cached: Recording, uncached: Recording, standard: Standard
) -> list[RequestResult]:
    """One result a request, in order of the waves."""
    return [_compare_one(request, cached, uncached, standard) for wave in waves for request in wave]


def _compare_one(request: DemoRequest, cached: Recording, uncached: Recording, standard: Standard) -> RequestResult:
    hit_tokens = cached.hit_tokens.get(request.req_id, 0)
    mine, reference = cached.prompts.get(request.req_id), uncached.prompts.get(request.req_id)
    if mine is None or reference is None or int(mine.hidden.shape[0]) != len(request.tokens):
        return RequestResult(request, hit_tokens, 0, 0, "missing", float("inf"), False)
    verdict, difference = standard.judge(mine.hidden, reference.hidden)
    shifted, _ = standard.judge(mine.hidden.roll(1, dims=0), reference.hidden)
    return RequestResult(
        request=request,
        hit_tokens=hit_tokens,
        from_cache=mine.from_cache,
        computed=len(request.tokens) - mine.from_cache,
        verdict=verdict,
        difference=difference,
        control_noticed=shifted == "different",
    )
