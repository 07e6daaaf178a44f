"""Where configs are found, and how a command line changes them: ``key=value ~key ...``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

REPO_ID_FILE = "original_repo_id.json"  # `tune download` leaves it: the model's name on the hub


def extend_import_path(*folders: Path) -> None:
    """Append the working folder, as torchtune does, and ``folders`` to ``sys.path``."""
    for folder in (os.getcwd(), *map(str, folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def recipes_folder() -> Path:
    """Return the absolute path of `torchtune_grpo.recipes`, which is found only once installed."""
    spec = find_spec("torchtune_grpo.recipes")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "torchtune_grpo.recipes is not installed. Run `pip install -e .` in the source tree."
        )
    return Path(spec.origin).resolve().parent


def config_files() -> dict[str, Path]:
    """Return the absolute path of each config in this package, by its name in `tune`."""
    return {path.stem: path for path in sorted(recipes_folder().glob("configs/*.yaml"))}


def hub_name(folder: Path) -> str | None:
    """Return the name on the hub of the model that `tune download` has fetched into a folder."""
    try:
        name = json.loads((folder / REPO_ID_FILE).read_text(encoding="utf-8"))["repo_id"]
    except (OSError, ValueError, LookupError, TypeError):  # not written by it
        return None
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) else None


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config, by name or path, and change it as the command line says.

    The file's folder becomes importable. The key ``base_config`` names another config, whose keys
    it changes. ``key=value`` sets a key, ``rewards.0.weight=0.5`` one in a list,
    ``model=my.builder`` names a component, and ``~key`` removes a key.
    """
    cfg = _read(name, folder=Path())
    for override in overrides:
        apply_override(cfg, override)
    return cfg


def _read(name: str, *, folder: Path) -> DictConfig:
    """Read a config, on top of the one that its ``base_config`` names."""
    path = config_files().get(name, folder / name)
    if not path.is_file():
        raise ValueError(
            f"--config {name}: no such file, nor one of {', '.join(config_files())}. For a "
            "model's folder, set model_dir."
        )
    extend_import_path(path.resolve().parent)
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"--config {name}: not YAML: {error}") from error
    if not isinstance(cfg, DictConfig):
        raise ValueError(
            f"--config {name}: holds no keys; `tune cp` copies a config to start from."
        )
    base = cfg.pop("base_config", None)
    return cfg if base is None else _on_top_of(_read(str(base), folder=path.parent), cfg)


def _on_top_of(base: DictConfig, cfg: DictConfig) -> DictConfig:
    """Merge ``cfg`` into ``base``; a node with another component drops the base's arguments."""
    for name, node in cfg.items_ex(resolve=False):
        there = base._get_node(name)
        if isinstance(node, DictConfig) and isinstance(there, DictConfig):
            if node.get("_component_", there.get("_component_")) != there.get("_component_"):
                del base[name]
    merged = OmegaConf.merge(base, cfg)
    assert isinstance(merged, DictConfig)
    return merged


def apply_override(cfg: DictConfig, override: str) -> None:
    """Change a config as ``key=value`` or ``~key`` says; raises a ValueError if it cannot."""
    key, is_set, text = override.partition("=")
    removed = key.startswith("~")
    if not key or not (is_set or removed) or key.startswith("-"):
        raise ValueError(f"{override}: not an override; write key=value, or ~key to remove a key.")
    try:
        if not removed:
            set_key(cfg, key, _value(key, text))
            return
        head, _, name = key[1:].rpartition(".")
        parent = OmegaConf.select(cfg, head) if head else cfg
        if parent is None or (isinstance(parent, DictConfig) and name not in parent):
            raise ValueError(f"there is no key {key[1:]}")
        del parent[name if isinstance(parent, DictConfig) else int(name)]
    except (OmegaConfBaseException, YAMLError, LookupError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]  # omegaconf's other lines name its own types
        raise ValueError(f"{override}: cannot be applied to the config: {why}") from error


def set_key(cfg: DictConfig, key: str, value: Any) -> None:
    """Set a dotted key; a string in place of a component names another component.

    The new one keeps those of the old one's arguments that it takes; a reward keeps them all.
    """
    now = OmegaConf.select(cfg, key, throw_on_missing=False)
    if isinstance(value, str) and isinstance(now, DictConfig) and "_component_" in now:
        key += "._component_"
    OmegaConf.update(cfg, key, value, force_add=True)
    name = key.removesuffix("._component_")
    if name != key and not key.startswith("rewards."):
        from torchtune_grpo.config.schema import parameters  # `tune ls` does without pydantic

        accepted = parameters(value)
        node = OmegaConf.select(cfg, name)
        if accepted and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            for argument in node.keys() - accepted.keys() - {"_component_"}:
                del node[argument]


def _value(key: str, text: str) -> Any:
    """Read a value as YAML does, but ``None`` as null and a checkpoint's number as text."""
    if text == "None":
        return None
    if key.endswith("max_filename"):
        return text
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    is_cut = isinstance(value, str) and text.startswith(f"{value} ")  # where YAML sees a comment
    return text if is_cut else value
