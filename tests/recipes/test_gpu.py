"""Real runs on a GPU beside the same runs on a CPU."""

import math
from pathlib import Path

import pytest
import torch
from runs import EAGER, metrics, run_tiny
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LLAMA = ["llama3_2_1B_lora_grpo", "llama3_2_1B_qlora_grpo", "llama3_2_1B_full_grpo"]
# Groups whose rewards differ, so that there is something to learn.
REWARD = (
    "def reward_length(completions, **columns):\n    return [len(c) % 7 for c in completions]\n"
)
ONE_STEP = ["num_steps=1", "optimizer=torch.optim.SGD", "optimizer.lr=0.5", "lr_scheduler=null"]


def run(folder: Path, config: str, *more: str) -> Path:
    """Where the run writes to."""
    folder.mkdir()
    (folder / "my_rewards.py").write_text(REWARD)
    reward = "rewards=[{_component_: my_rewards.reward_length}]"
    run_tiny(config, folder, reward, *more, PYTHONPATH=str(folder), **EAGER)
    return folder / "out"


@pytest.mark.parametrize("config", LLAMA)
def test_shipped_configs_train_evaluate_and_save(tmp_path, config):
    out = run(tmp_path / "gpu", config, "device=cuda")
    steps = [line for line in metrics(out) if "loss" in line]
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert (out / "step_000002" / "config.json").is_file()


@pytest.mark.parametrize("config", [LLAMA[0], LLAMA[2]])
def test_a_step_in_float32_is_that_of_a_cpu(tmp_path, config):
    """To 1e-4: kernels round differently."""
    weights = {}
    for device in ("cpu", "cuda"):
        out = run(tmp_path / device, config, *ONE_STEP, "dtype=fp32", f"device={device}")
        files = (out / "step_000001").glob("model*.safetensors")
        weights[device] = {k: v for file in files for k, v in load_file(file).items()}
    start = load_file(tmp_path / "cpu" / "llama" / "model.safetensors")
    assert any(not torch.equal(value, start[key]) for key, value in weights["cpu"].items())
    torch.testing.assert_close(weights["cuda"], weights["cpu"], atol=1e-4, rtol=0)
