"""Intervals, pass@k, votes and the paired test, against closed forms and full enumeration."""

from itertools import combinations, product
from math import comb, sqrt

import numpy as np
import pytest

from torchtune_grpo.evaluation.statistics import (
    bootstrap_interval,
    majority,
    paired_test,
    pass_at_k,
)


@pytest.mark.parametrize("scores", [[1.0], [1.0, 0, 0, 0], [1.0, 0, 1, 0, 0, 1], [0.5, 0.0, 1.0]])
def test_pass_at_k_is_the_best_of_each_subset_in_the_mean(scores: list[float]):
    for k in range(1, len(scores) + 1):
        subsets = list(combinations(scores, k))
        counted = sum(map(max, subsets)) / len(subsets)
        assert pass_at_k(scores, k) == pytest.approx(counted, abs=1e-12)


def test_pass_at_k_of_many_samples_and_of_too_few():
    assert pass_at_k([1.0] + [0.0] * 4999, 2500) == 0.5  # floats would overflow
    with pytest.raises(ValueError, match="k=5: with 3 samples, give 1 to 3"):
        pass_at_k([0.5, 0.0, 1.0], 5)


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
