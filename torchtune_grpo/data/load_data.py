"""The config's data sets, tokenized and checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.errors import Problems
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.data import RLDataset
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.training.policy_checks import check_prompts


def load_data(
    cfg: GRPOConfig,
    *,
    tokenizer: Any,
    rewards: RewardSet | None,
    keys: Sequence[str] = ("dataset", "eval_dataset"),
    alone: bool = False,
) -> dict[str, RLDataset]:
    """Makes ``dataset`` and, if the config has one, ``eval_dataset``; or one of them.

    Every rank calls it, or one of them ``alone``.

    Raises:
        ConfigError: where one cannot be read, lacks what a reward needs, or holds prompts that with
            their responses are too long for the model, or tokens that it lacks.
    """
    problems, data = Problems(), {}
    for name in keys:
        node = getattr(cfg, name)
        if node is not None:
            with problems.noted():
                data[name] = instantiate(name, node, tokenizer)
                if rewards is not None:
                    rewards.check_data(data[name], key=name, alone=alone)
    with problems.noted():
        check_prompts(
            cfg,
            longest={name: each.max_prompt_length for name, each in data.items()},
            highest_tokens={name: each.highest_token for name, each in data.items()},
        )
    problems.raise_any()
    return data
