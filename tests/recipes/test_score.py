"""`torchtune-grpo score`: a run's own rewards to the last bit again, and others beside them."""

import json
import re
from itertools import combinations
from statistics import fmean

import pytest
from runs import NO_EVALUATION, RECIPE, completions, read, run, tune

from torchtune_grpo.cli.commands import CONFIG_FILE

REWARDS = """
import random

def length(prompts, completions, completion_ids, trainer_state, **columns):
    return [float(len(ids) + 100 * trainer_state.global_step) for ids in completion_ids]

def draws(prompts, completions, long, **columns):
    return [random.random() + (text[-1] == "y") for text in long]

def words(prompts, completions, answer, **columns):
    return [None if int(gold) > 18 else len({*text}) % 3 for text, gold in zip(completions, answer)]
"""
RUN = """
num_steps=2 batch_size=4 grpo_samples=4 log_groups=3 max_generated_tokens=24 ~dataset.levels
dataset._component_=torchtune_grpo.data.RLDataset dataset.source=rows.json output_dir=out
""".split()
OWN = "rewards=[{_component_: my_rewards.length, weight: 0.01}"
OWN += ", {_component_: my_rewards.draws, isolation: process}]"
MATH = "torchtune_grpo.rewards.math_correctness_reward"


def score(folder, *arguments, **settings):
    return run("-m", "torchtune_grpo", "score", "out", *arguments, cwd=folder, **settings)


def table(text):
    """Name -> its numbers."""
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {name: numbers for name, *numbers in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a column that the record cuts, and a row that other rewards would leave out."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [
        {"prompt": f"{n} + 9?", "answer": str(n + 9), "long": "z" * 3000 + "y"} for n in range(12)
    ]
    rows[0]["answer"] = "none"
    (folder / "rows.json").write_text(json.dumps(rows))
    config = ["--config", "tiny_arithmetic_grpo", *RUN, OWN, *NO_EVALUATION]
    tune("run", RECIPE, *config, cwd=folder)
    saved = completions(folder / "out")
    assert len(saved) == 24 and {len(row["columns"]["long"]) for row in saved} == {2000}
    with (folder / "out/completions.jsonl").open("a") as file:
        file.write(json.dumps(saved[0]) + "\n")  # a group that a kill has torn
    with (folder / "out" / CONFIG_FILE).open("a") as file:
        file.write("mine: 1\n")  # as a fork's recipe reads
    return folder


@pytest.mark.slow
def test_a_runs_own_rewards_give_the_same_scores(folder):
    """Those that read token ids, the step, a column whole, and seeded random numbers, too."""
    said = score(folder).out
    assert "6 groups of 4: 75% of the run's answers are saved" in said
    assert said.count("Left out, as keys of another recipe: mine") == 1
    saved = completions(folder / "out")[:24]
    for name, values in (
        ("total", [row["reward"] for row in saved]),
        ("length", [row["rewards"]["length"] for row in saved]),
        ("draws", [row["rewards"]["draws"] for row in saved]),
    ):
        mean = f"{fmean(values):.3f}"
        assert table(said)[name] == [mean, mean, "1.000", "0"]


@pytest.mark.slow
def test_other_rewards_beside_the_old_ones(folder):
    rewards = f"rewards=[{{_component_: my_rewards.words, name: length}}, {MATH}]"
    keys = ["max_reward_failure_share=1.0", "--output", "new.jsonl"]
    said = score(folder, rewards, *keys).out
    rows = [json.loads(line) for line in (folder / "new.jsonl").read_text().splitlines()]
    saved = completions(folder / "out")[:24]
    assert [{n: v for n, v in row.items() if n != "new"} for row in rows] == saved
    for row in rows:
        is_known = row["columns"]["answer"] not in ("19", "20", "none")  # the last one raises
        assert row["new"]["length"] == (len({*row["completion"]}) % 3 if is_known else None)
        assert row["new"]["math_correctness_reward"] is not None
    groups = [rows[start : start + 4] for start in range(0, 24, 4)]
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    scored = [
        [(row["rewards"]["length"], row["new"]["length"]) for row in pair]
        for pair in pairs
        if pair[0]["new"]["length"] is not None
    ]
    alike = [(a > b, a < b) == (c > d, c < d) for (a, c), (b, d) in scored]
    found = table(said)
    known = [row["new"]["length"] for row in rows if row["new"]["length"] is not None]
    changed = sum(row["rewards"]["length"] != row["new"]["length"] for row in rows)
    old = f"{fmean(row['rewards']['length'] for row in rows):.3f}"
    assert found["length"] == [old, f"{fmean(known):.3f}", f"{fmean(alike):.3f}", str(changed)]
    signal = [fmean(len({row["new"]["total"] for row in group}) > 1 for group in groups)]
    assert found["groups with signal"][1] == f"{signal[0]:.3f}" and signal[0] < 1
    assert found["draws"][1:] == ["-", "-", "-"]


@pytest.mark.slow
def test_data_that_have_changed_and_folders_without_answers_are_refused(folder):
    rows = json.loads((folder / "rows.json").read_text())
    for name, value in (("prompt", "Another one?"), ("answer", "3")):
        (folder / "others.json").write_text(json.dumps([{**row, name: value} for row in rows]))
        done = score(folder, "dataset.source=others.json", check=False)
        assert "or its columns are not what they were; give the data that" in done.err
    (folder / "out/completions.jsonl").unlink()
    assert "out: has no completions.jsonl; give a run with" in score(folder, check=False).err


@pytest.mark.slow
def test_an_environments_own_reward_stays_what_it_was(tmp_path):
    """In the shipped game, which is also played from its checkpoint."""
    keys = ["num_steps=1", "grpo_samples=4", "output_dir=out"]
    tune("run", RECIPE, "--config", "tiny_guess_grpo", *keys, cwd=tmp_path)
    (step,) = read(tmp_path / "out", "step")
    assert 1 < step["environment/turns"] <= 3 and not any("tools/" in name for name in step)
    assert any("lower, I guess " in row["completion"] for row in completions(tmp_path / "out"))
    found = table(score(tmp_path).out)
    assert found["total"][2:] == found["GuessNumber"][2:] == ["1.000", "0"]
    shown = run("-m", "torchtune_grpo", "sample", "out", "--num-prompts", "1", cwd=tmp_path).out
    assert shown.count("<think>I guess ") == 4
