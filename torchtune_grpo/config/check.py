"""From YAML to a checked config, before anything is loaded."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from torchtune import utils

from torchtune_grpo.config.components import check_component
from torchtune_grpo.config.errors import ConfigError, Problems
from torchtune_grpo.config.files import extend_import_path
from torchtune_grpo.config.keys import GRPOConfig, without_effect
from torchtune_grpo.config.schema import read

log = utils.get_logger("INFO")
T = TypeVar("T", bound=GRPOConfig)


def read_config(cfg: DictConfig, table: type[T] = GRPOConfig) -> T:  # type: ignore[assignment]
    """Reads and checks a config; settings without effect are logged.

    Args:
        cfg: what :func:`torchtune_grpo.config.command_line.parse` hands to ``recipe_main``.
        table: a subclass, where a recipe has keys of its own.

    Raises:
        ConfigError: with all mistakes, each naming the key, the value and the remedy.
    """
    extend_import_path()
    values = _plain(cfg)
    problems, settings = Problems(), None
    with problems.noted():
        settings = read(table, values)
    for name, node in cfg.items_ex(resolve=False):
        if isinstance(node, DictConfig) and isinstance(node.get("_component_"), str):
            with problems.noted():
                check_component(str(name), DictConfig(values[name]))
    problems.raise_any()
    assert settings is not None
    if os.environ.get("RANK", "0") == "0":
        for sentence in without_effect(settings):
            log.warning(f"No effect: {sentence}")
    return settings


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The config's values, with every ``${...}`` resolved and without what is still ``???``."""
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except InterpolationToMissingValueError:
        missing = [key for key in cfg if OmegaConf.is_missing(cfg, key)]
        raise ConfigError(
            f"{key}: missing from the config; give {key}=<value>." for key in missing
        ) from None
    except OmegaConfBaseException as error:
        key = (error.full_key or "the config").replace("[", ".").replace("]", "")
        why = str(error.msg).splitlines()[0]
        raise ConfigError([f"{key}: {why}; correct the ${{...}}."]) from error
    return {key: value for key, value in values.items() if value != "???"}
