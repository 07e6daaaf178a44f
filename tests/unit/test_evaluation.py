"""An evaluation's keys, the lenient grader, when evaluations end a run, and their statistics."""

from contextlib import nullcontext
from itertools import combinations, product
from math import comb, sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from torchtune_grpo.evaluation import answers
from torchtune_grpo.evaluation.answers import KeptAnswers, parts
from torchtune_grpo.evaluation.evaluator import Answer, Answered, Evaluation, Evaluator
from torchtune_grpo.evaluation.statistics import (
    Comparison,
    best_step,
    bootstrap_interval,
    evaluation_metrics,
    majority,
    paired_test,
    pass_at_k,
    passes,
    should_stop,
)
from torchtune_grpo.rewards import Reward, RewardSet, SymbolicMathReward, last_number_reward
from torchtune_grpo.rewards.math import stated_answer


def length(prompts, completions, **columns):
    return [9.0] * len(completions)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward": "lst"}, "no reward of this name; rewards has length, last"),
        ({"reward": "length", "keep_best": "eval/maj@4"}, "keep_best=eval/maj@4: is not measured"),
        ({"keep_best": "eval/maj@4"}, None),  # the last number can vote, and decides
    ],
)
def test_a_reward_that_cannot_do_it_is_refused(keys, message):
    keys = {"reward": None, "samples": 4, "keep_best": None} | keys
    cfg = SimpleNamespace(evaluation=SimpleNamespace(**keys))
    given = [Reward("length", length), Reward("last", last_number_reward)]
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        rewards = RewardSet(given, deciding=keys["reward"])
        Evaluator(cfg, [], tokenizer=None, rewards=rewards)


def test_the_lenient_grader_reads_the_last_number():
    texts = {
        "<think>3+4</think><answer>7</answer>": 1,
        "5 + 2 = $7.00": 1,
        "<answer>7</answer> as 10-3 is 7,": 1,  # a minus that subtracts, a comma that ends
        "<answer>7</answer> in 2 steps": 0,
        "It is -7": 0,
        "7 or 17": 0,
        "no number": 0,
        "": 0,
    }
    count = len(texts)
    found = last_number_reward([""] * count, [*texts], answer=["7"] * count)
    assert dict(zip(texts, found, strict=True)) == texts
    grouped = [r"\boxed{1{,}234}", r"$\$1,\!234.0$", r"1\,234", "1,234.", r"(1,\,1234)"]
    assert last_number_reward([""] * 5, grouped, answer=["1234"] * 5) == [1.0] * 5


def test_answers_of_one_value_vote_together():
    """Whatever the spelling; and each reward says what it sees itself."""
    spellings = ["7", "7.0", "$7", "14/2", r"\boxed{7}", "7 apples"]
    assert {stated_answer(f"<answer>{text}</answer>") for text in spellings} == {"7"}
    assert stated_answer("<answer>1,000.50</answer>") == "2001/2"
    assert stated_answer("<answer>7</answer><answer>8</answer>") is None
    assert stated_answer("7") == "7" and stated_answer("<answer>x</answer>") is None
    long = "1" * 300
    assert stated_answer(f"<answer>{long}</answer>") == long
    lenient = Reward("last", last_number_reward).answer_of
    assert lenient is not None and lenient("7 or 8.50") == "17/2" and lenient("none") is None
    assert SymbolicMathReward.answer_of(r"<answer>\sqrt{2}</answer>") == r"\sqrt{2}"
    assert Reward("length", length).answer_of is None


def answer(score: float | None) -> Answer:
    return Answer("text \ud800", 3, False, scores={"r": score}, stated={"r": "7"})


def evaluation_of(*prompts: tuple[float | None, list[float | None]]) -> Evaluation:
    """An evaluation of prompts with the score of the greedy answer, and those of samples."""
    answered = [
        Answered(index, "", {}, answer(greedy), [*map(answer, samples)])
        for index, (greedy, samples) in enumerate(prompts)
    ]
    return Evaluation(answered, ("r",), measure="accuracy", seconds=0.0)


def test_none_leaves_out_an_answer_and_no_prompt():
    """Prompts are compared that were scored both times, and the share of None is told."""
    before = evaluation_of((1.0, [None, 1.0, 0.0]), (None, [None] * 3), (0.0, [1.0, 1.0, None]))
    found = before.record
    assert found["prompts"]["accuracy"] == [1.0, None, 0.0] and found["eval/accuracy"] == 0.5
    assert found["prompts"]["pass@1"] == [0.5, None, 1.0] and found["eval/pass@1"] == 0.75
    assert found["prompts"]["pass@2"] == [1.0, None, 1.0] == found["prompts"]["maj@3"]
    assert found["prompts"]["pass@3"] == [None] * 3 and "eval/pass@3" not in found
    assert found["eval/none"] == 0.5
    after = evaluation_of(*[(1.0, [1.0] * 3)] * 3).record
    assert "eval/none" not in after
    changes = Comparison(found, after).changes
    assert (changes["accuracy"].difference, changes["pass@1"].difference) == (0.5, 0.25)
    assert "none" in Comparison(found, after).table("", ("a", "b"))[-1]


def lines(*values: float, every: int = 5, metric: str = "eval/accuracy") -> list[dict]:
    """The metrics of a run that is evaluated every few steps, with lines of steps between."""
    steps = [{"step": step, "reward": 0.5} for step in range(1, every * len(values))]
    found = [{"step": every * i, metric: value} for i, value in enumerate(values)]
    return sorted([*steps, *found], key=lambda line: line["step"])


def stops(*values: float, stop_at: float | None = None) -> str | None:
    return should_stop(lines(*values), metric=None, stop_at=stop_at)


def test_the_best_step_is_the_first_of_the_highest_that_has_a_checkpoint():
    assert best_step(lines(0.9, 0.2, 0.6, 0.6, 0.4), "eval/accuracy") == 10  # not the base's
    assert best_step(lines(0.9), "eval/accuracy") is None
    assert best_step([], "eval/accuracy") is None
    assert best_step(lines(0.1, 0.2), None) is None
    assert best_step(lines(0.1, 0.2), "eval/pass@1") is None
    assert best_step([*lines(0.1, 0.2), {"step": 9, "eval/accuracy": None}], "eval/accuracy") == 5


def test_a_run_ends_when_its_newest_evaluation_reaches_stop_at():
    assert stops(0.1, 0.89, stop_at=0.9) is None
    reason = stops(0.1, 0.9, stop_at=0.9)
    said = "Ends after step 5: eval/accuracy is 0.900, and has reached evaluation.stop_at=0.9."
    assert reason == said
    assert stops(0.95, stop_at=0.9) is None  # the base: nothing was trained yet
    assert stops(0.1, 0.95, 0.5, stop_at=0.9) is None  # resumed with a lower stop_at
    assert stops(0.5, 0.4, 0.3) is None and stops(stop_at=0.9) is None
    pass_at_1 = lines(0.1, 0.9, metric="eval/pass@1")
    assert should_stop(pass_at_1, metric="eval/pass@1", stop_at=0.9)
    assert not should_stop(pass_at_1, metric=None, stop_at=0.9)


def test_the_metrics_of_so_many_samples():
    assert [passes(n) for n in (0, 1, 2, 4, 6)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]
    assert evaluation_metrics(0) == ["eval/accuracy"]
    assert evaluation_metrics(1) == ["eval/accuracy", "eval/pass@1"]
    assert evaluation_metrics(2) == ["eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/maj@2"]


def test_kept_answers_are_those_written_whole_about_the_same(tmp_path):
    file, about = tmp_path / "kept", {"weights": "w", "seed": 1}
    given = {3: [answer(0.5)], 5: [answer(None), answer(1.0)]}
    KeptAnswers(file, about).add("greedy", given)
    with file.open("a") as torn:
        torn.write('{"kind": "greedy", "ind')
    kept = KeptAnswers(file, about)
    assert kept.of("greedy") == given and not kept.of("sampled")
    kept.add("greedy", {7: [answer(0.0)]})
    assert KeptAnswers(file, about).of("greedy").keys() == {3, 5, 7}
    assert not KeptAnswers(file, about | {"seed": 2}).of("greedy")
    assert not KeptAnswers(file, about).of("greedy")  # begun anew by the other


def test_parts_grow_while_they_are_short_or_more_answers_at_once_are_faster(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(answers.time, "monotonic", lambda: now[0])

    def sizes(seconds, count=600, least=16, most=600):
        found, items = [], [{"index": n} for n in range(count)]
        for part in parts(items, least=least, most=most, is_kept=True):
            found.append(len(part))
            now[0] += seconds(len(part))
        assert sum(found) == count
        return found

    assert sizes(lambda n: 0.5 * n) == [16, 32, 64, 64, 64, 64, 64, 64, 64, 64, 40]
    assert sizes(lambda n: 100 + n / 64) == [16, 32, 64, 128, 256, 104]  # as on a GPU
    assert sizes(lambda n: 20.0 * n, count=60) == [16, 32, 12]
    assert sizes(lambda n: 0, most=200) == [16, 32, 64, 128, 200, 160]
    # A slow CPU: parts stay full, whatever they take.
    assert sizes(lambda n: 60 + 2 * n, count=400, least=64) == [64, 128, 64, 64, 64, 16]
    # What was capped shrinks from there.
    grown = iter([1.0] * 8 + [100.0] * 8)
    assert sizes(lambda n: next(grown), most=64) == [16, 32, *[64] * 7, 32, *[16] * 4, 8]
    whole = parts([{"index": n} for n in range(90)], least=16, most=90, is_kept=False)
    assert [len(part) for part in whole] == [90]


# --- Intervals, pass@k, votes and the paired test, by closed forms and full enumeration ----------


@pytest.mark.parametrize("scores", [[1.0], [1.0, 0, 0, 0], [1.0, 0, 1, 0, 0, 1], [0.5, 0.0, 1.0]])
def test_pass_at_k_is_the_best_of_each_subset_in_the_mean(scores: list[float]):
    for k in range(1, len(scores) + 1):
        subsets = list(combinations(scores, k))
        counted = sum(map(max, subsets)) / len(subsets)
        assert pass_at_k(scores, k) == pytest.approx(counted, abs=1e-12)


def test_pass_at_k_of_many_samples():
    assert pass_at_k([1.0] + [0.0] * 4999, 2500) == 0.5  # floats would overflow


def test_the_majority_is_the_most_frequent_answer_and_the_first_of_equals():
    assert majority(["3", "7", None, "7"]) == 1
    assert majority(["3", "7", "7", "3"]) == 0
    assert majority([None, None, "5", None]) == 2  # what states nothing has no vote
    assert majority([None, None]) is None


@pytest.mark.parametrize("right", [1, 10, 100, 250, 399])
def test_the_interval_of_an_accuracy_is_agresti_and_coulls(right: int):
    """The closed form is the normal's; that of resampling is as near as the binomial is to it."""
    num_prompts = 400
    low, high = bootstrap_interval([1.0] * right + [0.0] * (num_prompts - right))
    middle = (right + 2) / (num_prompts + 4)
    half = 1.96 * sqrt(middle * (1 - middle) / (num_prompts + 4))
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=0.004)
    assert low < right / num_prompts < high


def test_an_interval_of_equal_values_is_not_empty():
    """At 0 and 1, where resamples of the values alone would all be equal."""
    low, high = bootstrap_interval([0.0] * 100)
    assert low == 0.0 and 0.03 < high < 0.06
    assert bootstrap_interval([1.0] * 100) == pytest.approx((1 - high, 1.0), abs=0.01)
    assert bootstrap_interval([1.0])[0] < 0.5  # one prompt says nearly nothing


def test_an_interval_of_scores_beyond_0_and_1_is_the_normals():
    values = np.array([-1.0, 1.0] * 299 + [1.0] * 2)  # a mean near 0, where nothing else is
    half = 1.96 * values.std() / sqrt(600)
    expected = (values.mean() - half, values.mean() + half)
    assert bootstrap_interval(values) == pytest.approx(expected, abs=0.008)
    for same in (5.0, -3.0):  # an interval holds its mean
        low, high = bootstrap_interval([same] * 20)
        assert low <= same <= high and 0 < high - low < 1.5
    paired = paired_test(np.zeros(600), 3 * values)
    assert (paired.low, paired.high) == pytest.approx([3 * each for each in expected], abs=0.02)


def test_what_is_added_weighs_less_for_means_over_samples_in_any_order():
    """7 of 48 prompts with one right sample of 4: by the normal's closed form, roughly."""
    values = np.array([0.25] * 7 + [0.0] * 41)
    mean, square = values.mean(), (values**2).mean()
    weight = (square - mean**2) / (mean * (1 - mean))
    assert weight == pytest.approx(0.22, abs=0.005)
    total = 48 + 4 * weight
    middle, square = ((48 * each + 2 * weight) / total for each in (mean, square))
    half = 1.96 * sqrt((square - middle**2) / total)
    interval = bootstrap_interval(values)
    assert interval == pytest.approx((middle - half, middle + half), abs=0.008)
    assert bootstrap_interval(values[::-1]) == interval


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 6), (2, 9), (5, 5), (40, 60)])
def test_the_paired_test_of_right_and_wrong_is_mcnemars_exact(lost: int, won: int):
    before = [1.0] * lost + [0.0] * won + [1.0, 0.0] * 10
    after = [0.0] * lost + [1.0] * won + [1.0, 0.0] * 10
    n, least = lost + won, min(lost, won)
    mcnemar = min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n)
    result = paired_test(before, after)
    assert result.p == pytest.approx(mcnemar, rel=1e-12)
    assert result.difference == pytest.approx((won - lost) / (n + 20))
    assert result.low < result.difference < result.high or n == 0


@pytest.mark.parametrize("samples", [3, 8, 10])
def test_the_paired_test_of_means_over_samples_counts_every_choice_of_signs(samples: int):
    draw = np.random.default_rng(samples)
    before, after = draw.integers(0, samples + 1, size=(2, 11)) / samples
    units = np.rint((after - before) * samples).astype(int)
    sums = [abs(np.dot(signs, units)) for signs in product((-1, 1), repeat=11)]
    expected = np.mean([total >= abs(units.sum()) for total in sums])
    assert paired_test(before, after).p == pytest.approx(expected, rel=1e-12)


def test_the_paired_test_of_any_scores_agrees_with_drawn_signs():
    """Differences without a common unit are rounded: far below what 10,000 draws can tell."""
    draw = np.random.default_rng(0)
    before = draw.random(30)
    after = np.clip(before + draw.normal(0.05, 0.2, 30), 0, 1)
    difference = after - before
    drawn = np.abs(draw.choice((-1, 1), (10_000, 30)) @ difference) >= abs(difference.sum())
    assert paired_test(before, after).p == pytest.approx(drawn.mean(), abs=0.015)


def test_the_paired_test_of_large_scores_agrees_with_that_of_small_ones():
    """Whole numbers, too, are rounded: counting their sums would take all memory there is."""
    draw = np.random.default_rng(0)
    before, after = draw.random((2, 100))
    large = paired_test(np.rint(before * 1e9), np.rint(after * 1e9))
    assert large.p == pytest.approx(paired_test(before, after).p, abs=1e-3)


def test_the_interval_of_a_difference_is_bonett_and_prices():
    """And never empty, even where no prompt's score has changed."""
    lost, won, total = 20, 50, 300
    difference = [-1.0] * lost + [1.0] * won + [0.0] * (total - lost - won)
    result = paired_test(np.zeros(total), difference)
    rise, fall = (won + 1) / (total + 2), (lost + 1) / (total + 2)
    half = 1.96 * sqrt((rise + fall - (rise - fall) ** 2) / (total + 2))
    expected = (rise - fall - half, rise - fall + half)
    assert (result.low, result.high) == pytest.approx(expected, abs=0.005)
    same = paired_test([1.0] * 50, [1.0] * 50)
    assert (same.difference, same.p) == (0.0, 1.0) and same.low < 0 < same.high
