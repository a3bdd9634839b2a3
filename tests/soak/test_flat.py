"""The criterion of the soak: it passes what is flat however noisy, and catches what grows however slowly."""

from __future__ import annotations

from random import Random

import pytest

from tests.soak.flat import trend

MIB = 1 << 20
TIMES = [float(second) for second in range(1800)]
NOISE = Random(1)


def noisy(level: float, spread: float = 4 * MIB) -> float:
    return level + NOISE.uniform(-spread, spread)


FLAT = {
    "constant": [80.0 * MIB for _ in TIMES],
    "noise": [noisy(80 * MIB) for _ in TIMES],
    "saw tooth": [80 * MIB + at % 60 / 60 * 16 * MIB for at in TIMES],
    "sessions that come and go": [80 * MIB + (64 * MIB if NOISE.random() < 0.3 else 0) for _ in TIMES],
    "a warm-up that ends": [80 * MIB - 40 * MIB * max(0.0, 1 - at / 400) for at in TIMES],
    "one spike": [80 * MIB + (900 * MIB if 1200 < at < 1230 else 0) for at in TIMES],
    "shrinking": [80 * MIB - at * 4096 for at in TIMES],
}

GROWING = {
    "a leak of 2 KiB a second": [80 * MIB + 2048 * at for at in TIMES],
    "a leak under noise": [noisy(80 * MIB, 1 * MIB) + 2048 * at for at in TIMES],
    "a leak under a saw tooth": [80 * MIB + at % 60 / 60 * 16 * MIB + 2048 * at for at in TIMES],
    "a step late in the run": [80 * MIB + (3 * MIB if at > 1400 else 0) for at in TIMES],
    "a leak that began late": [80 * MIB + max(0.0, at - 1000) * 8192 for at in TIMES],
}


@pytest.mark.parametrize("name", FLAT)
def test_what_stays_is_flat(name: str) -> None:
    assert trend(TIMES, FLAT[name]).is_flat(MIB)


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_caught(name: str) -> None:
    assert not trend(TIMES, GROWING[name]).is_flat(MIB)


def test_a_descriptor_lost_every_ten_minutes_is_caught() -> None:
    assert not trend(TIMES, [40.0 + at // 400 for at in TIMES]).is_flat(2)
    assert trend(TIMES, [40.0 + NOISE.randrange(8) for _ in TIMES]).is_flat(2)


@pytest.mark.parametrize("count", [0, 1, 12, 20])
def test_too_few_samples_say_nothing(count: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        trend(TIMES[:count], [1.0] * count)
