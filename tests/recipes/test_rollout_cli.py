"""`python -m torchtune_grpo.rollout` shows what a policy says: base weights, then trained ones."""

import subprocess
import sys

from runs import run_tiny, tiny_overrides

CONFIG = "llama3_2_1B_lora_grpo"
LENGTH_REWARD = """
def reward_length(prompts, completions, **columns):
    return [float(len(c) % 7) for c in completions]
"""


def say(folder, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torchtune_grpo.rollout", "--config", CONFIG, *args]
        + ["--set", *tiny_overrides(CONFIG, folder), "dtype=fp32"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def samples(text: str) -> str:
    return text[text.index("===") :]


def test_shows_samples_of_base_and_trained_weights(tmp_path):
    base = say(tmp_path, "--samples", "2", "2 plus 2?")
    assert base.count("--- sample") == 2 and "=== 2 plus 2?" in base
    assert str(tmp_path / "llama") in base
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)  # always has spread: weights move
    reward = "rewards=[{_component_: my_rewards.reward_length}]"
    settings = ("dtype=fp32", "optimizer.lr=0.1", "lr_scheduler.num_warmup_steps=0", "num_steps=1")
    run_tiny(CONFIG, tmp_path, reward, *settings)
    trained = say(tmp_path, "--samples", "2", "2 plus 2?")
    assert "step_000001" in trained and samples(trained) != samples(base)
    again = say(tmp_path, "--samples", "2", "--base", "2 plus 2?")
    assert samples(again) == samples(base)
    of_data = say(tmp_path, "--samples", "2", "--num-prompts", "2")
    assert of_data.count("=== ") == 2 and of_data.count(", reward ") == 4


def test_errors_name_key_and_remedy_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torchtune_grpo.rollout", "--config", CONFIG, "hi"]
        + ["--set", "temprature=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Did you mean temperature?" in done.stderr and "Traceback" not in done.stderr
