"""The worked example of docs/loss.md, run as it stands on the page."""

import math
import re
from pathlib import Path

import yaml
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

CONFIG = "llama3_2_1B_lora_grpo"


def test_the_example_trains(tmp_path):
    """At most 20 lines; weights move, and the loss's own metric is in each step's log."""
    page = (Path(__file__).parents[2] / "docs" / "loss.md").read_text()
    (source,) = re.findall(r"```python\n(# my_loss.py\n.*?)```", page, re.DOTALL)
    (node,) = re.findall(r"```yaml\n(loss:\n +_component_: my_loss\..*?)```", page, re.DOTALL)
    (own,) = re.findall(r"The metric `([\w/]+)`", page)
    assert len(source.splitlines()) <= 20
    work = tmp_path / "work"
    work.mkdir()
    (work / "my_loss.py").write_text(source)
    (work / "my_rewards.py").write_text(LENGTH_REWARD)
    tune("cp", CONFIG, "my_config.yaml", cwd=work)
    config = yaml.safe_load((work / "my_config.yaml").read_text()) | yaml.safe_load(node)
    config["rewards"] = [{"_component_": "my_rewards.reward_length"}]
    (work / "my_config.yaml").write_text(yaml.safe_dump(config))
    small = ["batch_size=2", "grpo_samples=4", "dtype=fp32", "optimizer.lr=1e-2", "ppo_epochs=2"]
    small += ["lr_scheduler=null", *NO_EVALUATION]
    overrides = [*tiny_overrides(CONFIG, tmp_path), *small]
    tune("run", RECIPE, "--config", "my_config.yaml", *overrides, cwd=work)

    after = weights(tmp_path / "out" / "step_000002")
    assert distance(weights(tmp_path / "llama"), after) > 1e-3
    steps = metrics(tmp_path / "out")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step[own]) for step in steps)
