"""`torchtune-grpo prompts`: the command, on the tiny model."""

import re
from pathlib import Path

import pytest
from runs import Result, run

from torchtune_grpo.cli.prompts import SHIPPED
from torchtune_grpo.config.command_line import load_config

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
# The model was taught with <think>, which this config leaves out.
CONFIG = """
base_config: tiny_arithmetic_grpo
output_dir: out
grpo_samples: 4
dataset: {num_samples: 200, prefill: ""}
eval_dataset: {prefill: ""}
"""
MINE = """
taught: {dataset: {prefill: <think>}}
warmer: {dataset: {prefill: <think>}, temperature: 1.05}
again: {dataset: {prefill: ""}}
hopeless: {dataset: {prefill: "<think>.</think><answer>x</answer>"}, sampling: {top_k: 4}}
cold: {dataset: {prefill: <think>}, temperature: 0.001}
"""


def prompts(folder, *arguments: object, mine: str = MINE, check: bool = True) -> Result:
    (folder / "my.yaml").write_text(CONFIG)
    (folder / "mine.yaml").write_text(mine)
    command = ["prompts", "--config", "my.yaml", "--candidates", "mine.yaml", *arguments]
    return run("-m", "torchtune_grpo", *command, cwd=folder, check=check)


@pytest.mark.slow
def test_it_says_which_to_start_from(tmp_path):
    """The model answers as it was taught; what it writes is a config with the winner."""
    said = prompts(tmp_path, "--questions", 32, "--output", "best.yaml").out
    assert "again: the same as config.\n" in said and said.count("Weights: ") == 1
    shown = re.findall(r"^(\w+) +(\d+) +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+)", said, re.MULTILINE)
    table = {name: values for name, *values in shown}
    assert [*table] == ["config", "taught", "warmer", "hopeless", "cold"]
    assert table["hopeless"] == ["16", "0.000", "0.000"] and "hopeless, questions 32" not in said
    assert (
        "Left out, as another one is clearly better: " in said
        and table["taught"][0] == table["warmer"][0] == "32"
    )
    assert float(table["taught"][2]) > 0.5 > float(table["cold"][2])  # share of teaching groups
    assert re.search(
        r"Start from (taught|warmer): no other one is clearly ahead by pass@4, and", said
    )
    assert "\n\ndataset:\n  prefill: <think>\n" in said
    cfg = load_config(str(tmp_path / "best.yaml"))
    assert cfg.dataset.prefill == cfg.eval_dataset.prefill == "<think>"
    assert cfg.grpo_samples == 4 and cfg.dataset.num_samples == 200
    run("-m", "torchtune_grpo", "config", "best.yaml", cwd=tmp_path)


@pytest.mark.slow
def test_those_that_are_shipped_and_those_of_the_page(tmp_path):
    page = re.search(r"```yaml\n(short:.*?)```", PAGE.read_text(), re.DOTALL)[1]
    mine = SHIPPED.read_text() + page
    said = prompts(tmp_path, "--questions", 4, "dataset.num_samples=8", mine=mine).out
    for name in ("config", "think", "boxed", "examples", "plain_examples", "bare", "short"):
        is_same = name == "bare" and "bare: the same as config." in said
        assert is_same or re.search(rf"^{name} +4 ", said, re.MULTILINE), said


@pytest.mark.slow
def test_what_cannot_be_compared(tmp_path):
    few = ["dataset.num_samples=6", "--questions", 4]
    for mine, arguments, told in (
        ("a: {system_prompt: x}", few, "a: system_prompt=x: unknown config key. Did you mean data"),
        ("a: {dataset: {sytem_prompt: x}}", few, "a: dataset.sytem_prompt="),
        ("a: {dataset: {prompt_template: x}}", few, "a: dataset.prompt_template='x': has no colu"),
        ("a: {temperature: -1}", few, "a: temperature=-1: "),
        ("a: {batch_size: 2}", few, "a: batch_size: a candidate changes only dataset, sampling, t"),
        ("- a", few, "--candidates=mine.yaml: give the changes of each candidate by its name"),
        ("a: [", few, "--candidates=mine.yaml: cannot be read: "),
        (MINE, ["dataset.num_samples=6"], "--questions=64: there are 6 rows of dataset that all"),
        (MINE, ["--output", "no/such"], "--output=no/such: there is no folder no"),
        ("a: {temperature: 0.002}", [*few, "temperature=0.001"], "No candidate's samples differ"),
    ):
        done = prompts(tmp_path, *arguments, mine=mine, check=False)
        assert done.code == 1 and f"Error: {told}" in done.err, done.err
