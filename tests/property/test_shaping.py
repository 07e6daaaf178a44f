"""Shaped rewards: their values by hand, and that none ever pays a wrong answer like a right one."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_grpo.rewards import (
    OverlongPenalty,
    Reward,
    RewardSet,
    grade_math_answer,
    math_correctness_reward,
    math_format_reward,
    math_number_reward,
)

GOLD = "12"
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "12", "13", "12 or 13", " ", "so so so so so ",
    "<think>why</think> <answer>12</answer>", "<think>why</think> <answer>13</answer>", "=12",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def score_one(reward, text, **columns):
    (value,) = reward(prompts=["p"], completions=[text], **columns)
    return value


def make_set(*, total_weight=0.99):
    """All shaping at once, at the largest weights that are allowed."""
    shaping = [math_format_reward, math_number_reward]
    shaping += [OverlongPenalty(max_length=8, cache=4)]
    weight = total_weight / len(shaping)
    rewards = [Reward(function.__name__, function, weight) for function in shaping]
    return RewardSet([Reward("correctness", math_correctness_reward), *rewards])


@settings(deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 20)), min_size=1, max_size=8))
def test_no_wrong_answer_is_paid_like_a_right_one(rows):
    """Over whatever texts and lengths: the worst right answer beats the best wrong one."""
    rows = [(f"<think>x</think><answer>{GOLD}</answer>{'so ' * 30}", 20), *rows]
    completions = [text for text, _ in rows]
    scores = make_set()(
        prompts=[""] * len(rows),
        completions=completions,
        columns={"answer": [GOLD] * len(rows)},
        completion_ids=[[0] * length for _, length in rows],
    )
    right = [grade_math_answer(text, GOLD) for text in completions]
    totals = scores.total.tolist()
    wrong = [total for total, good in zip(totals, right) if not good]
    assert min(t for t, good in zip(totals, right) if good) > max(wrong, default=-math.inf)


def test_weights_with_which_shaping_would_win_are_refused():
    make_set(total_weight=0.99)
    with pytest.raises(ValueError, match=r"together .*_reward 0.333333, .* right answer .*\(1\)"):
        make_set(total_weight=1.0)
    correctness = Reward("c", math_correctness_reward, weight=2.0)
    RewardSet([correctness, Reward("f", math_format_reward, weight=1.5)])
    with pytest.raises(ValueError, match="together f 3 can outweigh"):
        RewardSet([correctness, Reward("f", math_format_reward, weight=-3.0)])
    RewardSet([Reward("f", math_format_reward, weight=3.0)])  # nothing that decides
    node = {"_component_": "torchtune_grpo.rewards.math_correctness_reward", "isolation": "process"}
    format_node = {"_component_": "torchtune_grpo.rewards.math_format_reward", "weight": 1.0}
    with pytest.raises(ValueError, match="together math_format_reward 1"):
        RewardSet.from_config([node, format_node])


def test_a_reward_that_decides_may_declare_its_range():
    def right(prompts, completions, **columns):
        return [1.0] * len(completions)

    right.decides, right.reward_range = True, (0.0, 1.0)
    RewardSet([Reward("right", right), Reward("f", math_format_reward, weight=0.99)])
    with pytest.raises(ValueError, match=r"together f 1 can outweigh .*\(1\)"):
        RewardSet([Reward("right", right), Reward("f", math_format_reward, weight=1.0)])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<think>a</think> <answer>13", 0.0),
        ("a</think> <answer>12 or 13</answer>", 0.0),
        ("<answer>12</answer>", 1.0),
        ("<answer>12</answer><think>a</think>", 0.0),
        ("<think><think>a</think><answer>1</answer>", 1.0),
        ("<answer>12</answer><answer>13</answer>", 0.0),
    ],
)
def test_numbers_by_hand(text, number):
    assert score_one(math_number_reward, text) == number


def test_overlong_penalty_by_hand():
    """DAPO's numbers: 16,384 tokens expected, 4,096 of cache."""
    reward = OverlongPenalty(max_length=20480, cache=4096)
    ids = [range(length) for length in (0, 16384, 17408, 18432, 20480, 20481, 10**6)]
    values = reward(prompts=[""] * 7, completions=[""] * 7, completion_ids=ids)
    assert values == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="cache=11: .*max_length=10"):
        OverlongPenalty(max_length=10, cache=11)
