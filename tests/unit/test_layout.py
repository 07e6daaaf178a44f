"""The package's imports go down the table of layers in CONTRIBUTING.md, and never in a circle."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "torchtune_grpo"


def layers() -> dict[str, int]:
    """The rooms that the table names, each with its row: 0 is the lowest."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    table = text.partition("| Layer |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [re.findall(r"`([\w/]+?)(?:/|\.py)`", row.split("|")[2]) for row in table]
    return {name: len(named) - i for i, names in enumerate(named) for name in names}


def room(module: str) -> str:
    """torchtune_grpo.rollout.cache -> rollout; the package's own names are its top."""
    return (module.split(".") + ["__init__"])[1]


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_package = (REPOSITORY / module.replace(".", "/") / "__init__.py").exists()
            found |= {f"{module}.{name.name}" if is_package else module for name in node.names}
    return {name for name in found if name.startswith("torchtune_grpo")}


@cache
def arrows() -> dict[str, set[str]]:
    """Room -> rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE / "recipes").glob("*.py")]:
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        here = room(".".join(parts).removesuffix(".__init__"))
        found.setdefault(here, set()).update(set(map(room, imports(path))) - {here})
    return found


def test_every_import_goes_down_the_table():
    row = layers() | {"__init__": 99, "__main__": 99}
    unnamed = {name for name in arrows() if name not in row}
    assert not unnamed, "CONTRIBUTING.md names no layer for these"
    climbs = [f"{a} -> {b}" for a, found in arrows().items() for b in found if row[b] > row[a]]
    assert not climbs


def test_rooms_do_not_import_each_other_in_a_circle():
    TopologicalSorter(arrows()).prepare()  # raises a CycleError


def test_the_sandbox_imports_nothing_of_the_rest():
    assert arrows()["sandbox"] == set()
