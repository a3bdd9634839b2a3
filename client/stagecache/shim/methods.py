"""Wrapping a method of one instance."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


def method_of(owner: Any, name: str) -> Callable[..., Any]:
    """A method of ``owner``, as it is now, that does not keep ``owner`` alive."""
    method = getattr(owner, name)
    if getattr(method, "__self__", None) is not owner:
        return method  # type: ignore[no-any-return]
    function, reference = method.__func__, weakref.ref(owner)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    return call
