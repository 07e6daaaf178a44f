"""Makes the stock `tune` command see this package's recipes, and changes it for these alone.

`tune` has no plugin discovery, but torch has: at the end of `import torch` it calls every entry
point of the group `torch.backends`. Ours, `autoload`, asks to be called back when torchtune's list
of recipes is imported; a process that never imports torchtune pays only for that request.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off; `python -m torchtune_grpo` works all the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

# One file under torchtune's two names; under the second, `tune run` starts torchrun.
RECIPES = {
    "grpo_full_finetune_single_device": False,
    "grpo_full_finetune_distributed": True,
}


def autoload() -> None:
    """`register`, as torch calls it: silent, because an error here would fail `import torch`."""
    with contextlib.suppress(Exception):
        register()


def register() -> None:
    """Have `_HOOKS` called when the modules of torchtune that they extend are imported.

    Calling it again, or after torchtune was imported, does no harm.
    """
    from wrapt import register_post_import_hook

    for name in _HOOKS:
        register_post_import_hook(_extend, name)


def add_recipes(registry: ModuleType) -> None:
    """Append our recipes to torchtune's list, `torchtune._recipe_registry`, unless it has them."""
    from torchtune_grpo.config import command_line

    known = {recipe.name for recipe in registry._ALL_RECIPES}
    configs = command_line.config_files().items()
    for name, supports_distributed in RECIPES.items():
        if name not in known:
            recipe = registry.Recipe(
                name=name,
                # torchtune joins its own folder with `file_path`; an absolute path survives that.
                file_path=str(command_line.recipes_folder() / "grpo_full_finetune.py"),
                configs=[registry.Config(config, str(file)) for config, file in configs],
                supports_distributed=supports_distributed,
            )
            registry._ALL_RECIPES.append(recipe)


def end_torchrun_briefly(run: ModuleType) -> None:
    """End `tune run` with a failed rank's own error instead of torchrun's traceback.

    For our recipe and files that mention this package, as copies of it do. A rank that a signal
    killed is reported in one line. `TORCHTUNE_GRPO_TRACEBACK=1` shows everything.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from torchtune_grpo.config.text import TRACEBACK, suggest

    stock, stock_command = run.Run._run_distributed, run.Run._run_cmd

    @functools.wraps(stock_command)
    def _run_cmd(self: Any, args: Any) -> None:
        """Take `--config=FILE` as well, and name a recipe that is misspelt or not there."""
        if _is_ours(args.recipe):
            parts = [arg.split("=", 1) for arg in args.recipe_args[:1]]
            if parts and parts[0][0] == "--config":
                args.recipe_args[:1] = parts[0]
        elif not self._get_recipe(args.recipe):
            hint, file = suggest(args.recipe, RECIPES), Path(args.recipe)
            if hint or (file.suffix == ".py" and not file.is_file()):
                raise SystemExit(f"Error: {file}: no recipe of this name, and no file.{hint}")
        stock_command(self, args)

    @functools.wraps(stock)
    def _run_distributed(self: Any, args: Any, is_builtin: bool) -> None:
        file = args.recipe if is_builtin else args.recipe.replace(".", "/") + ".py"
        ours = _is_ours(file)
        if ours and args.max_restarts:  # torchrun's store keeps the dead ranks' addresses
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if not ours or os.environ.get(TRACEBACK):
            return stock(self, args, is_builtin)
        # torchrun logs these for each rank; its other messages are about its own failures.
        logging.getLogger(SignalException.__module__).addFilter(
            lambda record: not str(record.msg).startswith(("Sending process", "failed (exitcode"))
        )
        try:
            stock(self, args, is_builtin)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode  # above 128: the signal on which a rank has left by itself
            killed = code < 0
            raise SystemExit(f"Error: rank {rank}: {failure.message}" if killed else code) from None
        except (KeyboardInterrupt, SignalException) as stop:
            raise SystemExit(128 + getattr(stop, "sigval", signal.SIGINT)) from None

    run.Run._run_distributed, run.Run._run_cmd = _run_distributed, _run_cmd


def _is_ours(recipe: str) -> bool:
    """Whether a recipe is ours by name, or a file that mentions this package, as copies do."""
    file = Path(recipe)
    is_script = file.suffix == ".py" and file.is_file()
    return recipe in RECIPES or (is_script and b"torchtune_grpo" in file.read_bytes())


_HOOKS = {"torchtune._recipe_registry": add_recipes, "torchtune._cli.run": end_torchrun_briefly}


def _extend(module: ModuleType) -> None:
    """Call a module's hook; log its failure, so that stock `tune` goes on without our recipes."""
    try:
        _HOOKS[module.__name__](module)
    except Exception as error:
        log = logging.getLogger(__name__)
        log.warning("torchtune-grpo could not extend %s: %r", module.__name__, error)
