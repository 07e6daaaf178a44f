"""Where shipped configs, a user's own modules and a downloaded model's name are found."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

REPO_ID_FILE = "original_repo_id.json"  # `tune download` leaves it: the model's name on the hub


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


def hub_name(folder: Path) -> str | None:
    """The name on the hub of a model that `tune download` has fetched into a folder."""
    try:
        name = json.loads((folder / REPO_ID_FILE).read_text(encoding="utf-8"))["repo_id"]
    except (OSError, ValueError, LookupError, TypeError):  # not written by it
        return None
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) else None
