"""What can be known of a unit test without running it, and what its verdicts say."""

from __future__ import annotations

import ast
import builtins
import dis
import sys
from types import CodeType
from typing import TypeGuard

# Why completions did not pass, in a word.
FAILURE_KINDS = ("wrong", "exception", "syntax", "timeout", "crash")


def failure_kind(why: str) -> str:
    """The one of ``FAILURE_KINDS`` that a verdict's reason is of."""
    name = why.partition(":")[0]
    if name == "AssertionError":
        return "wrong"
    if name in ("SyntaxError", "IndentationError", "TabError"):
        return "syntax"
    if why.startswith("no verdict"):
        return "timeout"
    return "exception" if name.isidentifier() else "crash"


def unit_test_fault(test: str, *, setup: str, entry_point: str) -> str | None:
    """What keeps every program from passing a test, or None. Both codes compile; neither is run.

    Args:
        test (str): defines ``check(candidate)``, or calls the function by its name.
        setup (str): what precedes it.
        entry_point (str): the function's name.
    """
    before, after = _Names(setup, nested=False), _Names(test)
    foreign = (before.imported | after.imported) - sys.stdlib_module_names
    if foreign:
        return f"imports {min(foreign)}, and there is only the standard library"
    known = before.bound | after.bound | {entry_point, *dir(builtins)}
    unknown = {n for n in (before.read | after.read) - known if not n.startswith("__")}
    if unknown and not (before.star or after.star):
        return f"uses {min(unknown)}, which is defined nowhere"
    checks = [n for code in (setup, test) for n in ast.parse(code).body if _is_check(n)]
    by_argument = any(map(_uses_argument, checks)) if checks else "check" in after.bound
    if by_argument or entry_point in after.read - after.bound:
        return None
    return f"calls neither {entry_point} nor the argument of check"


class _Names:
    """The global names that a program reads and binds, and what it imports outside of ``try``.

    Args:
        source (str): it compiles.
        nested (bool): whether its functions' and classes' bodies count.
    """

    def __init__(self, source: str, *, nested: bool = True) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.imported: set[str] = set()
        self.star = False
        codes = [compile(source, "", "exec")]
        while codes:
            code = codes.pop()
            codes += [part for part in code.co_consts if nested and isinstance(part, CodeType)]
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                    self.read.add(step.argval)
                elif step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                    self.bound.add(step.argval)
                elif step.opname == "IMPORT_NAME" and not code.co_exceptiontable:
                    self.imported.add(step.argval.partition(".")[0])
                self.star |= "IMPORT_STAR" in step.opname + step.argrepr


def _is_check(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


def _uses_argument(check: ast.FunctionDef) -> bool:
    """Whether a function reads its first parameter."""
    arguments = check.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, arguments.vararg) if a]
    return any(isinstance(part, ast.Name) and part.id in names[:1] for part in ast.walk(check))
