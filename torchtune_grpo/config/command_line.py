"""Where configs are found, and how a command line changes them: ``key=value ~key ...``."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from torchtune_grpo.config.text import suggest

log = logging.getLogger(__name__)
REPO_ID_FILE = "original_repo_id.json"  # `tune download` leaves it: the model's name on the hub


def extend_import_path(*folders: Path) -> None:
    """Append the working folder, as torchtune does, and ``folders`` to ``sys.path``."""
    for folder in (os.getcwd(), *map(str, folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def recipes_folder() -> Path:
    """Return the absolute path of the recipe and its configs."""
    return Path(__file__).resolve().parents[1] / "recipes"


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

    The file's folder becomes importable. Its keys change those of the ``algorithm`` that it names,
    which change those of its ``base_config``. On the command line, ``algorithm=dapo`` changes the
    file's keys and comes before the rest: ``key=value`` sets a key, ``rewards.0.weight=0.5`` one in
    a list, ``model=my.builder`` names a component, and ``~key`` removes a key.
    """
    cfg = _read(name, folder=Path())
    algorithms = [text for text in overrides if text.startswith("algorithm=")]
    for text in algorithms:
        cfg = _with_algorithm(cfg, text.partition("=")[2])
    for override in overrides:
        if override not in algorithms:
            apply_override(cfg, override)
    return cfg


def _algorithms() -> dict[str, Path]:
    return {path.stem: path for path in recipes_folder().glob("configs/algorithms/*.yaml")}


def _with_algorithm(cfg: DictConfig, name: str) -> DictConfig:
    """Set the keys that make a published algorithm; docs/objectives.md."""
    files = _algorithms()
    if name not in files:
        names = ", ".join(sorted(files))
        raise ValueError(f"algorithm={name}: unknown.{suggest(name, files)} There are {names}.")
    merged = _on_top_of(cfg, _read(str(files[name]), folder=Path()))
    if merged.objective.sampling_correction is None:  # the engine may want one
        del merged.objective.sampling_correction
    return merged


def _read(name: str, *, folder: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """Read a config, on top of those that its ``base_config`` and ``algorithm`` name."""
    key = f"base_config={name}" if above else name
    path = config_files().get(name, folder / os.path.expanduser(name)).resolve()
    if path in above:
        raise ValueError(f"base_config={name}: {path} starts from itself; name another config.")
    if not path.is_file():
        raise ValueError(
            f"{key}: no such file, run or shipped config.{suggest(name, config_files())} `tune ls` "
            "lists the configs; a model's folder goes into model_dir."
        )
    extend_import_path(path.parent)
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{key}: not YAML: {error}") from error
    if not isinstance(cfg, DictConfig):
        raise ValueError(f"{key}: holds no keys; `tune cp` copies a config to start from.")
    base, algorithm = cfg.pop("base_config", None), cfg.get("algorithm")
    below = DictConfig({})
    if base is not None:
        below = _read(str(base), folder=path.parent, above=(*above, path))
    if isinstance(algorithm, str):  # not verl's node of this name
        del cfg["algorithm"]
        below = _with_algorithm(below, algorithm)
    return _on_top_of(below, cfg)


def _on_top_of(base: DictConfig, cfg: DictConfig) -> DictConfig:
    """Merge ``cfg`` into ``base``; a node with another component drops the base's arguments."""
    _drop_replaced(base, cfg)
    merged = OmegaConf.merge(base, cfg)
    assert isinstance(merged, DictConfig)
    return merged


def _drop_replaced(base: DictConfig, cfg: DictConfig) -> None:
    """Remove nodes from ``base`` that have another component in ``cfg``."""
    for name, node in cfg.items_ex(resolve=False):
        there = base._get_node(name)
        if isinstance(there, ListConfig) and isinstance(node, DictConfig):
            raise ValueError(f"{name}: a mapping; give a list, each entry behind a dash.")
        if isinstance(node, DictConfig) and isinstance(there, DictConfig):
            if node.get("_component_", there.get("_component_")) != there.get("_component_"):
                del base[name]
            else:
                _drop_replaced(there, node)


def apply_override(cfg: DictConfig, override: str) -> None:
    """Change a config as ``key=value`` or ``~key`` says; raises a ValueError if it cannot."""
    key, is_set, text = override.partition("=")
    removed = key.startswith("~")
    if not key or not (is_set or removed) or key.startswith("-"):
        key = key.lstrip("-") or "key"
        change = f"{key}={text if is_set else 'value'}"
        raise ValueError(f"{override}: not an override; write {change}, or ~{key} to remove it.")
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
        # omegaconf's other lines name its own types
        why = _no_entry(cfg, key.lstrip("~")) or str(error).splitlines()[0]
        if isinstance(error, YAMLError):
            why += f"""; a text that is not YAML needs quotes of its own: '{key}="..."'"""
        raise ValueError(f"{override}: cannot be applied to the config: {why}") from error


def _no_entry(cfg: DictConfig, key: str) -> str | None:
    """Say which entries a list has, if a key is about none of them."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        name, entry = ".".join(parts[:depth]), parts[depth]
        entries = OmegaConf.select(cfg, name, throw_on_missing=False)
        if isinstance(entries, ListConfig) and entry not in map(str, range(len(entries))):
            known = ", ".join(f"{name}.{n}" for n in range(len(entries)))
            return f"{name} has {f'only {known}' if known else f'no entry; give {name}=[...]'}"
    return None


def do_without_data(cfg: DictConfig) -> None:
    """Let prompts be encoded like data that were in a script's memory or never existed."""
    cfg.dataset |= {"rows": [{cfg.dataset.get("prompt_column", "prompt"): "-"}], "columns": None}
    cfg.batch_size, cfg.rewards = 1, [{"_component_": "torchtune_grpo.rewards.math_format_reward"}]


def set_key(cfg: DictConfig, key: str, value: object) -> None:
    """Set a dotted key; a string in place of a component names another component.

    The new one keeps those of the old one's arguments that it takes, and a reward or an environment
    all of them; a mapping with another ``_component_`` keeps none.
    """
    if key == "environment" and isinstance(value, str):
        key = "environment._component_"
    for node in ("environment", "rollout.engine"):  # keys below a name are set beside it
        if key.startswith(f"{node}.") and isinstance(named := OmegaConf.select(cfg, node), str):
            OmegaConf.update(cfg, node, {"_component_": named})
    name = key.removesuffix("._component_")
    now = OmegaConf.select(cfg, name, throw_on_missing=False)
    before = now.get("_component_") if isinstance(now, DictConfig) else None
    if before is None or not isinstance(value, str):
        replaces = isinstance(value, Mapping) and value.get("_component_", before) != before
        OmegaConf.update(cfg, key, value, merge=not replaces, force_add=True)
        return
    if key == "loss" and value.lower() in _algorithms():
        raise ValueError(f"an algorithm is more than a loss; give algorithm={value.lower()}.")
    now._component_ = value
    if not name.startswith(("rewards.", "environment")):
        _drop_arguments(now, f"{name}={value}")


def _drop_arguments(node: DictConfig, change: str) -> None:
    """Drop, with a warning, the arguments that a node's new component does not take."""
    # `tune ls` does without pydantic
    from torchtune_grpo.config.check import parameters
    from torchtune_grpo.config.keys import ENGINES

    name = node._component_
    accepted = parameters(f"{ENGINES}.{name}" if name.isidentifier() else name)
    if not accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return
    dropped = sorted(node.keys() - accepted.keys() - {"_component_"})
    for argument in dropped:
        del node[argument]
    if dropped and os.environ.get("RANK", "0") == "0":
        log.warning(f"{change}: does not take {', '.join(dropped)}, which the config had set.")


def _value(key: str, text: str) -> object:
    """Read a value as YAML does, but ``None`` as null, and a text with a colon or a # as text."""
    if text == "None":
        return None
    # A number; a template; what YAML sees as a comment alone.
    if key.endswith("max_filename") or re.match(r"\{\w+\}|\s*#", text):
        return text
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    is_cut = isinstance(value, str) and text.startswith(f"{value} ")  # where YAML sees a comment
    is_words = isinstance(value, dict) and not text.lstrip().startswith("{")
    return text if is_cut or is_words else value
