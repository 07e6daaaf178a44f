"""The presets of docs/objectives.md: accepted, without idle keys, and what their papers say."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.keys import without_effect
from torchtune_grpo.loss import make_loss

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text()
BLOCKS = re.findall(r"```yaml\n# ([^:]+):.*\n((?:.|\n)*?)```", PAGE)
PRESETS = {name: yaml.safe_load(text) for name, text in BLOCKS}


def read(name: str):
    cfg = OmegaConf.load(ROOT / "recipes" / "configs" / "tiny_arithmetic_grpo.yaml")
    return read_config(OmegaConf.merge(cfg, PRESETS[name]))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_accepted_and_acts(name):
    """No key is unknown, or without effect; each stands in the table of what they did."""
    settings = read(name)
    assert list(without_effect(settings)) == []
    loss = make_loss(settings.loss)
    assert loss.needs_reference == (name == "GRPO")
    assert re.search(rf"^\| {re.escape(name)} \| ", PAGE, re.M)


def test_presets_are_what_their_papers_say():
    objectives = {}
    for name in PRESETS:
        settings = read(name)
        loss = make_loss(settings.loss)
        ratio = "sequence" if loss.importance_sampling_level == "sequence" else loss.surrogate
        objectives[name] = (settings.objective.advantage, loss.aggregation, ratio, *loss.epsilons)
    assert objectives == {
        "GRPO": ("group", "grpo", "clipped", 0.2, 0.2),
        "Dr. GRPO": ("none", "dr_grpo", "clipped", 0.2, 0.2),
        "DAPO": ("group", "dapo", "clipped", 0.2, 0.28),
        "GSPO": ("group", "grpo", "sequence", 3e-4, 4e-4),
        "ScaleRL": ("batch", "prompt", "cispo", 1.0, 4.0),
        "DPPO": ("group", "dapo", "dppo", 0.15, 0.15),
        "GDPO": ("group", "dapo", "clipped", 0.2, 0.2),
        "MaxRL": ("max_rl", "dr_grpo", "clipped", 0.2, 0.2),
    }
    assert read("GDPO").objective.multi_objective_aggregation == "normalize_then_sum"
    assert read("DPPO").objective.sampling_correction == "old_logprobs"
