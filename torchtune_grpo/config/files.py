"""Makes a user's own files importable by dotpath."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def extend_import_path(*folders: Path) -> None:
    """Appends the working folder, as torchtune does, and others."""
    for folder in (os.getcwd(), *map(str, folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def recipes_folder() -> Path:
    """Absolute path of the installed `torchtune_grpo.recipes`.

    Raises:
        ModuleNotFoundError: If the package runs from a source tree that was never installed.
    """
    spec = find_spec("torchtune_grpo.recipes")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "torchtune_grpo.recipes is not installed. Run `pip install -e .` in the source tree."
        )
    return Path(spec.origin).resolve().parent


def config_files() -> dict[str, Path]:
    """Absolute path of each config of this package, by the name that `tune` knows it by."""
    return {path.stem: path for path in sorted(recipes_folder().glob("configs/*.yaml"))}
