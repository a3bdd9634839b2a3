"""The errors of the stage cache as vLLM-Omni's callers expect them: each is of both families.

A class here bears the name of its base in ``stagecache.errors`` and derives from it and from vLLM-Omni's
``OmniPrefixCacheUnmatchError`` (a full house: from ``OmniPrefixCacheStagingTimeoutError``). Where vLLM-Omni is not
installed the classes of ``stagecache.errors`` are used as they are.
"""

from __future__ import annotations

from typing import Any

from stagecache import errors, gates
from stagecache.errors import StageCacheError


class UnsupportedOmniError(StageCacheError):
    """This vLLM-Omni cannot be hooked: its release is not known, or it lacks what a patch replaces."""


class StageKeysError(StageCacheError):
    """STAGECACHE_KEYS does not list keys; the text shows the form."""


def _omni_bases() -> tuple[type[BaseException], type[BaseException]] | None:
    """vLLM-Omni's general error and its time-out, None where it is not installed."""
    try:
        from vllm_omni.core.prefix_cache import interface
    except ImportError:
        return None
    return interface.OmniPrefixCacheUnmatchError, interface.OmniPrefixCacheStagingTimeoutError


_combined: dict[type[StageCacheError], type[StageCacheError]] = {}


def _combine(kind: type[StageCacheError], bases: tuple[type[BaseException], type[BaseException]]) -> Any:
    general, timeout = bases
    other = timeout if issubclass(kind, errors.StagingTimeoutError) else general
    made = type(kind.__name__, (kind, other), {"__doc__": kind.__doc__, "__module__": __name__})
    globals()[kind.__name__] = made  # a name in this module, so that it can be pickled
    return made


def omni_error_class(kind: type[StageCacheError]) -> type[StageCacheError]:
    """The class of both families for a class of ours."""
    made = _combined.get(kind)
    if made is None:
        bases = _omni_bases()
        made = kind if bases is None or issubclass(kind, bases[0]) else _combine(kind, bases)
        _combined[kind] = made
    return made


def as_omni(error: StageCacheError) -> StageCacheError:
    """The same error object, now also of vLLM-Omni's family; traceback, text and attributes stay."""
    made = omni_error_class(type(error))
    if type(error) is not made:
        error.__class__ = made
    return error


def _make_all() -> None:
    for module in (errors, gates):
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and issubclass(kind, StageCacheError):
                omni_error_class(kind)


_make_all()
