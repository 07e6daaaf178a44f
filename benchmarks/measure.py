"""Measures the code itself: its size, its keys, and where it decides by names or patches a process.

    make measure

The decisions and patches are places found by their form, for a reader to judge: a text that is
compared with a type's or module's name or looked up in a variable that holds a name or an error,
and what sets an attribute of a module, the environment or a switch of torch. Left out are the
sandbox, which sends types' names between processes, and the kernel.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from torchtune_grpo.config.check import key_paths
from torchtune_grpo.config.keys import GRPOConfig

ROOT = Path(__file__).parents[1]
MOST_PARAMETERS = 6
HOLDS_A_NAME = {"name", "names", "error", "message"}
OF_A_TYPE = re.compile(r"__(name|qualname|module)__")
SWITCHES = re.compile(r"environ\.(clear|update)\(|enable_\w+_sdp\(|tqdm\._instances")

Place = tuple[Path, ast.AST]


def files(*folders: str) -> list[Path]:
    """List the Python files below folders; ``torchtune_grpo/recipes`` is a link to ``recipes``."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if (ROOT / "torchtune_grpo/recipes") not in path.parents]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def decides_by_name(node: ast.AST) -> bool:
    """Whether a node compares the name of a type or a module, or searches a name for a text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_search = node.func.attr in ("startswith", "endswith")
        return is_search and bool(OF_A_TYPE.search(ast.unparse(node.func.value)))
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    if any(is_text(side) and side.value == "__main__" for side in sides):  # type: ignore[attr-defined]
        return False
    by_type = any(OF_A_TYPE.search(ast.unparse(side)) for side in sides)
    held = isinstance(sides[-1], ast.Name) and sides[-1].id in HOLDS_A_NAME
    is_search = isinstance(node.ops[0], (ast.In, ast.NotIn)) and is_text(node.left)
    return (by_type and any(map(is_text, sides))) or (is_search and held)


def patches(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what changes the whole process: attributes of imported modules, and switches."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {(each.asname or each.name).split(".")[0] for node in imports for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
            roots = {ast.unparse(target).split(".")[0] for target in targets}
            if roots & {*modules, "constants"}:
                yield node
        elif isinstance(node, ast.Call) and SWITCHES.search(ast.unparse(node)):
            yield node


def wide_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions with more parameters than six, apart from ``self`` and autograd's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = {each.arg for each in given} - {"self", "cls", "ctx"}
            if len(names) > MOST_PARAMETERS:
                yield node


def calls_in_setup() -> int:
    """Count the calls of the recipe's ``setup``."""
    tree = ast.parse((ROOT / "recipes/grpo_full_finetune.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    setup = next(node for node in functions if node.name == "setup")
    return sum(isinstance(node, ast.Call) for node in ast.walk(setup))


def main() -> None:
    package = files("torchtune_grpo", "recipes")
    texts = {path: path.read_text() for path in [*package, *files("tests")]}
    lines = {path: text.split("\n")[:-1] for path, text in texts.items()}
    found: dict[str, list[Place]] = {"decisions by name": [], "patches": [], "wide functions": []}
    for path in package:
        tree = ast.parse(texts[path])
        if "sandbox" not in path.parts:
            named = [node for node in ast.walk(tree) if decides_by_name(node)]
            found["decisions by name"] += [(path, node) for node in named]
            found["patches"] += [(path, node) for node in patches(tree)]
        if path.name != "kernel.py":
            found["wide functions"] += [(path, node) for node in wide_functions(tree)]
    counts = {
        "package and recipe": sum(len(lines[path]) for path in package),
        "tests": sum(len(lines[path]) for path in files("tests")),
        "keys": len([*key_paths(GRPOConfig)]),
        "calls in setup": calls_in_setup(),
        "lines with Any": sum(bool(re.search(r"\bAny\b", x)) for p in package for x in lines[p]),
        **{name: len({(path, at.lineno) for path, at in places}) for name, places in found.items()},  # type: ignore[attr-defined]
    }
    for name, places in found.items():
        print(f"{name}:")
        for path, at in dict.fromkeys((path, at.lineno) for path, at in places):  # type: ignore[attr-defined]
            print(f"  {path.relative_to(ROOT)}:{at}: {lines[path][at - 1].strip()}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
