"""The small commands, and how every command names a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from torchtune_grpo.checkpoint.folder import step_of
from torchtune_grpo.checkpoint.model_card import ModelCard
from torchtune_grpo.config import aliases
from torchtune_grpo.config.check import load_component, markdown_table
from torchtune_grpo.config.command_line import (
    config_files,
    do_without_data,
    extend_import_path,
    load_config,
)
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError, shortened, to_json, visible
from torchtune_grpo.machine import parallel
from torchtune_grpo.models.gguf import awaits_conversion
from torchtune_grpo.rewards import TrainerState
from torchtune_grpo.run import Run

CONFIG_FILE = "torchtune_config.yaml"  # in a run's folder; torchtune's metric loggers write it


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run and change its config."""
    what = "name of a shipped config, a file, or the folder of a run"
    parser.add_argument("run", nargs="?", help=what)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, as for `tune run`"
    )
    parser.add_argument("--config", metavar="RUN", help="the same as RUN alone, as for `tune run`")


def parse(parser: argparse.ArgumentParser, *, needs_run: bool = True) -> argparse.Namespace:
    """Read the command line of a command that ``add_run`` has given its arguments."""
    args = parser.parse_intermixed_args()
    if args.config is not None:
        args.overrides = [*filter(None, [args.run]), *args.overrides]
        args.run = args.config
    if args.run is None and needs_run:
        parser.error("name a shipped config, a file, or the folder of a run")
    return args


def count(text: str) -> int:
    """Read a number above 0 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)


def named_config(args: argparse.Namespace) -> DictConfig:
    """Return the config that the arguments name."""
    name = config_name(args.run)
    output_dir = [] if name == args.run else [_path("output_dir", Path(args.run))]
    return load_config(name, [*output_dir, *args.overrides])


def config_name(name: str) -> str:
    """Return the file of the config in a run's folder; the name of any other config as it is."""
    folder = Path(name)
    if (folder / CONFIG_FILE).is_file():
        return str(folder / CONFIG_FILE)
    # A run that failed at once leaves a folder, perhaps with the name of a shipped config.
    if folder.is_dir() and name not in config_files():
        what = f"no run, as it has no {CONFIG_FILE}; give the output_dir of one"
        if (folder.parent / CONFIG_FILE).is_file():
            what = f"a folder of a run; give {folder.parent} and --checkpoint {folder.name}"
        elif (folder / "config.json").is_file():
            what = f"a model, and no run; give a config and model_dir={folder}"
        raise ValueError(f"{folder}: {what}.")
    return name


def _path(key: str, path: Path) -> str:
    """Return the override that sets a key to a path, even if YAML reads it as a number."""
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"


def run_config(args: argparse.Namespace) -> DictConfig:
    """Return the config that the arguments name, without keys that only a custom recipe reads."""
    cfg = named_config(args)
    given = {text.lstrip("~").split("=")[0].split(".")[0] for text in args.overrides}
    own = sorted(map(str, set(cfg) - {*GRPOConfig.model_fields} - given))
    for key in own:
        del cfg[key]
    if own and parallel.rank() == 0:
        print(f"Left out, as keys of another recipe: {', '.join(own)}")
    return cfg


def config() -> None:
    """``torchtune-grpo config``: checks a config as the recipe would, without loading a model."""
    parser = argparse.ArgumentParser(description="Checks a config, or prints all keys.")
    add_run(parser)
    parser.add_argument("--table", help="dotpath of a forked recipe's table, if it has its own")
    parser.add_argument(
        "--coming-from", action="store_true", help="print what TRL, verl or unsloth call the keys"
    )
    args = parse(parser, needs_run=False)
    extend_import_path()
    table = load_component("--table", args.table) if args.table else GRPOConfig
    if args.coming_from or args.run is None:
        print(aliases.markdown() if args.coming_from else markdown_table(table))
        return
    run = Run(named_config(args), table)
    problems, remarks = run.check()
    run.close()
    for remark in remarks:
        print(f"Note: {remark}", flush=True)
    if problems:
        raise ConfigError(*problems)
    print(f"{args.run}: no mistake found.")


def sample() -> None:
    """``torchtune-grpo sample``: prints what a policy answers.

        torchtune-grpo sample llama3_2_1B_lora_grpo --prompt "What is 3 + 4?"
        torchtune-grpo sample OUTPUT_DIR temperature=0.7 --num-prompts 2

    Prompts are encoded like those of the config's data set: system prompt, chat format and prefill.
    Without a prompt, the data set's first ones are taken, and the rewards score the responses. The
    weights are those of the newest checkpoint in ``output_dir``; before the first checkpoint, or
    with ``--base``, those that training starts from. A model's folder can replace the config; a
    checkpoint's knows how it was asked in training.
    """
    parser = argparse.ArgumentParser(description="Prints what a policy answers.")
    add_run(parser)
    parser.add_argument("--prompt", action="append", default=[], help="may be repeated")
    parser.add_argument("--num-prompts", type=count, default=1, help="of the data set (default: 1)")
    parser.add_argument("--samples", type=count, help="for each prompt (default: grpo_samples)")
    parser.add_argument("--base", action="store_true", help="take the weights before training")
    args = parse(parser)
    for text in args.overrides:
        if "=" not in text and not text.startswith("~"):
            raise ValueError(f"{text}: not key=value; for a prompt, write --prompt {text!r}.")
    folder = Path(args.run)
    if (folder / "config.json").is_file() or awaits_conversion(folder):
        # New adapters change nothing. There is no run, so output_dir need not exist.
        model = [_path("model_dir", folder), _path("output_dir", folder / "samples")]
        card = ModelCard.found(folder)  # of a checkpoint, which is asked as in training
        form = {"_component_": "torchtune_grpo.data.RLDataset", **(card.asked if card else {})}
        data = f"dataset={json.dumps(form)}"
        args.run, args.overrides = "hf_lora_grpo", [*model, data, *args.overrides]
    cfg = run_config(args)
    has_rows = cfg.dataset.get("source") is not None or cfg.dataset.get("rows") is not None
    if cfg.dataset._component_.endswith(".RLDataset") and not has_rows:
        if not args.prompt:
            missing = "a model has no data, and rows in memory are gone; give --prompt."
            raise ValueError(f"dataset.source: {missing}")
        do_without_data(cfg)
    run = Run(cfg)
    run.prepare_model()
    _print_samples(run, args)
    run.close()


def _print_samples(run: Run, args: argparse.Namespace) -> None:
    first = range(min(args.num_prompts, len(run.dataset)))
    items = run.items_of(args.prompt) if args.prompt else [run.dataset[i] for i in first]
    group_size = args.samples or run.cfg.grpo_samples
    folder = None if args.base else run.newest_checkpoint()
    rows = run.answer(
        run.load_engine(folder),
        items,
        group_size=group_size,
        params=run.cfg.sampling_params,
        seed=run.cfg.seed,
    )
    verdicts, read = [""] * rows.num_rows, list[str]()
    if not args.prompt:
        scores = run.rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
            trainer_state=TrainerState(step_of(folder) if folder else 0, run.cfg.num_steps),
        )
        named = [dict(zip(scores.names, row, strict=True)) for row in to_json(scores.scores)]
        totals = to_json(scores.total)  # None where no reward applies
        verdicts = [*map(_verdict, totals, named)]
        used = {column for reward in run.rewards.rewards for column in reward.columns}
        read = [name for name in rows.columns if name in used]
    for row, completion in enumerate(rows.completions):
        if row % group_size == 0:
            print(f"\n=== {visible(str(rows.prompts[row]))}")
            for name in read:
                print(f"{name}: {shortened(str(rows.columns[name][row]), 200)}")
        length = int(rows.sampled_lengths[row])
        cut = ", cut off" if rows.truncated[row] else ""
        print(f"\n--- sample {row % group_size + 1}: {length} tokens{cut}{verdicts[row]}")
        print(visible(str(completion)))


def _verdict(total: float | None, scores: Mapping[str, float | None]) -> str:
    parts = ", ".join(f"{n} {'none' if s is None else f'{s:g}'}" for n, s in scores.items())
    return f", {'not scored' if total is None else f'reward {total:.3f}'} ({parts})"
