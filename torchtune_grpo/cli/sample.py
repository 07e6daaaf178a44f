"""Looks at what a policy says.

    torchtune-grpo sample --config llama3_2_1B_lora_grpo "What is 3 + 4?"
    torchtune-grpo sample --config my_config.yaml temperature=0.7 --num-prompts 2

The prompt is encoded like those of the config's data set: system prompt, chat format and prefill.
Without a prompt, the first ones of the data set are taken, and the rewards score the responses. The
weights are those of the newest checkpoint in ``output_dir``; before the first one, or with
``--base``, those that training starts from.

``key=value`` and ``~key`` change the config, as for ``tune``. With white space in it, that is a
prompt unless there is such a key: ``x=3, what is x?`` is one, and ``dataset.prefill=So, `` is not.
A space in front makes a prompt of anything.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.checkpoint import Checkpoints
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.errors import told_in_one_line
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import visible
from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.machine import parallel
from torchtune_grpo.machine.device import find_device, keep_freed_memory, limit_threads
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.rollout import RolloutEngine, make_engine, roll_out
from torchtune_grpo.training.policy import build_policy, empty_model, should_shard
from torchtune_grpo.training.policy_checks import check_model

CONFIG_HELP = "name of a shipped config, a file, or the folder of a run"
CONFIG_FILE = "torchtune_config.yaml"  # in a run's folder; torchtune's metric loggers write it
_OVERRIDE = re.compile(r"(?=~|[\w.]+=)~?([A-Za-z_]\w*)[\w.]*(?:=|$)")
_KEYS = {*GRPOConfig.model_fields}


def main() -> None:
    """Entry point of ``torchtune-grpo sample``."""
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo sample", description="Looks at what a policy says."
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="prompt, or key=value",
        help="without a prompt, the data set's first ones; key=value overrides one of the config",
    )
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument("--num-prompts", type=int, default=1, help="of the data set (default: 1)")
    parser.add_argument("--samples", type=int, help="for each prompt (default: grpo_samples)")
    parser.add_argument("--base", action="store_true", help="take the weights before training")
    args = parser.parse_intermixed_args()
    overrides = [text for text in args.prompts if is_override(text)]
    args.prompts = [text for text in args.prompts if not is_override(text)]
    with told_in_one_line():
        _say(read_config(load_run_config(args.config, overrides)), args)


def is_override(text: str) -> bool:
    """Whether an argument changes the config, and is no prompt; see the module's docstring."""
    match = _OVERRIDE.match(text)
    return match is not None and (match[1] in _KEYS or not re.search(r"\s", text))


def load_run_config(name: str, overrides: list[str]) -> DictConfig:
    """A config, or that of a run's folder, without keys that only a recipe of one's own reads.

    Raises:
        ValueError: if there is none, or an override is misspelt or cannot be applied.
    """
    if Path(name).is_dir():
        overrides, name = [f"output_dir={name}", *overrides], str(Path(name, CONFIG_FILE))
    cfg = load_config(name, overrides)
    given = {match[1] for text in overrides if (match := _OVERRIDE.match(text))}
    own = sorted(map(str, set(cfg) - _KEYS - given))
    for key in own:
        del cfg[key]
    if own and parallel.rank() == 0:
        print(f"Left out, as keys of another recipe: {', '.join(own)}")
    return cfg


def open_run(cfg: GRPOConfig) -> tuple[torch.device, Any]:
    """Joins the ranks, if there are any, and checks files; returns the device and the tokenizer."""
    device = find_device(cfg.device)
    parallel.init_process_group(device)
    parallel.on_first_rank(config.instantiate, cfg.prepare)
    check_model(cfg)
    if device.type == "cpu":
        keep_freed_memory()
        limit_threads(empty_model(cfg))
    return device, instantiate("tokenizer", cfg.tokenizer)


def newest_checkpoint(cfg: GRPOConfig) -> Path | None:
    """A run's newest one; None before the first one."""
    with contextlib.suppress(ValueError):
        return Checkpoints.of_run(cfg).newest()
    return None


def load_policy(cfg: GRPOConfig, *, device: torch.device, checkpoint: Path | None) -> RolloutEngine:
    """Samples from the weights of a checkpoint, or with None from those that a run starts from."""
    checkpoints, is_sharded = Checkpoints.of_run(cfg), should_shard(cfg, device=device)
    start = " with ".join(filter(None, [cfg.checkpointer.checkpoint_dir, cfg.adapter_dir]))
    if parallel.rank() == 0:
        print(f"Weights: {checkpoint or start}")
    if checkpoint is not None:
        checkpoints.check_policy(checkpoint)
    home = torch.device("cpu") if is_sharded else device
    model = build_policy(cfg, checkpoints.base_weights(), device=home)
    if checkpoint is not None:
        checkpoints.restore(model, checkpoint)
    engine = make_engine(
        model.eval(),
        cfg.rollout,
        is_sharded=is_sharded,
        device=device,
    )
    if is_sharded:
        parallel.shard(model, cfg.distributed, device=device)
    return engine


def items_of(prompts: Sequence[Any], dataset: RLDataset) -> list[dict[str, Any]]:
    """Prompts that are not in a data set as items of it."""
    return [
        {"index": i, "tokens": dataset.encode(prompt), "prompt": prompt, "columns": {}}
        for i, prompt in enumerate(prompts)
    ]


def _say(cfg: GRPOConfig, args: argparse.Namespace) -> None:
    device, tokenizer = open_run(cfg)
    dataset = _dataset(cfg, tokenizer, rows=1 if args.prompts else args.num_prompts)
    items = [dataset[i] for i in range(min(args.num_prompts, len(dataset)))]
    if args.prompts:
        items = items_of(args.prompts, dataset)
    group_size = args.samples or cfg.grpo_samples
    rows = roll_out(
        load_policy(cfg, device=device, checkpoint=None if args.base else newest_checkpoint(cfg)),
        collate_prompts(items),
        tokenizer=tokenizer,
        group_size=group_size,
        params=cfg.sampling_params,
        prefill=dataset.prefill,
        seed=cfg.seed,
        step=0,
    )
    said = [""] * rows.num_rows
    if not args.prompts:
        rewards = RewardSet.from_config(cfg.rewards)
        with contextlib.closing(rewards):
            scores = rewards(
                prompts=rows.prompts,
                completions=rows.completions,
                columns=rows.columns,
                completion_ids=rows.completion_ids,
            )
        said = [f", reward {total:.3f}" for total in scores.total.tolist()]
    for row, completion in enumerate(rows.completions):
        if row % group_size == 0:
            print(f"\n=== {visible(rows.prompts[row])}")
        length = int(rows.response_lengths[row])
        cut = ", cut off" if rows.truncated[row] else ""
        print(f"\n--- sample {row % group_size + 1}: {length} tokens{cut}{said[row]}")
        print(visible(completion))


def _dataset(cfg: GRPOConfig, tokenizer: Any, *, rows: int) -> RLDataset:
    """The config's data set, of which only the first rows are read where it can be told so."""
    component = _get_component_from_path(cfg.dataset._component_)
    takes = inspect.signature(component).parameters
    limit = {"num_samples": rows} if "num_samples" in takes else {}
    return instantiate("dataset", cfg.dataset, tokenizer, **limit)
