"""Real runs on a GPU beside the same runs on a CPU."""

import math
from pathlib import Path

import pytest
import torch
from runs import EAGER, LENGTH_REWARD, OF_LENGTH, SGD, distance, metrics, run_tiny, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEP = "step_000001"
LLAMA = ["llama3_2_1B_lora_grpo", "llama3_2_1B_qlora_grpo", "llama3_2_1B_full_grpo"]


def run(folder: Path, config: str, *more: str) -> Path:
    """Run a config made tiny; return its output folder."""
    folder.mkdir()
    (folder / "my_rewards.py").write_text(LENGTH_REWARD)
    run_tiny(config, folder, OF_LENGTH, *more, PYTHONPATH=str(folder), **EAGER)
    return folder / "out"


@pytest.mark.parametrize("config", LLAMA)
def test_shipped_configs_train_evaluate_and_save(tmp_path, config):
    out = run(tmp_path / "gpu", config, "device=cuda")
    steps = [line for line in metrics(out) if "loss" in line]
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert (out / "step_000002" / "config.json").is_file()


@pytest.mark.parametrize("config", [LLAMA[0], LLAMA[2]])
def test_a_step_in_float32_equals_a_cpus(tmp_path, config):
    """Weights are equal to 1e-4: kernels round differently."""
    cpu, gpu = (
        weights(run(tmp_path / device, config, *SGD, "num_steps=1", f"device={device}") / STEP)
        for device in ("cpu", "cuda")
    )
    assert distance(weights(tmp_path / "cpu" / "llama"), cpu) > 0
    assert distance(gpu, cpu) <= 1e-4
