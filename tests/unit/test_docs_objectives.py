"""The presets of docs/objectives.md: accepted, without idle keys, and what their papers say."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import without_effect
from torchtune_grpo.loss import make_loss

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
BLOCKS = re.findall(r"```yaml\n# ([^:]+):.*\n((?:.|\n)*?)```", PAGE)
PRESETS = {name: yaml.safe_load(text) for name, text in BLOCKS}


# The advantage, the aggregation, the ratio and its distances, as the papers have them.
OBJECTIVES = {
    "GRPO": ("group", "grpo", "clipped", 0.2, 0.2),
    "Dr. GRPO": ("none", "dr_grpo", "clipped", 0.2, 0.2),
    "DAPO": ("group", "dapo", "clipped", 0.2, 0.28),
    "GSPO": ("group", "grpo", "sequence", 3e-4, 4e-4),
    "ScaleRL": ("batch", "prompt", "cispo", 1.0, 4.0),
    "DPPO": ("group", "dapo", "dppo", 0.15, 0.15),
    "GDPO": ("group", "dapo", "clipped", 0.2, 0.2),
    "MaxRL": ("max_rl", "dr_grpo", "clipped", 0.2, 0.2),
}


@pytest.mark.parametrize("name", {**PRESETS, **OBJECTIVES})
def test_a_preset_is_what_its_paper_says(name):
    """No key is unknown, or without effect; each stands in the table of what they did."""
    settings = read_config(OmegaConf.merge(load_config("tiny_arithmetic_grpo"), PRESETS[name]))
    assert list(without_effect(settings)) == []
    assert re.search(rf"^\| {re.escape(name)} \| ", PAGE, re.M)
    loss, objective = make_loss(settings.loss), settings.objective
    ratio = "sequence" if loss.importance_sampling_level == "sequence" else loss.surrogate
    found = (objective.advantage, loss.aggregation, ratio, *loss.epsilons)
    assert found == OBJECTIVES[name]
    assert loss.needs_reference == (name == "GRPO")
    aggregation = objective.multi_objective_aggregation
    assert (aggregation == "normalize_then_sum") == (name == "GDPO")
    assert (objective.sampling_correction == "old_logprobs") == (name == "DPPO")
