"""What can be known of a unit test without running it, and what its verdicts say."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator
from typing import TypeGuard

# Why completions did not pass, in a word.
FAILURE_KINDS = ("wrong", "exception", "syntax", "timeout", "crash")
_GIVEN_NAMES = {*dir(builtins), "__name__", "__doc__"}


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
    trees = [ast.parse(setup), ast.parse(test)]
    before, after = (symtable.symtable(code, "", "exec") for code in (setup, test))
    imported = {name for tree in trees for name in _imported(tree)}
    foreign = imported - sys.stdlib_module_names - {"*"}
    if foreign:
        return f"imports {min(foreign)}, and there is only the standard library"
    read = _read(after) - _bound(after)
    unknown = (read | _read(before, nested=False)) - _bound(before) - _GIVEN_NAMES - {entry_point}
    if unknown and "*" not in imported:
        return f"uses {min(unknown)}, which is defined nowhere"
    checks = [node for tree in trees for node in tree.body if _is_check(node)]
    calls_argument = any(map(_uses_argument, checks))
    if not checks:
        calls_argument = "check" in _bound(before) | _bound(after)
    if calls_argument or entry_point in read:
        return None
    return f"calls neither {entry_point} nor the argument of check"


def _imported(tree: ast.Module) -> Iterator[str]:
    """The packages that are imported outside of ``try``, and "*" for what a star brings."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (alias.name for alias in node.names if alias.name == "*")
        elif not isinstance(node, ast.Try):
            nodes += ast.iter_child_nodes(node)


def _read(table: symtable.SymbolTable, *, nested: bool = True) -> set[str]:
    """The global names that are read, in functions and classes too."""
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    if table.get_type() != "module":
        names &= {s.get_name() for s in table.get_symbols() if s.is_global()}
    return names.union(*map(_read, table.get_children())) if nested else names


def _bound(module: symtable.SymbolTable) -> set[str]:
    """The global names that code binds."""
    names = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    tables = module.get_children()
    while tables:
        table = tables.pop()
        symbols = [s for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()]
        names |= {symbol.get_name() for symbol in symbols}
        tables += table.get_children()
    return names


def _is_check(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


def _uses_argument(check: ast.FunctionDef) -> bool:
    """Whether a function reads its first parameter."""
    arguments = check.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, arguments.vararg) if a]
    return any(isinstance(part, ast.Name) and part.id in names[:1] for part in ast.walk(check))
