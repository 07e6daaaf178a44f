"""The worked example of docs/loss.md, run as it stands on the page."""

import math
import re
import sys
from pathlib import Path

import torch
import yaml
from omegaconf import OmegaConf
from runs import (
    LENGTH_REWARD,
    NO_EVALUATION,
    RECIPE,
    distance,
    metrics,
    tiny_overrides,
    tune,
    weights,
)

from torchtune_grpo.loss import make_loss

CONFIG = "llama3_2_1B_lora_grpo"


def example() -> tuple[str, dict]:
    """The file and the config node that the page shows."""
    page = (Path(__file__).parents[2] / "docs" / "loss.md").read_text()
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL)
    (source,) = (text for kind, text in blocks if kind == "python" and "# my_loss.py" in text)
    nodes = [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]
    (node,) = (found for found in nodes if "my_loss." in found["loss"]["_component_"])
    assert source.startswith("# my_loss.py\n") and list(node) == ["loss"]
    return source, node


def logged_names(node: dict) -> set[str]:
    """The metrics of the loss, from a call on two rows of three tokens."""
    values = torch.full((2, 3), -1.0)
    loss = make_loss(OmegaConf.create(node["loss"]))
    mask = torch.ones(2, 3, dtype=torch.bool)
    prompts = torch.tensor([0, 0])
    totals = dict(num_rows=2, num_tokens=6, max_generated_tokens=3)
    weights = loss.weights(mask, prompt_indices=prompts, **totals)
    output = loss(
        logprobs=values.clone().requires_grad_(),
        old_logprobs=None,
        ref_logprobs=values,
        advantages=torch.tensor([1.0, -1.0]),
        weights=weights,
        response_mask=mask,
        entropy=values,
        corrections=None,
    )
    return set(output.sums)


def test_the_example_trains(tmp_path, monkeypatch):
    """At most 20 lines; weights move, and the loss's own metric is in each step's log."""
    source, node = example()
    assert len(source.splitlines()) <= 20
    work = tmp_path / "work"
    work.mkdir()
    (work / "my_loss.py").write_text(source)
    (work / "my_rewards.py").write_text(LENGTH_REWARD)
    tune("cp", CONFIG, "my_config.yaml", cwd=work)
    config = yaml.safe_load((work / "my_config.yaml").read_text()) | node
    config["rewards"] = [{"_component_": "my_rewards.reward_length"}]
    (work / "my_config.yaml").write_text(yaml.safe_dump(config))
    small = ["batch_size=2", "grpo_samples=4", "dtype=fp32", "optimizer.lr=1e-2", "ppo_epochs=2"]
    small += ["lr_scheduler=null", *NO_EVALUATION]
    overrides = [*tiny_overrides(CONFIG, tmp_path), *small]
    tune("run", RECIPE, "--config", "my_config.yaml", *overrides, cwd=work)

    after = weights(tmp_path / "out" / "step_000002")
    assert distance(weights(tmp_path / "llama"), after) > 1e-3
    monkeypatch.syspath_prepend(work)
    monkeypatch.setitem(sys.modules, "my_loss", None)
    del sys.modules["my_loss"]  # imported now, and forgotten when the test ends
    own = logged_names(node) - logged_names(
        {"loss": {"_component_": "torchtune_grpo.loss.GRPOLoss"}}
    )
    steps = metrics(tmp_path / "out")
    assert own and [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step[name]) for step in steps for name in own)
