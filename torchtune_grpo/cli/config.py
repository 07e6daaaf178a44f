"""``torchtune-grpo config``: checks a config as the recipe would, without loading a model."""

from __future__ import annotations

import argparse

from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.errors import ConfigError, told_in_one_line
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.schema import markdown_tables
from torchtune_grpo.run import Run


def main() -> None:
    """Entry point of ``torchtune-grpo config``."""
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo config",
        description="Checks a config as the recipe would, or prints the table of all keys.",
    )
    parser.add_argument("run", nargs="?", help="name of a shipped config, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    parser.add_argument("--table", help="dotpath of a forked recipe's table, if it has its own")
    args = parser.parse_intermixed_args()
    with told_in_one_line():
        table = _get_component_from_path(args.table) if args.table else GRPOConfig
        if args.run is None:
            print(markdown_tables(table))
            return
        run = Run(load_config(args.run, args.overrides), table)
        problems, remarks = run.check()
        run.close()
        for remark in remarks:
            print(f"Note: {remark}", flush=True)
        if problems:
            raise ConfigError(problems)
        print(f"{args.run}: no mistake found.")
