"""Short runs whose metrics and final weights are compared with recorded ones.

``python tests/golden/test_golden.py [name ...]`` records them anew in ``golden.json``; a commit
that has new numbers says which ones changed, and why. ``tests/fork_server.py`` pins the kernels of
torch, MKL and oneDNN; on another CPU the numbers then differ by 1e-7, and in bf16 by much more.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

import pytest
import torch
from runs import RECIPE, metrics, random_tiny_llama, run_ranks, tiny_overrides, tune
from safetensors.torch import load_file

GOLDEN = Path(__file__).with_name("golden.json")
TIMINGS = ("time/", "step_time", "tokens_per_second", "rollout/tokens_per_second")
# A reward with a spread in nearly every group of a model that knows nothing.
REWARDS = """
def vowels(prompts, completions, **columns):
    return [sum(map(text.lower().count, "aeiou0123")) % 4 / 3 for text in completions]

def often_equal(prompts, completions, **columns):
    return [float(sum(map(text.lower().count, "aeiou0123")) % 4 == 0) for text in completions]
"""
QUICK = """
model_dir=tiny_llama num_steps=3 batch_size=4 grpo_samples=4 forward_batch_size=8
max_generated_tokens=10 dataset.num_samples=64 eval_dataset.num_samples=6
evaluation.every_n_steps=null
evaluation.samples=2 output_dir=out sampling.stop_strings=[e,o,'7']
rewards.0=golden_rewards.vowels rewards.0.name=vowels
""".split()
LORA = "model=torchtune_grpo.models.lora_hf_model"


def tiny(*more: str, folder: Path, ranks: int = 1) -> None:
    """Run the demo with random weights and some changes."""
    given = ["--config", "tiny_arithmetic_grpo", *QUICK, *more]
    if ranks == 1:
        tune("run", RECIPE, *given, cwd=folder)
    else:
        run_ranks(*given, ranks=ranks, cwd=folder)


def torchtune_model(config: str, folder: Path) -> None:
    """Run with torchtune's builder, tokenizer and checkpointer, and rows in GSM8K's format."""
    rewards = "rewards=[{_component_: golden_rewards.vowels}]"
    more = ["num_steps=3", rewards, "eval_dataset.num_samples=5", "lr_scheduler=null"]
    command = ["run", RECIPE, "--config", config, *tiny_overrides(config, folder), "dtype=fp32"]
    tune(*command, *more, cwd=folder, TORCHDYNAMO_DISABLE="1")


# A run for each way that weights are held, sampled from and trained; tests of parity and invariance
# compare the losses, the log-probs and the ranks themselves.
RUNS: dict[str, Callable[..., None]] = {
    "full": tiny,
    "lora_kl": partial(tiny, LORA, "loss.kl_coeff=0.1", "optimizer.lr=1e-2"),
    "torchtune_qlora": partial(torchtune_model, "llama3_2_1B_qlora_grpo"),
    "two_epochs_two_minibatches": partial(
        tiny, "ppo_epochs=2", "num_minibatches=2", "loss.kl_coeff=0.1"
    ),
    "dapo": partial(
        tiny,
        "loss.aggregation=dapo",
        "loss.epsilon_high=0.28",
        "objective.mask_truncated_completions=true",
    ),
    "dynamic_sampling": partial(
        tiny,
        "dynamic_sampling.max_resamples=2",
        "objective.sampling_correction=token_truncate",
        "rewards.0=golden_rewards.often_equal",
    ),
    "sharded_on_2_ranks": partial(
        tiny, "distributed.sharding=always", "loss.kl_coeff=0.1", "batch_size=2", ranks=2
    ),
}


def record(name: str, folder: Path) -> dict[str, Any]:
    """Return a run's metrics, and a number for each of the last checkpoint's weights."""
    (folder / "golden_rewards.py").write_text(REWARDS)
    random_tiny_llama(folder)
    RUNS[name](folder=folder)
    lines = [
        {key: value for key, value in line.items() if not key.startswith(TIMINGS)}
        for line in metrics(folder / "out")
    ]
    newest = max((folder / "out").glob("step_*"))
    tensors = {
        f"{file.stem}/{name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return {"metrics": lines, "weights": {name: waves(t) for name, t in sorted(tensors.items())}}


def waves(tensor: torch.Tensor) -> float:
    """Return a weighted sum that depends on each element and on their order."""
    values = tensor.flatten().double()
    return float(values @ torch.arange(len(values)).double().cos())


@pytest.mark.parametrize("name", RUNS)
def test_golden(name, tmp_path):
    """Adam turns rounding into steps where gradients are nearly 0, so weights have more room."""
    wanted = json.loads(GOLDEN.read_text())[name]
    found = record(name, tmp_path)
    assert len(found["metrics"]) == len(wanted["metrics"])
    for now, then in zip(found["metrics"], wanted["metrics"]):
        differ = {
            key: (now.get(key), value)
            for key, value in then.items()
            if now.get(key) != pytest.approx(value, rel=1e-4, abs=1e-5)
        }
        assert not differ, f"step {then['step']}, (now, recorded): {differ}"
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-3, abs=5e-3)


def main() -> None:
    """Record the runs named on the command line, or all."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            golden[name] = record(name, Path(folder))
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items()]
    text = ",\n".join(lines).replace("}, {", "},\n {")
    GOLDEN.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
