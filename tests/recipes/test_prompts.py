"""`torchtune-grpo prompts`: which prompt it says to start from, and what it writes."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from runs import Result, run, run_ranks

from torchtune_grpo.cli.prompts import SHIPPED, Candidate, Tally, as_yaml, compare
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.data.presets import GSM8K_SYSTEM_PROMPT
from torchtune_grpo.evaluation.answers import Answer
from torchtune_grpo.evaluation.evaluator import Answered, Evaluation

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
    assert table["hopeless"] == ["16", "0.000", "0.000"]
    assert table["taught"][0] == table["warmer"][0] == "32"
    assert float(table["taught"][2]) > 0.5 > float(table["cold"][2])  # share of teaching groups
    assert re.search("Start from (taught|warmer): no other one is clearly ahead by pass@4, ", said)
    assert "\n\ndataset:\n  prefill: <think>\n" in said
    cfg = load_config(str(tmp_path / "best.yaml"))
    assert cfg.dataset.prefill == cfg.eval_dataset.prefill == "<think>"
    assert cfg.grpo_samples == 4 and cfg.dataset.num_samples == 200
    run("-m", "torchtune_grpo", "config", "best.yaml", cwd=tmp_path)


@pytest.mark.slow
def test_those_that_are_shipped_and_those_of_the_page(tmp_path):
    """On two ranks, too."""
    mine = SHIPPED.read_text() + re.search(r"```yaml\n(short:.*?)```", PAGE.read_text(), re.S)[1]
    few = ["--questions", "4", "dataset.num_samples=8", "--candidates", "mine.yaml"]
    few += ["--output", "best.yaml"]
    said = prompts(tmp_path, *few, mine=mine).out
    start = ["--config", "my.yaml", *few]
    ranks = run_ranks(*start, ranks=2, cwd=tmp_path, command="prompts")
    timeless = [re.sub(r"\d+$", "", each, flags=re.M) for each in (said, ranks[0].out)]
    assert timeless[0] == timeless[1] and not ranks[1].out
    assert "bare: the same as config.\n" in said
    assert load_config(str(tmp_path / "best.yaml")).dataset.num_samples == 8  # as in the command
    candidates = yaml.safe_load(mine)
    for name, changes in candidates.items():
        assert name == "bare" or re.search(rf"^{name} +4 ", said, re.MULTILINE), said
        assert yaml.safe_load(as_yaml(changes, has_held_out=False)) == changes
    assert candidates["think"]["dataset"]["system_prompt"] == GSM8K_SYSTEM_PROMPT


@pytest.mark.slow
def test_what_cannot_be_compared(tmp_path):
    few = ["dataset.num_samples=6", "--questions", 4]
    for mine, arguments, told in (
        ("a: {system_prompt: x}", few, "a: system_prompt=x: unknown config key. Did you mean data"),
        ("a: {dataset: {sytem_prompt: x}}", few, "a: dataset.sytem_prompt="),
        ("a: {dataset: {prompt_template: x}}", few, "a: dataset.prompt_template='x': has no colu"),
        ("a: {batch_size: 2}", few, "a: batch_size: a candidate changes only dataset, sampling, t"),
        ("- a", few, "--candidates=mine.yaml: give the changes of each candidate by its name"),
        ("a: [", few, "--candidates=mine.yaml: cannot be read: "),
        (MINE, ["dataset.num_samples=6"], "--questions=64: there are 6 rows of dataset that all"),
        (MINE, ["--output", "no/such"], "--output=no/such: name a file in a folder that is"),
        ("a: {temperature: 0.002}", [*few, "temperature=0.001"], "No candidate's samples differ"),
    ):
        done = prompts(tmp_path, *arguments, mine=mine, check=False)
        assert done.code == 1 and f"Error: {told}" in done.err, done.err


class Known:
    """A candidate whose answers are known beforehand, by row."""

    def __init__(self, name, best, signal=lambda row: 0.0, *, answered=()):
        self.name, self.tally, self.cells = name, Tally({}, {}), {}
        self._values = (best, signal)
        self.answer(None, answered)

    def answer(self, engine, rows):
        for known, value in zip(self.tally, self._values, strict=True):
            known.update({row: value(row) for row in rows})


def one(row):
    return 1.0


def test_one_that_cannot_win_any_more_is_asked_no_further():
    """Of four rounds, the hopeless one has the first; the weak one, not surely behind, has two."""
    good, hopeless = Known("good", one, one), Known("hopeless", lambda row: 0.0)
    costly, weak = (
        Known("costly", one, lambda row: 0.5),
        Known("weak", lambda row: row % 3 > 0, one),
    )
    as_good = Known("as good", one, lambda row: 1.0 + (row % 2 - 0.5) / 9)
    tried = [good, hopeless, costly, weak, as_good]
    assert compare(None, tried, [*range(64)]) == [good, as_good]
    # weak loses 6 of 16 questions, where chance is 2 / 2^6 = 0.031, above 0.05 / 4; then 11 of 32.
    assert [len(each.tally.best) for each in tried] == [64, 16, 16, 32, 64]
    alone = Known("alone", one, one)
    compare(None, [alone, Known("hopeless", lambda row: 0.0)], [*range(64)])
    assert len(alone.tally.best) == 16  # nobody is left to compare it with


def test_what_a_group_can_reach_comes_before_what_it_costs():
    """Cheap guesses are no start for a run, nor are answers that never differ."""
    solid, cheap, same = (
        Known("", lambda row, n=n: row % n == 1, lambda row, s=s: s, answered=range(64)).tally
        for n, s in ((2, 0.1), (8, 0.9), (2, 0.0))
    )
    for other in (cheap, same):
        assert solid.beats(other, level=0.05) and not other.beats(solid, level=0.05)
    assert not solid.beats(solid, level=0.05)


@pytest.mark.slow
def test_of_two_that_are_equally_good_chance_seldom_drops_one():
    """Before the last of four rounds, in 5 % of the comparisons at most, whichever it is."""
    rng, dropped = random.Random(0), 0
    for _ in range(150):
        pair = [Known("", rng.choices((0.0, 1.0), k=64).__getitem__) for _ in range(2)]
        compare(None, pair, [*range(64)])
        dropped += len(pair[0].tally.best) < 64
    assert dropped <= 0.05 * 150


def test_what_is_counted_of_a_candidate():
    """Of the pairs in a group, 3 of 6 and 4 of 6 differ; the groups cost 30, 30 and 40 tokens."""
    asked = []
    for n, right in enumerate((1, 2, 0)):
        scores = [{"right": float(i < right), "last": 1.0} for i in range(4)]
        group = [Answer("", 5, not each["right"], each, {}) for each in scores]
        asked.append(Answered(n, "", {}, group[0], group))
    candidate = Candidate.__new__(Candidate)
    candidate.name, candidate.cfg = "mine", SimpleNamespace(grpo_samples=4)
    items = [{"tokens": [0] * n} for n in (10, 10, 20)]
    candidate.data = type("Data", (list,), {"row_numbers": [7, 8, 9]})(items)
    candidate.found = Evaluation(asked, ("right", "last"), "accuracy", seconds=2.4)
    best, signal = candidate.tally
    assert best == {7: 1, 8: 1, 9: 0}
    ratio, cost = (3 / 6 + 4 / 6) / 0.1, 0.1 / 3  # for 1,000 tokens
    parts = [(3 / 6 - 0.03 * ratio) / cost, (4 / 6 - 0.03 * ratio) / cost, -0.04 * ratio / cost]
    assert signal == pytest.approx({7 + n: ratio + part for n, part in enumerate(parts)})
    told = dict(zip(("questions", "right", "last", "sampled"), ("3", "0.667", "1.000", "0.250")))
    told |= {"": "mine", "pass@4": "0.667", "teaching": "0.667", "cut off": "0.750"}
    assert candidate.cells == told | {"signal/1k": "11.667", "tokens": "5", "seconds": "2"}
