"""Presence of (slot, key), derived from two words and never flipped, so that doing a record twice is safe (W9).

    slot word    sequence of the last record that wrote the slot, shifted left by 1; bit 0: that step was lost
    claim word   sequence of the last record that claimed the slot for this key, shifted left by 2;
                 bit 0: bytes are in; bit 1: failed

A word of 0 was never written.
"""

from __future__ import annotations

from enum import IntEnum

LOST = 1
SLOT_SHIFT = 1
WRITTEN = 1
FAILED = 2
CLAIM_SHIFT = 2


class Presence(IntEnum):
    """What may be read of a (slot, key)."""

    UNKNOWN = 0
    """Lost, failed, never written, or of an older epoch: an error for every key."""
    ABSENT = 1
    """The slot's tenant did not write this key: reads zeros; for hidden states an error."""
    PENDING = 2
    """Claimed by the tenant, bytes not in yet."""
    PRESENT = 3


def presence_of(slot_word: int, claim_word: int, epoch_sequence: int) -> Presence:
    """The rule itself, for one slot. ``stagecached.keystore.classify`` has it over arrays; a test holds the two equal.

    Args:
        slot_word: the session's word of the slot.
        claim_word: the key's word of the slot.
        epoch_sequence: sequence of the last RESET record; slots not written after it are of an older epoch.
    """
    writer = slot_word >> SLOT_SHIFT
    if slot_word & LOST or writer <= epoch_sequence:
        return Presence.UNKNOWN
    claimer = claim_word >> CLAIM_SHIFT
    if claimer < writer:
        return Presence.ABSENT
    if claim_word & FAILED:
        return Presence.UNKNOWN
    return Presence.PRESENT if claim_word & WRITTEN else Presence.PENDING
