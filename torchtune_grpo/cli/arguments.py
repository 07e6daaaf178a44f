"""How every command names a run: a shipped config, a file, or the folder of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from omegaconf import DictConfig

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine import parallel
from torchtune_grpo.run import Run

CONFIG_FILE = "torchtune_config.yaml"  # in a run's folder; torchtune's metric loggers write it


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a run and change its config."""
    parser.add_argument("run", help="name of a shipped config, a file, or the folder of a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, as for `tune run`"
    )


def run_config(args: argparse.Namespace) -> DictConfig:
    """The config that the arguments name, without keys that only a recipe of one's own reads."""
    name, overrides = args.run, list(args.overrides)
    if Path(name).is_dir():
        name, overrides = str(Path(name, CONFIG_FILE)), [f"output_dir={name}", *overrides]
    cfg = load_config(name, overrides)
    given = {text.lstrip("~").split("=")[0].split(".")[0] for text in overrides}
    own = sorted(map(str, set(cfg) - {*GRPOConfig.model_fields} - given))
    for key in own:
        del cfg[key]
    if own and parallel.rank() == 0:
        print(f"Left out, as keys of another recipe: {', '.join(own)}")
    return cfg


def open_run(args: argparse.Namespace) -> Run:
    """The run that the arguments name."""
    return Run(run_config(args))
