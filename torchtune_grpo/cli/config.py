"""Checks a config as the recipe would, without loading a model."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.check import (
    by_model_dir,
    check_checkpoint_files,
    examine,
    without_effect,
)
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.errors import ConfigError, Problems, told_in_one_line
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.schema import markdown_tables
from torchtune_grpo.data.load_data import load_data
from torchtune_grpo.loss import make_loss
from torchtune_grpo.machine.device import find_device
from torchtune_grpo.rewards import RewardSet


def check_config(
    cfg: DictConfig, table: type[GRPOConfig] = GRPOConfig, *, read_data: bool = True
) -> tuple[list[str], list[str]]:
    """All that the recipe would refuse, and remarks on what is allowed or cannot be known here.

    Files and, by default, data sets are read, and rewards are made but not called.

    Returns:
        tuple[list[str], list[str]]: mistakes and remarks, a sentence each.
    """
    problems, remarks = Problems(), Problems()
    settings = examine(cfg, table, problems)
    if settings is None:
        return problems, remarks
    remarks += without_effect(settings)
    with remarks.noted():
        find_device(settings.device)
    try:
        _check_parts(settings, problems, remarks, read_data=read_data)
    except Exception:
        if not problems:  # of which this is a consequence
            raise
    problems = Problems(by_model_dir(settings, problem) for problem in problems)
    by_key = {re.split("[=:]", problem)[0]: problem for problem in reversed(problems)}
    return list(by_key.values())[::-1], remarks  # what is wrong in itself fails in use, too


def _check_parts(
    settings: GRPOConfig, problems: Problems, remarks: list[str], *, read_data: bool
) -> None:
    """Makes all that the recipe makes before it loads a model."""
    if settings.prepare is not None and not Path(settings.checkpointer.checkpoint_dir).exists():
        remarks.append("prepare: makes the checkpoint when a run starts; it is not checked.")
        return
    tokenizer = rewards = None
    with problems.noted():
        check_checkpoint_files(settings)
    with problems.noted():
        make_loss(settings.loss)
    with problems.noted():
        rewards = RewardSet.from_config(settings.rewards)
    with problems.noted():
        tokenizer = instantiate("tokenizer", settings.tokenizer)
    if tokenizer is not None and read_data:
        with problems.noted():
            load_data(settings, tokenizer=tokenizer, rewards=rewards, alone=True)
    if rewards is not None:
        rewards.close()


def main() -> None:
    """Entry point of ``torchtune-grpo config``."""
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo config",
        description="Checks a config as the recipe would, or prints the table of all keys.",
    )
    parser.add_argument("config", nargs="?", help="name of a shipped config, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    parser.add_argument("--table", help="dotpath of a forked recipe's table, if it has its own")
    args = parser.parse_args()
    with told_in_one_line():
        table = _get_component_from_path(args.table) if args.table else GRPOConfig
        if args.config is None:
            print(markdown_tables(table))
            return
        problems, remarks = check_config(load_config(args.config, args.overrides), table)
        for remark in remarks:
            print(f"Note: {remark}", flush=True)
        if problems:
            raise ConfigError(problems)
        print(f"{args.config}: no mistake found.")
