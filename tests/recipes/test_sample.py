"""`python -m torchtune_grpo.sample` shows what a policy says: base weights, then trained ones."""

from runs import run, run_tiny, tiny_overrides

CONFIG = "llama3_2_1B_lora_grpo"
LENGTH_REWARD = """
def reward_length(prompts, completions, **columns):
    return [float(len(c) % 7) for c in completions]
"""


def say(folder, *commands: list[str]) -> list[str]:
    """What ``python -m torchtune_grpo.sample`` prints for each command."""
    start = ["-m", "torchtune_grpo.sample", "--config", CONFIG, "--samples", "2"]
    settings = ["--set", *tiny_overrides(CONFIG, folder), "dtype=fp32"]
    return [run(*start, *each, *settings, cwd=folder).out for each in commands]


def samples(text: str) -> str:
    return text[text.index("===") :]


def test_shows_samples_of_base_and_trained_weights(tmp_path):
    question, shown = "2 plus 2?\x1b[2J", r"2 plus 2?\x1b[2J"
    (base,) = say(tmp_path, [question])
    assert base.count("--- sample") == 2 and f"=== {shown}" in base and "\x1b" not in base
    assert str(tmp_path / "llama") in base
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)  # always has spread: weights move
    reward = "rewards=[{_component_: my_rewards.reward_length}]"
    settings = ("dtype=fp32", "optimizer.lr=0.1", "lr_scheduler.num_warmup_steps=0", "num_steps=1")
    run_tiny(CONFIG, tmp_path, reward, *settings)
    trained, again, of_data = say(
        tmp_path, [question], ["--base", question], ["--num-prompts", "2"]
    )
    assert "step_000001" in trained and samples(trained) != samples(base)
    assert samples(again) == samples(base)
    assert of_data.count("=== ") == 2 and of_data.count(", reward ") == 4


def test_errors_name_key_and_remedy_without_a_traceback(tmp_path):
    command = ["-m", "torchtune_grpo.sample", "--config", CONFIG, "hi", "--set", "temprature=1"]
    done = run(*command, cwd=tmp_path, check=False)
    assert done.code == 1
    assert "Did you mean temperature?" in done.err and "Traceback" not in done.err
