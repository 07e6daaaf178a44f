"""Check that an installed torchtune-grpo shows up in the stock `tune` command, and only there.

The commands run in processes of their own, from an unrelated folder, and need the package installed
(`pip install -e .`); `.ci/wheel` looks at an installed wheel.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from runs import DISTRIBUTED, RECIPE, TUNE, Result, run, run_python

from torchtune_grpo.cli import tune as _plugin

REPO = Path(__file__).parents[2]
RECIPES = (RECIPE, DISTRIBUTED)
CONFIG = "tiny_arithmetic_grpo"
CONFIGS = sorted(path.stem for path in (REPO / "recipes" / "configs").glob("*.yaml"))


def listed(out: str) -> dict[str, list[str]]:
    """Return the configs that `tune ls` printed, by recipe."""
    recipes: dict[str, list[str]] = {}
    for line in out.splitlines()[1:]:
        names = line.split()
        if not line.startswith(" "):
            assert names[0] not in recipes, f"{names[0]} is listed twice"
            recipes[names[0]] = configs = []
        configs.append(names[-1])
    return recipes


@pytest.fixture(scope="module")
def tune_ls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of the stock `tune ls`."""
    return run(TUNE, "ls", cwd=tmp_path_factory.mktemp("unrelated")).out


def test_ls_lists_the_recipes_with_every_config(tmp_path: Path, tune_ls: str) -> None:
    assert CONFIG in CONFIGS
    for recipe in RECIPES:
        assert listed(tune_ls)[recipe] == CONFIGS
    assert run("-m", "torchtune_grpo", "ls", cwd=tmp_path).out == tune_ls  # nothing twice


def test_the_single_device_recipe_is_not_for_torchrun(tmp_path: Path) -> None:
    launch = ["run", "--nproc_per_node", 1, RECIPE, "--config", CONFIG, "no_such_key=1"]
    done = run(TUNE, *launch, cwd=tmp_path, check=False)
    assert f"{RECIPE} does not support distributed training" in done.err


def test_our_own_command_trains_and_prints_versions(tmp_path: Path) -> None:
    done = run("-m", "torchtune_grpo", "train", CONFIG, "no_key=1", cwd=tmp_path, check=False)
    assert "Error: no_key=1: unknown config key." in done.err
    versions = run("-m", "torchtune_grpo", "--version", cwd=tmp_path).out
    for name in ("python", "torchtune-grpo", "torch", "torchtune", "torchao", "transformers"):
        assert re.search(rf"^{name} \d+\.\d+", versions, re.M), name


# Stands for a recipe that torchrun starts: ends as it is told.
ENDS = """
import os, signal, sys, time
if sys.argv[-1] == "exit":
    os.write(2, b"Error: what the recipe says\\n")  # at once: two ranks write there
    sys.exit(1)
if sys.argv[-1] == "killed" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[-1] == "asked":  # to end, by a signal to this rank alone
    sys.exit(143)
if sys.argv[-1] == "interrupted":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
TOLD = r"(?s).*failed \(exitcode: 1\).*Traceback.*"


@pytest.mark.parametrize(
    ("end", "ranks", "settings", "code", "said"),
    [
        ("exit", 2, {}, 1, "(Error: what the recipe says\n){1,2}"),
        ("killed", 2, {}, 1, r"Error: rank 1: Signal 9 \(SIGKILL\) received by PID \d+\n"),
        ("asked", 1, {}, 143, ""),
        ("interrupted", 1, {}, 130, "W.* Received 2 death signal, shutting down workers\n"),
        ("exit", 1, {"TORCHTUNE_GRPO_TRACEBACK": "1"}, 1, TOLD),
        ("exit, of somebody else's", 1, {}, 1, TOLD),
    ],
)
def test_torchrun_adds_no_traceback_to_what_a_rank_says(
    tmp_path: Path, end: str, ranks: int, settings: dict[str, str], code: int, said: str
) -> None:
    """It does on request, and for other recipes."""
    end, _, owner = end.partition(", ")
    (tmp_path / "my_recipe.py").write_text(f"# {owner or 'torchtune_grpo'}\n{ENDS}")
    launch = ["run", "--nproc_per_node", ranks, "my_recipe.py", "--config", "no.yaml", end]
    result = run(TUNE, *launch, cwd=tmp_path, check=False, **settings)
    assert result.code == code
    assert re.fullmatch(said, result.err), result.err


@pytest.mark.slow
def test_module_works_where_the_hook_is_turned_off(tmp_path: Path, tune_ls: str) -> None:
    """Stock `tune` and the module run one after the other in one process."""
    (tmp_path / "both.py").write_text(
        "import runpy, sys\n"
        "from torchtune._cli.tune import main\n"
        "sys.argv = ['tune', 'ls']\n"
        "main()\n"
        "print('and ours')\n"
        "runpy.run_module('torchtune_grpo', run_name='__main__')\n"
    )
    done = run("both.py", cwd=tmp_path, fresh=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    stock, _, ours = done.out.partition("and ours\n")
    assert RECIPE not in listed(stock)
    assert listed(ours) == listed(stock) | dict.fromkeys(RECIPES, CONFIGS)
    assert ours == tune_ls


@pytest.mark.slow
def test_a_broken_wrapt_breaks_only_the_plugin(tmp_path: Path) -> None:
    def python(*arguments: str) -> Result:
        return run_python(*arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))

    load = "from torchtune_grpo.cli import tune as _plugin; _plugin.autoload(); print('alive')"
    for wrapt in ("", "raise RuntimeError('broken')"):
        (tmp_path / "wrapt.py").write_text(wrapt)
        assert python("-c", load) == Result(0, "alive\n", ""), wrapt
        told = python("-m", "torchtune_grpo", "ls")
        assert told.code == 1, wrapt
        assert "Error" in told.err.splitlines()[-1] and "wrapt" in told.err
    torch = "import sys, torch; print('torchtune_grpo.cli.tune' in sys.modules)"
    assert python("-c", torch) == Result(0, "True\n", "")


def test_hook_imports_nothing_else_than_wrapt(tmp_path: Path) -> None:
    """Every `import torch` pays for it."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from torchtune_grpo.cli.tune import autoload; autoload()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))"
    )
    assert run_python("-c", code, cwd=tmp_path) == Result(0, "torchtune_grpo wrapt\n", "")


def test_a_hook_that_fails_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _plugin._extend(ModuleType("torchtune._recipe_registry"))
    assert "could not extend torchtune._recipe_registry: AttributeError" in caplog.text


def test_import_torch_is_whole_where_the_package_is_gone(tmp_path: Path) -> None:
    """As after a clone was moved that pip had installed editable: only the hook is left."""
    shutil.copy(REPO / "torchtune_grpo_autoload.py", tmp_path)
    code = "import sys; sys.path.append(sys.argv[1]); import torchtune_grpo_autoload as hook; "
    code += "print(hook.autoload())"
    done = run_python("-I", "-S", "-c", code, str(tmp_path), cwd=tmp_path)
    assert done == Result(0, "None\n", "")
