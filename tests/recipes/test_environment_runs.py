"""Runs with an environment through the real command."""

import json

from runs import RECIPE, metrics, run, tune


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
