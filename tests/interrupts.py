"""Interrupts as Ctrl-C makes them, at every place where they can come.

They are raised by a trace function, at each instruction where CPython looks for signals: after a call, at a function's
beginning and at a jump backwards, in every frame of the client's package.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import stagecache

PACKAGE = stagecache.__path__[0]

_points: dict[CodeType, frozenset[int]] = {}


def points_of(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which a signal may be handled."""
    found = _points.get(code)
    if found is None:
        offsets, before = set(), ""
        for instruction in dis.get_instructions(code):
            if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                offsets.add(instruction.offset)
            before = instruction.opname
        found = _points[code] = frozenset(offsets)
    return found


class Interrupter:
    """Raises at the ``nth`` point; counts them all where ``nth`` is 0.

    once: a place counts when it is first reached. within: files of the package whose places count; all.
    """

    def __init__(self, nth: int, *, once: bool = False, within: tuple[str, ...] = ("",)) -> None:
        self.nth, self.seen, self.once, self.within = nth, 0, once, within
        self.where = ""
        self._places: set[tuple[CodeType, int]] = set()

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in points_of(frame.f_code) and self._counts(frame):
            self.seen += 1
            if self.seen == self.nth:
                self.where = f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace

    def _counts(self, frame: FrameType) -> bool:
        place = frame.f_code, frame.f_lasti
        if (self.once and place in self._places) or not frame.f_code.co_filename.endswith(self.within):
            return False
        self._places.add(place)
        return True

    def run(self, call: Callable[[], object]) -> bool:
        """Whether it was interrupted."""
        sys.settrace(self.trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False
