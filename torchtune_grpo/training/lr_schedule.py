"""The learning rate of each optimizer step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.keys import GRPOConfig


def make_lr_scheduler(cfg: GRPOConfig, optimizer: torch.optim.Optimizer) -> Any:
    """The config's ``lr_scheduler``, or None.

    torchtune's warm-up starts at 0, where a step of roll-out and update would change nothing. It is
    left out, and the schedule is stretched by that one step, so that it does not end at 0 either.

    Raises:
        ValueError: naming the argument, if it cannot be made.
    """
    if cfg.lr_scheduler is None:
        return None
    num_steps = cfg.num_steps * cfg.updates_per_step
    trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    instantiate("lr_scheduler", cfg.lr_scheduler, trial, num_training_steps=num_steps)
    starts_at_0 = trial.param_groups[0]["lr"] == 0
    scheduler = instantiate(
        "lr_scheduler", cfg.lr_scheduler, optimizer, num_training_steps=num_steps + starts_at_0
    )
    if starts_at_0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that the optimizer has taken no step
            scheduler.step()
    return scheduler
