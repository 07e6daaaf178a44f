"""Runs with an environment through the real command: two ranks, a resume, the record, the page."""

import json

import pytest
from runs import RECIPE, metrics, run, run_ranks, tune
from safetensors.torch import load_file

ENVIRONMENT = '''
class Sums:
    """Says whether a sum is too low or too high; turns differ from row to row."""

    def reset(self, answer, **row):
        self.answer, self.turns = int(answer), 0
        return " Try."

    def step(self, text):
        self.turns += 1
        numbers = [int(word) for word in text.replace("<", " ").split() if word.isdigit()]
        if not numbers or self.turns > 1 + self.answer % 3:
            return None, 0.1 * (len(text) % 5), True
        if numbers[-1] == self.answer:
            return None, 1.0, True
        return "higher" if numbers[-1] < self.answer else "lower", 0.0, False
'''
QUICK = """
environment._component_=my_env.Sums environment.max_response_tokens=80 rewards=[]
saving.every_n_steps=1 batch_size=2 grpo_samples=4 forward_batch_size=8 max_generated_tokens=40
dataset.num_samples=64 eval_dataset.num_samples=4 evaluation.samples=1 lr_scheduler=null
evaluation.every_n_steps=2
""".split()


@pytest.mark.slow
def test_two_ranks_resume_to_the_last_bit(tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)

    def train(folder, *more):
        config = ["--config", "tiny_arithmetic_grpo", *QUICK, f"output_dir={folder}", *more]
        return run_ranks(*config, ranks=2, cwd=tmp_path)

    train("whole", "num_steps=2")
    train("parts", "num_steps=1")
    train("parts", "num_steps=2", "resume_from_checkpoint=True")
    whole, parts = (
        load_file(next((tmp_path / name / "step_000002").glob("*.safetensors")))
        for name in ("whole", "parts")
    )
    assert all(whole[name].equal(parts[name]) for name in whole)

    steps = [event for event in metrics(tmp_path / "whole") if "reward" in event]
    assert all(event["environment/turns"] > 1 for event in steps)
    shares = [value for name, value in steps[0].items() if name.startswith("environment/ended/")]
    assert len(shares) == 7 and sum(shares) == 1
    assert "rewards/Sums/mean" in steps[0]
    assert [
        event
        for event in metrics(tmp_path / "whole")
        if "eval/Sums" in event or "eval/accuracy" in event
    ]
    rows = [json.loads(line) for line in (tmp_path / "whole/completions.jsonl").open()]
    talks = [row["messages"] for row in rows]
    assert any(
        [turn["role"] for turn in talk[:3]] == ["assistant", "user", "assistant"] for talk in talks
    )
    assert all(row["prompt"].endswith(" Try.") for row in rows)
    assert "[user] " in (tmp_path / "whole/run.html").read_text()


def test_the_game_runs_two_steps_and_is_played_from_its_checkpoint(tmp_path):
    command = ["run", RECIPE, "--config", "tiny_guess_grpo", "output_dir=out", "num_steps=2"]
    tune(*command, "grpo_samples=4", cwd=tmp_path)
    steps = [event for event in metrics(tmp_path / "out") if "reward" in event]
    assert len(steps) == 2 and all(1 < step["environment/turns"] <= 3 for step in steps)
    assert not any(name.startswith("tools/") for name in steps[0])  # it has none
    rows = [json.loads(line) for line in (tmp_path / "out/completions.jsonl").open()]
    assert any("lower, I guess " in row["completion"] for row in rows)
    shown = run("-m", "torchtune_grpo", "sample", "out", "--num-prompts", "1", cwd=tmp_path).out
    assert shown.count("<think>I guess ") == 4
