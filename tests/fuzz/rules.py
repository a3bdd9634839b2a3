"""Every place where the daemon says no, read from its source, and which of them did.

A rule is a ``raise`` of one exception in one of some modules: ``validate.py:_check_page: page {record.page} of ...``.
A refusal that somebody adds is one more rule, without a word here.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterable
from typing import Any


class Rules:
    """Refusals by rule.

    Attributes:
        names: name of each rule by (file, line). counts: refusals by name.
    """

    def __init__(self, error: str, modules: Iterable[types.ModuleType], *, without: tuple[str, ...] = ()) -> None:
        """error: name of the exception. without: functions whose refusals are not the daemon's."""
        self.names: dict[tuple[str, int], str] = {}
        self.counts: Counter[str] = Counter()
        self._patterns: dict[str, re.Pattern[str]] = {}
        for module in modules:
            file = str(module.__file__).rpartition("/")[2]
            for function, node in raises(ast.parse(inspect.getsource(module)), error):
                if function not in without:
                    pattern, text = said(node)
                    name = f"{file}:{function}: {text}"
                    self._patterns[name] = re.compile(pattern)
                    for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                        self.names[file, line] = name

    def count_text(self, text: str) -> str:
        """Note by which rule this text of a daemon was said; its name, or "" where none says such a thing."""
        found = [name for name, pattern in self._patterns.items() if pattern.search(text)]
        if not found:
            return ""
        name = max(found, key=lambda name: len(self._patterns[name].pattern))  # "span slot 9 of 8" is no "slot 9 of 8"
        for same in found:
            if self._patterns[same].pattern == self._patterns[name].pattern:
                self.counts[same] += 1
        return name

    def count(self, error: BaseException) -> str:
        """Note by which rule this was refused; its name, or "" where it came from elsewhere."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None:
            return ""
        at = (trace.tb_frame.f_code.co_filename.rpartition("/")[2], trace.tb_lineno)
        name = self.names.get(at, "")
        if name:
            self.counts[name] += 1
        return name

    @property
    def never(self) -> list[str]:
        """Rules that refused nothing."""
        return sorted(set(self.names.values()) - set(self.counts))

    def table(self) -> str:
        return "\n".join(f"{count:9d}  {name}" for name, count in sorted(self.counts.items()))


def raises(tree: ast.AST, error: str, inside: str = "") -> list[tuple[str, ast.Raise]]:
    """(name of the function, statement) of each ``raise error(...)``."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else inside
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == error:
            found.append((inside, node))
        found += raises(node, error, name)
    return found


def said(node: ast.Raise) -> tuple[str, str]:
    """Pattern of the texts of a refusal, and the text as the source has it."""
    argument = node.exc.args[0] if isinstance(node.exc, ast.Call) and node.exc.args else ast.Constant("")
    if isinstance(argument, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in argument.values]
        text = "".join("{}" if part is None else part for part in parts)
        return "".join(".*" if part is None else re.escape(part) for part in parts), text
    if isinstance(argument, ast.Constant):
        return re.escape(argument.value), argument.value
    return "is not a valid", ast.unparse(argument)  # the text of an enum's ValueError


def without_rule(module: types.ModuleType, error: str, index: int) -> tuple[str, dict[str, Any]]:
    """The module's names where its rule number ``index`` is taken out, and that rule's name: the control of a fuzz."""
    tree = ast.parse(inspect.getsource(module))
    function, taken = raises(tree, error)[index]

    class Take(ast.NodeTransformer):
        def visit_Raise(self, node: ast.Raise) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if node is taken else node

    names = {"__name__": module.__name__, "__file__": module.__file__}
    code = compile(ast.fix_missing_locations(Take().visit(tree)), str(module.__file__), "exec")
    exec(code, names)  # the daemon's own source, less one statement
    return f"{function}: {ast.unparse(taken)}", names
