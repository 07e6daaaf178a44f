"""Every step has a learning rate at which it changes something."""

import pytest
import torch

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.training.optimizer import make_lr_scheduler


def rates(*changes: str) -> list[float]:
    """Of all optimizer steps of a run."""
    cfg = read_config(load_config("tiny_arithmetic_grpo", ["num_steps=6", *changes]))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_lr_scheduler(cfg, optimizer)
    seen = []
    for _ in range(cfg.num_steps * cfg.ppo_epochs):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return seen


def test_a_warm_up_starts_behind_0_and_the_schedule_ends_before_it():
    """Warm-up of 2 in 6 steps: 1/2, 2/2, then half a cosine of 5 steps, without its 0."""
    cosine = [0.5 + 0.5 * torch.tensor(k * torch.pi / 5).cos().item() for k in range(1, 5)]
    assert rates("lr_scheduler.num_warmup_steps=2") == pytest.approx([0.5, 1, *cosine])
    assert len(rates("ppo_epochs=3")) == 18 and min(rates("ppo_epochs=3")) > 0


def test_a_schedule_that_does_not_start_at_0_is_as_it_is():
    cosine = [0.5 + 0.5 * torch.tensor(k * torch.pi / 6).cos().item() for k in range(6)]
    assert rates("lr_scheduler.num_warmup_steps=0") == pytest.approx(cosine)
    assert rates("lr_scheduler=null") == [1.0] * 6
