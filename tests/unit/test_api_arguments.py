"""What is given to GRPO as Python values becomes keys of a config."""

import numpy
import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo.api import _dotpath, _set_key
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.rewards import CodeReward, math_correctness_reward


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"num_steps": 7}, "num_steps", 7),
        ({"loss_kl_coeff": 0.5}, "loss.kl_coeff", 0.5),
        ({"loss_aggregation": "dapo"}, "loss.aggregation", "dapo"),  # not in the node before
        ({"optimizer": {"lr": 0.5}}, "optimizer.weight_decay", 0.0),  # stays
        ({"optimizer": torch.optim.SGD}, "optimizer._component_", "torch.optim.sgd.SGD"),
        ({"lr_scheduler_num_warmup_steps": 2}, "lr_scheduler.num_warmup_steps", 2),
        ({"optimizer_betas": numpy.array([0.5, 0.9])}, "optimizer.betas", [0.5, 0.9]),
    ],
)
def test_a_name_is_a_key_of_the_config(given, key, value):
    cfg = load_config("tiny_arithmetic_grpo")
    for name, given_value in given.items():
        _set_key(cfg, name, given_value)
    assert OmegaConf.select(cfg, key) == value


def test_what_can_be_imported_has_a_dotpath():
    name = math_correctness_reward.__module__ + ".math_correctness_reward"
    assert _dotpath(math_correctness_reward) == name
    for hidden in (lambda: 0, CodeReward(), 3):
        assert _dotpath(hidden) is None
