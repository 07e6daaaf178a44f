"""Looks at what a policy says.

    python -m torchtune_grpo.sample --config llama3_2_1B_lora_grpo "What is 3 + 4?"
    python -m torchtune_grpo.sample --config my_config.yaml temperature=0.7 --num-prompts 2

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
from dataclasses import fields
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.checkpoint import Checkpoints
from torchtune_grpo.command_line import load_config
from torchtune_grpo.components import instantiate
from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.device import find_device
from torchtune_grpo.errors import told_in_one_line
from torchtune_grpo.memory import keep_freed_memory
from torchtune_grpo.plain import visible
from torchtune_grpo.policy import build_policy, empty_model
from torchtune_grpo.read_config import check_checkpoint_files, read_config
from torchtune_grpo.rewards import RewardScores, RewardSet
from torchtune_grpo.rollout import RolloutEngine, SamplingParams, make_engine, roll_out
from torchtune_grpo.threads import limit_threads
from torchtune_grpo.trajectory import Trajectory

_OVERRIDE = re.compile(r"(?=~|[\w.]+=)~?([A-Za-z_]\w*)[\w.]*(?:=|$)")
_KEYS = {field.name for field in fields(GRPOConfig)}


def main() -> None:
    """Entry point of ``python -m torchtune_grpo.sample``."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_grpo.sample", description="Looks at what a policy says."
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="prompt, or key=value",
        help="without a prompt, the data set's first ones; key=value overrides one of the config",
    )
    parser.add_argument("--config", required=True, help="name of a shipped config, or a file")
    parser.add_argument("--num-prompts", type=int, default=1, help="of the data set (default: 1)")
    parser.add_argument("--samples", type=int, help="for each prompt (default: grpo_samples)")
    parser.add_argument("--base", action="store_true", help="take the weights before training")
    args = parser.parse_intermixed_args()
    overrides = [text for text in args.prompts if is_override(text)]
    args.prompts = [text for text in args.prompts if not is_override(text)]
    with told_in_one_line():
        cfg = load_config(args.config, overrides)
        leave_out_own_keys(cfg, overrides)
        _say(read_config(cfg), args)


def is_override(text: str) -> bool:
    """Whether an argument changes the config, and is no prompt; see the module's docstring."""
    match = _OVERRIDE.match(text)
    return match is not None and (match[1] in _KEYS or not re.search(r"\s", text))


def leave_out_own_keys(cfg: DictConfig, overrides: list[str]) -> None:
    """Those of the file that only a recipe of one's own reads; a misspelt override stays."""
    given = {match[1] for text in overrides if (match := _OVERRIDE.match(text))}
    own = sorted(set(cfg) - _KEYS - given)
    for name in own:
        del cfg[name]
    if own:
        print(f"Left out, as keys of another recipe: {', '.join(own)}")


def open_run(cfg: GRPOConfig) -> tuple[torch.device, Any]:
    """Checks the files that a config names; returns the device and the tokenizer."""
    device = find_device(cfg.device)
    config.instantiate(cfg.prepare)
    check_checkpoint_files(cfg)
    if device.type == "cpu":
        keep_freed_memory()
        limit_threads(empty_model(cfg))
    return device, instantiate("tokenizer", cfg.tokenizer)


def items_of(prompts: Sequence[Any], dataset: RLDataset) -> list[dict[str, Any]]:
    """Prompts that are not in a data set as items of it."""
    return [
        {"index": i, "tokens": dataset.encode(prompt), "prompt": prompt, "columns": {}}
        for i, prompt in enumerate(prompts)
    ]


def generate(
    engine: RolloutEngine,
    items: list[dict[str, Any]],
    *,
    tokenizer: Any,
    params: SamplingParams,
    group_size: int,
    prefill: str,
    seed: int,
) -> Trajectory:
    """A policy's answers to items of a data set, ``group_size`` to each."""
    return roll_out(
        engine,
        collate_prompts(items),
        tokenizer=tokenizer,
        group_size=group_size,
        params=params,
        prefill=prefill,
        seed=seed,
        step=0,
    )


def score(cfg: GRPOConfig, rows: Trajectory) -> RewardScores:
    """What the config's rewards say about answers."""
    rewards = RewardSet.from_config(cfg.rewards)
    try:
        return rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
        )
    finally:
        rewards.close()


def _say(cfg: GRPOConfig, args: argparse.Namespace) -> None:
    device, tokenizer = open_run(cfg)
    dataset = _dataset(cfg, tokenizer, rows=1 if args.prompts else args.num_prompts)
    items = [dataset[i] for i in range(min(args.num_prompts, len(dataset)))]
    if args.prompts:
        items = items_of(args.prompts, dataset)
    group_size = args.samples or cfg.grpo_samples
    rows = generate(
        load_policy(cfg, device=device, base=args.base),
        items,
        tokenizer=tokenizer,
        params=cfg.sampling_params,
        group_size=group_size,
        prefill=dataset.prefill,
        seed=cfg.seed,
    )
    rewards = [""] * rows.num_rows
    if not args.prompts:
        rewards = [f", reward {total:.3f}" for total in score(cfg, rows).total.tolist()]
    for row, completion in enumerate(rows.completions):
        if row % group_size == 0:
            print(f"\n=== {visible(rows.prompts[row])}")
        length = int(rows.response_lengths[row])
        cut = ", cut off" if rows.truncated[row] else ""
        print(f"\n--- sample {row % group_size + 1}: {length} tokens{cut}{rewards[row]}")
        print(visible(completion))


def _dataset(cfg: GRPOConfig, tokenizer: Any, *, rows: int) -> RLDataset:
    """The config's data set, of which only the first rows are read where it can be told so."""
    component = _get_component_from_path(cfg.dataset._component_)
    limit = (
        {"num_samples": rows} if "num_samples" in inspect.signature(component).parameters else {}
    )
    return instantiate("dataset", cfg.dataset, tokenizer, **limit)


def load_policy(cfg: GRPOConfig, *, device: torch.device, base: bool) -> RolloutEngine:
    """Samples from a run's newest weights, or with ``base`` from those that it started from."""
    checkpoints = Checkpoints.of_run(cfg)
    trained = None
    if not base:
        with contextlib.suppress(ValueError):  # before the first one
            trained = checkpoints.newest()
    start = " with ".join(filter(None, [cfg.checkpointer.checkpoint_dir, cfg.adapter_dir]))
    print(f"Weights: {trained or start}")
    if trained is not None:
        checkpoints.check_policy(trained)
    model = build_policy(cfg, checkpoints.base_weights(), device=device)
    if trained is not None:
        checkpoints.restore(model, trained)
    return make_engine(model.eval(), cfg.rollout)


if __name__ == "__main__":
    main()
