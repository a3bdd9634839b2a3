"""The diffusion bench: its workloads are what they are called, and its verdicts tell noise from cost."""

from __future__ import annotations

import numpy as np
import pytest

from bench.diffusion.__main__ import AGAIN, PAGED, PREFIX, verdicts
from bench.diffusion.measure import Figures
from bench.diffusion.workloads import BLOCK_SIZE, GUIDANCE, MEASURED, MODEL, SEED, STEPS, WARM_UPS, WORKLOADS
from examples.small_dit import ImageRequest, SmallDiT, SmallDiTHook
from examples.small_dit.layout import lay_out
from stagecache.diffusion.identity import hash_prefix


@pytest.fixture(scope="module")
def hook() -> SmallDiTHook:
    return SmallDiTHook(SmallDiT(MODEL))


def shared(hook: SmallDiTHook, one: ImageRequest, other: ImageRequest) -> int:
    """Leading blocks of the row with the prompt that two requests share."""
    first, second = (hash_prefix(hook.identify(request)[0], "m", BLOCK_SIZE) for request in (one, other))
    return sum(a == b for a, b in zip(first, second, strict=True))


def test_workloads_share_what_they_are_called_for(hook: SmallDiTHook) -> None:
    for workload in WORKLOADS:
        requests = [request for turn in range(2) for request in workload.requests(turn)]
        assert len(requests) == 2 * (WARM_UPS + MEASURED)
        assert {(r.guidance, r.steps, r.seed, r.vae_seed) for r in requests} == {(GUIDANCE, STEPS, SEED, SEED)}
        row = lay_out(requests[0], MODEL)[0]
        expected = {
            "full prefix": row.prefix_len // BLOCK_SIZE,
            "same image": row.spans[0].end // BLOCK_SIZE,
            "distinct prompts": 0,
        }[workload.name]
        assert shared(hook, requests[0], requests[1]) == expected
        assert shared(hook, requests[0], requests[-1]) == 0, "another round begins cold"


@pytest.mark.parametrize(
    ("cost", "spread", "own", "found"),
    [
        (1.005, 0.001, 0.008, ["ok", "ok"]),
        (1.05, 0.001, 0.04, ["MISSED", "MISSED"]),
        (1.05, 0.3, 0.008, ["undecided", "ok"]),
        (0.99, 0.3, 0.008, ["undecided", "ok"]),
    ],
)
def test_a_verdict_is_given_where_noise_allows_one(cost: float, spread: float, own: float, found: list[str]) -> None:
    noise = 1 + spread * np.random.default_rng(0).uniform(-1, 1, 64)
    paged = Figures(cpu_s=[1.0] * 64)
    modes = {
        PAGED: paged,
        AGAIN: Figures(cpu_s=list(noise)),
        PREFIX: Figures(cpu_s=list(cost * noise), own_cpu_s=[own] * 64),
    }
    assert [met for _, met in verdicts({"distinct prompts": modes})] == found


def test_a_full_prefix_that_is_not_faster_is_missed() -> None:
    for share, expected in ((0.7, "ok"), (1.001, "MISSED")):
        modes = {PAGED: Figures(cpu_s=[1.0] * 8), PREFIX: Figures(cpu_s=[share] * 8)}
        assert [met for _, met in verdicts({"full prefix": modes})] == [expected]
