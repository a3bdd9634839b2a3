"""Errors of content identity, which both sides make hashes by. The block index's own derive from the same base."""

from __future__ import annotations


class BlockIndexError(Exception):
    """Base of every error that content identity and the block index raise on purpose."""


class UnsupportedHash(BlockIndexError):
    """A hash algorithm, or a hash of a form, in which the index does not work."""


class UnsupportedKey(BlockIndexError):
    """A token id or an extra key that has no encoding here."""
