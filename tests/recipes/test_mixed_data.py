"""Runs on several data sets at once, through the real commands."""

import gzip
import json
from pathlib import Path

import pytest
from runs import RECIPE, distance, run, run_ranks, tune, untimed, weights

from torchtune_grpo.monitor.record import read

CONFIG = """
base_config: tiny_arithmetic_grpo
output_dir: out
dataset:
  _component_: torchtune_grpo.data.MixedDataset
  datasets:
    sums:
      _component_: torchtune_grpo.data.arithmetic_dataset
      weight: 3
      levels: 1
      split: train
      num_samples: 40
      prefill: "<think>"
    talks:
      _component_: torchtune_grpo.data.RLDataset
      source: talks.jsonl.gz
      prompt_column: messages
      columns: {wanted: reply}
      prefill: "<think>"
eval_dataset:
  _component_: torchtune_grpo.data.MixedDataset
  datasets:
    sums: {_component_: torchtune_grpo.data.arithmetic_dataset, levels: 1, split: test,
           num_samples: 3, prefill: "<think>"}
    talks: "${dataset.datasets.talks}"
rewards:
  - _component_: torchtune_grpo.rewards.math_correctness_reward
    name: right
    only: {dataset: sums}
  - _component_: mine.as_long
    name: right
    only: {dataset: talks}
    format: text
    isolation: process
deciding_reward: right
sampler: {_component_: torchtune_grpo.data.MixedSampler, rest: 1}
evaluation: {samples: 0, every_n_steps: null}
num_steps: 3
batch_size: 4
grpo_samples: 2
max_generated_tokens: 8
saving: {every_n_steps: 2}
"""
MINE = """
def as_long(prompts, completions, wanted, log_extra=None, **columns):
    if log_extra:
        log_extra("wanted", wanted)
    return [abs(len(text) - len(goal)) / 100 for text, goal in zip(completions, wanted)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(MINE)
    turns = [("system", "Be brief."), ("user", "2 + 3?"), ("assistant", "5")]
    messages = [{"role": who, "content": text} for who, text in [*turns, ("user", "And 1 more?")]]
    with gzip.open(folder / "talks.jsonl.gz", "wt") as file:
        for size in range(3):
            print(json.dumps({"messages": messages, "reply": "6" * size}), file=file)
    tune("run", RECIPE, "--config", "mixed.yaml", cwd=folder)
    return folder


def test_a_step_has_the_shares_of_the_weights_and_each_row_its_own_reward(folder):
    steps = read(folder / "out", "step")
    texts = [json.loads(line) for line in (folder / "out/completions.jsonl").open()]
    assert {text["prompt"] == "And 1 more?" for text in texts} == {True, False}
    for text in texts:
        wanted = text["extra"]["wanted"]
        if text["prompt"] == "And 1 more?":
            longer = abs(len(text["completion"]) - len(wanted))
            assert text["rewards"]["right"] == pytest.approx(longer / 100)
        else:
            assert wanted is None and text["rewards"]["right"] in (0, 1)
    rows = [step["prompts"]["prompt_index"] for step in steps]
    assert [sum(index >= 40 for index in indices) for indices in rows] == [1, 1, 1]
    assert [*of_sampler(steps[-1])] == [
        f"sampler/{name}" for name in ("pass_rate/sums", "pass_rate/talks", "resting")
    ]
    assert "resting" in (folder / "out/run.html").read_text()


def of_sampler(step):
    return {name: value for name, value in step.items() if name.startswith("sampler/")}


@pytest.mark.slow
def test_two_ranks_draw_the_prompts_of_one_and_resume_to_the_bit(folder):
    """Each has half of the batch; turns of the data sets and resting prompts are of the whole."""
    command = ["--config", "mixed.yaml", "output_dir=ranks", "batch_size=2"]
    run_ranks(*command, ranks=2, cwd=folder)
    one, both = (
        [
            (step["prompts"]["prompt_index"], of_sampler(step))
            for step in read(folder / name, "step")
        ]
        for name in ("out", "ranks")
    )
    assert both == one and [sum(row < 40 for row in rows) for rows, _ in both] == [3, 3, 3]
    assert both[-1][1]["sampler/resting"] > both[0][1]["sampler/resting"] == 0
    whole, seen = (
        weights((folder / "ranks/step_000003").rename(folder / "ranks_once")),
        untimed(folder / "ranks"),
    )
    run_ranks(*command, "resume_from_checkpoint=True", ranks=2, cwd=folder)
    again = weights(folder / "ranks/step_000003")
    assert whole.keys() == again.keys() and all(whole[n].equal(again[n]) for n in whole)
    assert distance(whole, weights(folder / "ranks/step_000002")) > 0
    assert untimed(folder / "ranks") == seen  # with all of the sampler's


def test_an_evaluation_tells_the_data_sets_apart(folder):
    command = ("evaluate", "out", "--by", "dataset", "--output", "found.json")
    run("-m", "torchtune_grpo", *command, cwd=folder)
    groups = json.loads((folder / "found.json").read_text())["groups"]
    counts = {name: group["prompts"] for name, group in groups.items()}
    assert counts == {"all": 6, "dataset=sums": 3, "dataset=talks": 3}
