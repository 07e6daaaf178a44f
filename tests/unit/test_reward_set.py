"""Sets of weighted rewards: what a config builds, what is scored, and what is refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from torchtune_grpo.rewards import (
    Reward,
    RewardScores,
    RewardSet,
    math_correctness_reward,
)

HERE = __name__
CORRECTNESS = "torchtune_grpo.rewards.math_correctness_reward"
FORMAT = "torchtune_grpo.rewards.math_format_reward"
GOOD, BAD = "<think>a</think> <answer>12</answer>", "12"


def length_reward(prompts, completions, *, scale=1.0, limit=None, **columns):
    return [scale * min(len(text), limit or len(text)) for text in completions]


def even_rows_only(prompts, completions, *, flag, **columns):
    return [float(f) if i % 2 == 0 else None for i, f in enumerate(flag)]


class Bonus:
    """A reward with state."""

    def __init__(self, value: float, *, other: int = 0) -> None:
        self.value = value

    def __call__(self, prompts, completions, **columns):
        return [self.value] * len(completions)


def returns(value):
    def reward(prompts, completions, **columns):
        return value

    return reward


def score(*rewards, n=2, **columns) -> RewardScores:
    named = [Reward(f"r{i}", r) if not isinstance(r, Reward) else r for i, r in enumerate(rewards)]
    return RewardSet(named)(prompts=["p"] * n, completions=["c"] * n, columns=columns)


@pytest.fixture
def importable(monkeypatch):
    """This module under its own name, whichever way pytest imported it."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[HERE])
    return HERE


def test_two_rewards_by_hand():
    """1 * correctness + 0.1 * format, on a right text and on a number without tags."""
    rewards = RewardSet.from_config(
        [
            {"_component_": CORRECTNESS, "name": "correctness"},
            {"_component_": FORMAT, "name": "format", "weight": 0.1},
        ]
    )
    scores = rewards(prompts=["p", "q"], completions=[GOOD, BAD], columns={"answer": ["12", "12"]})
    assert scores.names == rewards.names == ["correctness", "format"]
    torch.testing.assert_close(scores.scores, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    torch.testing.assert_close(scores.weights, torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(scores.total, torch.tensor([1.1, 0.0]))
    assert [t.dtype for t in (scores.scores, scores.weights, scores.total)] == [torch.float32] * 3
    assert len(scores.seconds) == 2 and min(scores.seconds) >= 0


def test_a_reward_that_does_not_apply_is_nan_and_left_out_of_the_total():
    """Row 1: only the second reward applies. Row 3: none does, so that the total is 0."""
    always = Reward("always", returns([1.0, 2.0, 3.0, None]), weight=10)
    scores = score(Reward("even", even_rows_only, weight=-1), always, n=4, flag=[5, 6, 7, 8])
    expected = torch.tensor([[5.0, 1.0], [math.nan, 2.0], [7.0, 3.0], [math.nan, math.nan]])
    torch.testing.assert_close(scores.scores, expected, equal_nan=True)
    torch.testing.assert_close(scores.total, torch.tensor([5.0, 20.0, 23.0, 0.0]))


def test_accepted_return_types():
    """Bools, ints, tensors and tuples are numbers; dtype does not follow torch's default."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores = score(returns([True, False]), returns((2, None)), returns(torch.tensor([0.1, 3])))
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.scores[:, 0].tolist() == [1.0, 0.0]
    assert scores.scores[0, 1] == 2 and scores.scores[1, 1].isnan()
    assert {scores.scores.dtype, scores.weights.dtype, scores.total.dtype} == {torch.float32}
    nothing = score(returns([]), returns([]), n=0)
    assert nothing.scores.shape == (0, 2) and nothing.total.shape == (0,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "'r0' returned 1 values for 2 completions"),
        (None, "'r0' returned NoneType"),
        ("12", "'r0' returned str"),
        (torch.ones(2, 1), r"'r0' returned \[1.0\] at index 0"),
        (["1.0", 1.0], "'r0' returned '1.0' at index 0"),
        ([1.0, 1j], "'r0' returned 1j at index 1"),
    ],
)
def test_what_a_reward_may_not_return(value, message):
    """Never a silent broadcast, never a nan that looks like 'does not apply'."""
    with pytest.raises(ValueError, match=message):
        score(returns(value))


def test_rewards_get_keywords_and_lists_of_their_own():
    """A reward that changes what it gets changes nothing for the next one."""
    seen = []

    def vandal(*, prompts, completions, answer, **columns):
        count = len(completions)
        seen.append((list(prompts), list(completions), list(answer), sorted(columns)))
        for values in (prompts, completions, answer, *columns.values()):
            values.clear()
        return [0.0] * count

    score(vandal, vandal, answer=["1", "2"], other=[3, 4])
    assert seen == [(["p"] * 2, ["c"] * 2, ["1", "2"], ["other"])] * 2


def test_missing_column():
    message = r"'r0' needs the column 'answer', .* has \['answers', 'x'\] \(did you mean 'answers'"
    with pytest.raises(ValueError, match=message):
        score(math_correctness_reward, answers=["1", "2"], x=[1, 2])


def test_keyword_arguments_are_bound(importable):
    """For a function by partial, for a class by its constructor; the weight is not among them."""
    node = {"_component_": f"{importable}.length_reward", "scale": 2, "limit": 3, "weight": 0.5}
    bonus = {"_component_": f"{importable}.Bonus", "value": "${seven}", "name": "bonus"}
    cfg = OmegaConf.create({"rewards": [node, bonus], "seven": 7.0})
    rewards = RewardSet.from_config(cfg.rewards)
    scores = rewards(prompts=["p"], completions=["abcd"], columns={"limit": [1]})
    assert scores.names == ["length_reward", "bonus"]
    assert scores.scores.tolist() == [[6.0, 7.0]]  # the config's limit, not the column's
    assert scores.total.tolist() == [10.0]


def test_components_of_the_working_directory_can_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text(
        "def mine(prompts, completions, **columns):\n    return [4.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    rewards = RewardSet.from_config([{"_component_": "my_own_rewards.mine"}])
    assert rewards(prompts=["p"], completions=["c"], columns={}).total.tolist() == [4.0]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ([{"_component_": "no.such.thing"}], r"rewards\[0\]\._component_=no.such.thing"),
        ([{"_component_": "math.pi"}], "math.pi: not a function or a class .* 3.14"),
        ([{"_component_": FORMAT}] * 2, r"rewards\[1\]\.name=.math_format_reward."),
        ([{"_component_": FORMAT, "weight": math.nan}], r"rewards\[0\]\.weight=nan: .* finite"),
        (
            [{"_component_": FORMAT, "wieght": 0.1}],
            r"rewards\[0\]\.wieght=0.1.*did you mean 'weight'.*valid here: \['name', 'weight'",
        ),
        ([{"_component_": FORMAT, "prompts": 1}], r"rewards\[0\]\.prompts=1"),
        ([{"_component_": "HERE.Bonus", "valeu": 1}], r"valeu=1.*did you mean 'value'"),
        ([{"_component_": "HERE.Bonus"}], r"rewards\[0\]: could not construct .*'value'"),
    ],
)
def test_configs_that_are_refused(cfg, message, importable):
    cfg = yaml.safe_load(yaml.safe_dump(cfg).replace("HERE", importable))
    for given in (cfg, OmegaConf.create(cfg)):
        with pytest.raises(ValueError, match=message):
            RewardSet.from_config(given)


def test_functions_that_cannot_be_called_as_rewards_are_called():
    def no_columns(prompts, completions):
        return [0.0]

    with pytest.raises(ValueError, match=r"rewards\[0\] \(r\) takes only .*not further columns"):
        RewardSet([Reward("r", no_columns)])
    with pytest.raises(ValueError, match=r"rewards\[0\] \(r\) has no signature"):
        RewardSet([Reward("r", 3)])
