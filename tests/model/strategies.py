"""Random sequences: as hypothesis strategies, which shrink, and from a plain seed, for long runs and mutants."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from tests.model.driver import KINDS, Event, Plan
from tests.model.setups import SETUPS

_SETUPS = tuple(number for number, setup in enumerate(SETUPS) for _ in range(2 if setup.reuse else 1))
"""Sessions that are used again are the quicker ones."""

_BYTE = st.integers(0, 255)

events = st.builds(Event, st.sampled_from(KINDS), _BYTE, _BYTE, _BYTE, _BYTE)

_parts = st.lists(events, max_size=16)


def _joined(parts: tuple[list[Event], ...]) -> tuple[Event, ...]:
    return tuple(event for part in parts for event in part)


plans = st.builds(
    Plan,
    st.sampled_from(_SETUPS),
    st.integers(0, 7),
    # Several short lists: one long list is short most of the time, and a situation needs a past.
    st.tuples(_parts, _parts, _parts, _parts).map(_joined),
)


def plan_of(seed: int) -> Plan:
    """The plan of a seed, of the same distribution."""
    rng = Random(seed)
    made = [
        Event(rng.choice(KINDS), rng.randrange(256), rng.randrange(256), rng.randrange(256), rng.randrange(256))
        for _ in range(rng.randint(4, 40))
    ]
    return Plan(rng.choice(_SETUPS), rng.randrange(8), tuple(made))
