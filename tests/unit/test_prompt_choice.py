"""Which prompt a run starts from: the rule of `torchtune-grpo prompts`, and what it counts."""

import random
from types import SimpleNamespace

import pytest
import yaml

from torchtune_grpo.cli.prompts import SHIPPED, Candidate, Tally, as_yaml, compare
from torchtune_grpo.data.presets import GSM8K_SYSTEM_PROMPT
from torchtune_grpo.evaluation.answers import Answer
from torchtune_grpo.evaluation.evaluator import Answered, Evaluation

ROWS = [*range(64)]


def tally(best, signal=lambda row: 0.0) -> Tally:
    return Tally({row: best(row) for row in ROWS}, {row: signal(row) for row in ROWS})


class Known:
    """A candidate whose answers are known beforehand."""

    def __init__(self, name, best, signal=lambda row: 0.0):
        self.name, self.tally, self.cells = name, Tally({}, {}), {}
        self._best, self._signal = best, signal

    def answer(self, engine, rows):
        self.tally.best.update({row: self._best(row) for row in rows})
        self.tally.signal.update({row: self._signal(row) for row in rows})


def test_one_that_cannot_win_any_more_is_asked_no_further():
    """Of four rounds, the hopeless one has the first; the weak one, not surely behind, has two."""
    good = Known("good", lambda row: 1.0, lambda row: 1.0)
    hopeless = Known("hopeless", lambda row: 0.0)
    weak = Known("weak", lambda row: float(row % 3 > 0), lambda row: 1.0)
    costly = Known("costly", lambda row: 1.0, lambda row: 0.5)
    as_good = Known("as good", lambda row: 1.0, lambda row: 1.0 + (row % 2 - 0.5) / 9)
    left = compare(None, [good, hopeless, weak, costly, as_good], ROWS)
    assert [each.name for each in left] == ["good", "as good"]
    asked = {each.name: len(each.tally.best) for each in (good, hopeless, weak, costly)}
    # weak loses 6 of 16 questions, where chance is 2 / 2^6 = 0.031, above 0.05 / 4; then 11 of 32.
    assert asked == {"good": 64, "hopeless": 16, "weak": 32, "costly": 16}
    alone = Known("alone", lambda row: 1.0, lambda row: 1.0)
    compare(None, [alone, Known("hopeless", lambda row: 0.0)], ROWS)
    assert len(alone.tally.best) == 16  # nobody is left to compare it with


def test_what_a_group_can_reach_comes_before_what_it_costs():
    """Cheap guesses are no start for a run, nor are answers that never differ."""
    solid = tally(lambda row: float(row % 2), lambda row: 0.1)
    cheap = tally(lambda row: float(row % 8 == 1), lambda row: 0.9)
    assert solid.beats(cheap, level=0.05) and not cheap.beats(solid, level=0.05)
    same = tally(lambda row: float(row % 2), lambda row: 0.0)  # as with a temperature near 0
    assert solid.beats(same, level=0.05) and not same.beats(solid, level=0.05)
    assert not solid.beats(solid, level=0.05)
    few = Tally({1: 0.0}, {1: 0.0})  # where a candidate has not answered, it is not compared
    assert not solid.beats(few, level=0.05) and not few.beats(solid, level=0.05)


@pytest.mark.slow
def test_of_two_that_are_equally_good_chance_seldom_drops_one():
    """Before the last of four rounds, in 5 % of the comparisons at most, whichever it is."""
    rng = random.Random(0)
    scores = [rng.choices((0.0, 1.0), k=64) for _ in range(300)]
    pairs = [
        [Known("one", one.__getitem__), Known("other", other.__getitem__)]
        for one, other in zip(scores[::2], scores[1::2], strict=True)
    ]
    for pair in pairs:
        compare(None, pair, ROWS)
    assert sum(len(one.tally.best) < 64 for one, _ in pairs) <= 0.05 * len(pairs)


def answers(*scores: float) -> list[Answer]:
    return [Answer("", 5, score == 0, {"right": score, "last": 1.0}, {}) for score in scores]


def test_what_is_counted_of_a_candidate():
    """Of the pairs in a group, 3 of 6 and 4 of 6 differ; groups cost 30, 30 and 10 tokens more."""
    groups = [answers(1, 0, 0, 0), answers(1, 1, 0, 0), answers(0, 0, 0, 0)]
    asked = [Answered(n, "", {}, group[0], group) for n, group in enumerate(groups)]
    candidate = Candidate.__new__(Candidate)
    candidate.name, candidate.cfg = "mine", SimpleNamespace(grpo_samples=4)
    candidate.data = type("Data", (list,), {"row_numbers": [7, 8, 9]})(
        [{"tokens": [0] * n} for n in (10, 10, 20)]
    )
    candidate.found = Evaluation(asked, ("right", "last"), "accuracy", seconds=2.4)
    best, signal = candidate.tally
    assert best == {7: 1, 8: 1, 9: 0}
    ratio, cost = (3 / 6 + 4 / 6) / 0.1, 0.1 / 3  # for 1,000 tokens
    parts = [(3 / 6 - 0.03 * ratio) / cost, (4 / 6 - 0.03 * ratio) / cost, -0.04 * ratio / cost]
    assert signal == pytest.approx({7 + n: ratio + part for n, part in enumerate(parts)})
    assert sum(signal.values()) / 3 == pytest.approx(ratio)
    assert candidate.cells == {
        "": "mine",
        "questions": "3",
        "right": "0.667",
        "last": "1.000",
        "sampled": "0.250",
        "pass@4": "0.667",
        "teaching": "0.667",
        "cut off": "0.750",
        "signal/1k": "11.667",
        "tokens": "5",
        "seconds": "2",
    }


def test_the_keys_of_a_winner_are_those_that_were_given():
    shipped = yaml.safe_load(SHIPPED.read_text())
    assert shipped["think"]["dataset"]["system_prompt"] == GSM8K_SYSTEM_PROMPT
    for changes in shipped.values():
        assert yaml.safe_load(as_yaml(changes, has_held_out=False)) == changes
    plain = as_yaml(shipped["plain_examples"], has_held_out=True)
    assert "      Question: {prompt}\n      Answer:\n" in plain.replace("    ", "      ")
    assert yaml.safe_load(plain)["eval_dataset"]["chat"] == "${dataset.chat}"
    assert as_yaml({}, has_held_out=True) == ""
