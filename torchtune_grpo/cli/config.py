"""``torchtune-grpo config``: checks a config as the recipe would, without loading a model."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.errors import ConfigError, Problems, told_in_one_line
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.schema import markdown_tables
from torchtune_grpo.data.load_data import load_data
from torchtune_grpo.loss import make_loss
from torchtune_grpo.machine.device import find_device
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.training.policy_checks import check_model


def check_config(
    cfg: DictConfig, table: type[GRPOConfig] = GRPOConfig, *, read_data: bool = True
) -> tuple[list[str], list[str]]:
    """All that the recipe would refuse, and remarks on what is allowed or cannot be known here.

    Files and, by default, data sets are read, and rewards are made but not called.

    Returns:
        mistakes and remarks, a sentence each.
    """
    problems, remarks = Problems(), Problems()
    try:
        settings = read_config(cfg, table)
    except ConfigError as error:
        return error.problems, remarks
    with remarks.noted():
        find_device(settings.device)
    _check_parts(settings, problems, remarks, read_data=read_data)
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
        check_model(settings)
        tokenizer = instantiate("tokenizer", settings.tokenizer)
    with problems.noted():
        make_loss(settings.loss)
    with problems.noted():
        rewards = RewardSet.from_config(settings.rewards)
    if tokenizer is not None and read_data and not problems:
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
