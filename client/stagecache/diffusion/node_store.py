"""Prefix blocks in the node's daemon: a session whose keys are the KV of each layer.

The session is a window, not a mirror: its few blocks are where prefix blocks stand on their way. The log orders what
happens to them, so a block may be written again as soon as the record before is appended:

    save     SAVE (rows of all layers) | PUBLISH (block, hash)     and nothing is waited for
    load     FILL (block, hash) | BEGIN (gather of all layers)     waited for, then copied into the worker's pages

PUBLISH stands behind its SAVE, so a worker killed between the two has published nothing, and the daemon publishes
whole blocks only. One thread owns the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from stagecache.cache import StageCache
from stagecache.diffusion.identity import HASH_SEED
from stagecache.diffusion.model import KVShape
from stagecache.diffusion.pages import KVPages
from stagecache.errors import StageCacheError
from stagecache.mapping import dtype_name
from stagecache.policy import ModelCachePolicy
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("stagecache")

CALL_TIMEOUT_S = 5.0
"""A lease that takes longer is given up, and the request computes its prefix."""


class NodeStore:
    """The node's prefix blocks for one worker. Made by ``NodeStore.attach``.

    Attributes:
        on: whether the node keeps blocks for this stage; where not, nothing is saved and nothing hit.
    """

    def __init__(self, cache: StageCache, window: Window, layers: Sequence[str]) -> None:
        self._cache = cache
        self._window = window
        self._layers = list(layers)
        self._leases: dict[str, list[Sequence[bytes]]] = {}
        self._fingerprint = ""
        self._dtype = ""
        self._joined_epoch = -1
        self._transfers = 0
        self._ended: set[str] = set()
        self.on = False
