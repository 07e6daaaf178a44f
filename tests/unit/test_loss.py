"""Advantages and the loss family against hand-computed numbers and plain float64 loops."""

import itertools
import math
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from torchtune_grpo.advantages import OutcomeGate, group_advantages, reward_advantages, total_reward
from torchtune_grpo.config.keys import Advantage, RewardAggregation
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.loss import GRPOLoss, make_loss
from torchtune_grpo.training.dynamic_sampling import passes_filter
from torchtune_grpo.training.logprobs import importance_weights

ROWS, WIDTH, LIMIT = 6, 7, 8  # wider than the longest row
LENGTHS = [3, 5, 1, 0, 4, 2]
# With holes: what is trained on may stand anywhere in a row.
PLACES = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).argsort(dim=1)
MASK = PLACES < torch.tensor(LENGTHS)[:, None]
# In any order, and any number of rows of each; nothing of prompt 4 is trained on.
PROMPTS = torch.tensor([7, 7, 2, 4, 2, 7])
TOTALS = dict(num_rows=ROWS, num_tokens=sum(LENGTHS), max_generated_tokens=LIMIT)


# --- By hand ----------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Group 1: 1,0,0,1 has mean .5 and std(ddof=1) sqrt(1/3); group 2 has no spread.

    All eight: mean 1.25, squares 2 * .0625 + 2 * 1.5625 + 4 * .5625 = 5.5, std sqrt(5.5 / 7).
    MaxRL weighs a success by its rarity: one in four has c / mean = 3, three in four 1 / 3.
    """
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 0, 0, 0, 0])
    for normalization, size in {
        "group": 0.5 / (math.sqrt(1 / 3) + 1e-4),
        "batch": 0.5 / (math.sqrt(5.5 / 7) + 1e-4),
        "none": 0.5,
        "leave_one_out": 2 / 3,  # 1 - mean(0, 0, 1) and 0 - mean(1, 0, 1)
    }.items():
        values = group_advantages(rewards, group_size=4, normalization=normalization)
        torch.testing.assert_close(values, signs * size)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0])
    values = group_advantages(rewards, group_size=4, normalization="max_rl")
    expected = torch.tensor([3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0])
    torch.testing.assert_close(values, expected)


def test_the_gate_is_open_until_outcomes_differ():
    gate = OutcomeGate("right")

    def trained(*outcomes):
        found = gate(torch.tensor(outcomes, dtype=torch.float32), group_size=2).view(-1, 2)
        assert (found[:, 0] == found[:, 1]).all()
        return found[:, 0].tolist()

    assert trained(0, 0, math.nan, 0) == [True, True]  # nothing is right yet
    assert trained(1, 1, 1, math.nan) == [True, True]  # nor wrong
    assert trained(1, 0, 0, 0, 1, 1) == [True, False, False]
    assert trained(0, 0, math.nan, 0, math.nan, math.nan) == [False, False, True]


def test_the_gate_is_shut_by_another_rank(monkeypatch):
    monkeypatch.setattr("torchtune_grpo.advantages.gather_over_ranks", lambda own: [own, True])
    assert not OutcomeGate("right")(torch.zeros(4), group_size=2).any()


def test_max_rl_refuses_a_negative_reward_on_every_rank(monkeypatch):
    """One that this rank has, or another."""
    options = dict(group_size=2, normalization="max_rl")
    said = "objective.advantage=max_rl: .* reward -0.5, .* set it to group"
    with pytest.raises(ValueError, match=said):
        group_advantages(torch.tensor([1.0, -0.5]), **options)
    gather = "torchtune_grpo.advantages.gather_over_ranks"
    monkeypatch.setattr(gather, lambda lowest: [lowest, -2.0])
    with pytest.raises(ValueError, match="objective.advantage=max_rl: .* reward -2, "):
        group_advantages(torch.tensor([1.0, 0.0]), **options)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_reward_of_weight_0_changes_nothing(aggregation):
    """Even one of negative values, which MaxRL cannot scale, or of none."""
    nan = math.nan
    scores = torch.tensor([[1.0, -3.0, nan], [0.0, 2.0, nan], [1.0, nan, nan], [1.0, 9.0, nan]])
    options = {"group_size": 2, "normalization": "max_rl", "aggregation": aggregation}

    def advantages(scores, *weights):
        weights, failed = torch.tensor(weights), torch.zeros_like(scores).bool()
        total = total_reward(scores, failed, weights, group_size=2)
        return reward_advantages(total, scores, weights, **options)

    alone = advantages(scores[:, :1], 1.0)
    assert alone[0] > 0 and torch.equal(alone, advantages(scores, 1.0, 0.0, 0.0))


def test_a_reward_that_does_not_apply_is_left_out():
    nan = math.nan
    scores = torch.tensor([[1.0, nan], [0.0, nan], [1.0, 4.0], [0.0, nan]])
    weights = torch.tensor([1.0, 1.0])
    total = total_reward(scores, torch.zeros(4, 2).bool(), weights, group_size=2)
    assert total.tolist() == [1, 0, 5, 0]
    options = {"group_size": 2, "normalization": "none"}
    summed = reward_advantages(total, scores, weights, **options)
    torch.testing.assert_close(summed, torch.tensor([0.5, -0.5, 2.5, -2.5]))
    apart = reward_advantages(total, scores, weights, **options, aggregation="normalize_then_sum")
    expected = torch.tensor([0.5, -0.5, 0.5, -0.5])
    torch.testing.assert_close(apart, expected / (expected.std() + 1e-4))


@pytest.mark.parametrize("aggregation", get_args(RewardAggregation))
@pytest.mark.parametrize("normalization", get_args(Advantage))
def test_a_row_to_which_no_reward_applies_is_left_out(normalization, aggregation):
    """Its advantage is 0, and the others get what they would get without it."""
    nan, weights = math.nan, torch.tensor([2.0, 0.0])

    def advantages(column: list[float], size: int) -> list[float]:
        scores = torch.tensor([column, [0.5] * len(column)]).T
        total = total_reward(scores, torch.zeros_like(scores).bool(), weights, group_size=size)
        options = {"normalization": normalization, "aggregation": aggregation}
        return reward_advantages(total, scores, weights, group_size=size, **options).tolist()

    alone = advantages([1.0, 0.0, 0.5, 0.0, 3.0, 1.0], 3)
    beside = advantages([1.0, nan, 0.0, 0.5, 0.0, 3.0, 1.0, nan], 4)
    expected = [alone[0], 0, *alone[1:], 0]
    assert beside == pytest.approx(expected, abs=1e-6)
    assert any(alone) and advantages([nan, nan, 1.0, nan], 2) == [0, 0, 0, 0]
    assert advantages([nan, 1.0, 0.0, 0.0], 4)[0] == 0  # although 1/3 has no exact float


def test_a_failed_reward_counts_as_its_groups_mean():
    """Group 1: 1, 1, 1, failed teaches nothing. Group 2: the mean of 0.1, 0.1 and 0.4 is 0.2.

    A group in which all failed counts as 0, and one that does not apply has no total; 0.1 is no
    binary fraction, and three of them still have exactly the mean 0.1.
    """
    nan = math.nan
    column = [1, 1, 1, nan, 0.1, nan, 0.1, 0.4, nan, nan, nan, nan, 0.1, 0.1, 0.1, nan]
    scores = torch.tensor(column)[:, None]
    failed = scores.isnan()
    failed[8] = False
    total = total_reward(scores, failed, torch.tensor([1.0]), group_size=4)
    expected = [1, 1, 1, 1, 0.1, 0.2, 0.1, 0.4, nan, 0, 0, 0, 0.1, 0.1, 0.1, 0.1]
    torch.testing.assert_close(total, torch.tensor(expected), equal_nan=True)
    assert total[3] == 1 and total[15] == total[12]
    advantages = group_advantages(total, group_size=4)
    assert (advantages.view(4, 4) != 0).any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("aggregation", get_args(RewardAggregation))
@pytest.mark.parametrize("normalization", get_args(Advantage))
@settings(deadline=None, max_examples=25)
@given(
    equal=st.floats(-1e30, 1e30),
    other=st.lists(st.floats(-9, 9), min_size=3, max_size=3),
    fails=st.none() | st.integers(0, 2),
)
def test_equal_rewards_give_exactly_zero(normalization, aggregation, equal, other, fails):
    """In float32, for any value, next to a group that has spread; one of them may have failed."""
    assume(len(set(other)) > 1)
    column = torch.tensor([equal] * 3 + other, dtype=torch.float32)
    scores = torch.stack([column, column.new_tensor([1.0] * 3 + other)], dim=1)  # [6, 2]
    if normalization == "max_rl":  # may not be negative
        scores = scores.abs()
    failed = torch.zeros_like(scores).bool()
    if fails is not None:
        failed[fails, 0], scores[fails, 0] = True, math.nan
    weights = torch.tensor([0.3, 0.7])
    advantages = reward_advantages(
        total_reward(scores, failed, weights, group_size=3),
        scores,
        weights,
        group_size=3,
        normalization=normalization,
        aggregation=aggregation,
    )
    assert (advantages[:3] == 0).all()


@pytest.mark.parametrize(
    ("gate", "rewards", "passes"),
    [
        (None, [1.0, 0.0, 0.0], True),
        (None, [0.1, 0.1, 0.1], False),
        ("a", [1.0, 0.0, math.nan], True),
        ("a", [1.0, 1.0, math.nan], False),
    ],
)
def test_the_filter(gate, rewards, passes):
    """Of the sum of all rewards, or of the one that gates, whatever the sum is."""
    values, other = torch.tensor(rewards), torch.arange(len(rewards))
    scores = SimpleNamespace(of={"a": values}.get, total=other if gate else values)
    found = passes_filter(scores, group_size=len(rewards), gate=gate)
    assert found.tolist() == [passes]


# What other tests have left to the garbage collector is not theirs.
@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("aggregation", get_args(RewardAggregation))
@pytest.mark.parametrize("normalization", get_args(Advantage))
def test_advantages_are_those_of_the_groups_that_are_kept(normalization, aggregation):
    """The others are no part of the batch, whose spread may scale; there may be none left."""
    total = torch.tensor([0.0, 1.0, 1.0, 0.0, 5.0, 9.0, 2.0, 2.5])
    settings = {"group_size": 2, "normalization": normalization, "aggregation": aggregation}

    def advantages(rows, **kept):
        of_rewards = (total[rows], torch.stack([total, total**2], dim=1)[rows], torch.ones(2))
        return reward_advantages(*of_rewards, **settings, **kept)

    kept = torch.tensor([True, True, False, False, False, False, True, True])
    some = advantages(slice(None), kept=kept)
    assert torch.equal(some[kept], advantages(kept)) and not some[~kept].any()
    assert some[kept].all()
    nothing = advantages(slice(None), kept=torch.zeros(8, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros(8))


@pytest.mark.parametrize("aggregation", ["grpo", "dapo", "dr_grpo", "prompt"])
def test_weights_of_rows_do_not_depend_on_who_has_them(aggregation, monkeypatch):
    """Three ranks, one without a row; a prompt that comes twice is on two of them."""
    loss = GRPOLoss(aggregation=aggregation)
    whole = loss.weights(MASK, prompt_indices=PROMPTS, **TOTALS)
    cuts = [slice(0, 2), slice(2, 6), slice(6, 6)]
    ranks = [list(zip(PROMPTS[c].tolist(), LENGTHS[c], strict=True)) for c in cuts]

    def gather(own: list) -> list[list]:
        assert own in ranks
        return ranks

    monkeypatch.setattr("torchtune_grpo.loss.gather_over_ranks", gather)
    parts = [loss.weights(MASK[c], prompt_indices=PROMPTS[c], **TOTALS) for c in cuts]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_importance_weights_by_hand():
    ratio = torch.tensor([[1.5, 4.0, math.nan], [0.5, 0.5, 3.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    for mode, expected in {
        "token_truncate": [[1.5, 2.0, 0], [0.5, 0.5, 2.0]],
        "token_mask": [[1.5, 0.0, 0], [0.5, 0.5, 0.0]],
        "sequence_truncate": [[2.0, 2.0, 0], [0.75, 0.75, 0.75]],
        "sequence_mask": [[0.0, 0.0, 0], [0.75, 0.75, 0.75]],
    }.items():
        weights = importance_weights(
            trainer_logprobs=ratio.log() - 1,
            behaviour_logprobs=torch.full((2, 3), -1.0),
            response_mask=mask,
            mode=mode,
            cap=2.0,
        )
        torch.testing.assert_close(weights, torch.tensor(expected))


# --- Against a loop ---------------------------------------------------------------------------


POISON = torch.tensor([math.nan, math.inf, -math.inf, 1e300, math.nan, math.inf, -math.inf])


def random_batch() -> dict[str, torch.Tensor]:
    """Draws in which every case of every surrogate has a token: either sign, on each side.

    What stands at masked positions must change nothing.
    """
    g = torch.Generator().manual_seed(1)

    def draw() -> torch.Tensor:
        values = -torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) * 2
        return values.where(MASK, POISON)

    return {
        "logprobs": draw(),
        "old_logprobs": draw(),
        "ref_logprobs": draw(),
        "advantages": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "entropy": -draw(),
        "corrections": -draw(),
    }


def loop_loss(batch: dict[str, torch.Tensor], loss: GRPOLoss) -> torch.Tensor:
    """The papers' equations, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(LENGTHS):
        a = batch["advantages"][i]
        keys = ("logprobs", "old_logprobs", "ref_logprobs", "corrections", "entropy")
        new, old, ref, corrections, entropy = (batch[key][i][MASK[i]] for key in keys)
        for t in range(length):
            whole = loss.importance_sampling_level == "sequence"
            r = torch.exp((new - old).mean() if whole else new[t] - old[t])
            moved = new[t].exp() - old[t].exp()
            if loss.surrogate == "cispo":
                policy = torch.clamp(r, max=1.3).detach() * a * new[t]
            elif loss.surrogate == "dppo":
                policy = r * a * (moved <= 0.3 if a > 0 else moved >= -0.1)
            else:
                policy = torch.min(r * a, torch.clamp(r, 0.9, 1.3) * a)
                if loss.dual_clip is not None and a < 0:
                    policy = torch.max(policy, loss.dual_clip * a)
            d = ref[t] - new[t]
            kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[loss.kl_estimator]
            token = -policy * corrections[t] + loss.kl_coeff * kl
            token = token - loss.entropy_coeff * entropy[t]
            share = {
                "grpo": 1 / (ROWS * length),
                "dapo": 1 / sum(LENGTHS),
                "dr_grpo": 1 / (ROWS * LIMIT),
                "prompt": 1 / (3 * {7: 10, 2: 5}[int(PROMPTS[i])]),
            }[loss.aggregation]
            total = total + token * share
    return total


OPTIONS = {
    "importance_sampling_level": ["token", "sequence"],
    "surrogate": ["clipped", "cispo", "dppo"],
    "kl_estimator": ["k1", "k2", "k3"],
    "aggregation": ["grpo", "dapo", "dr_grpo", "prompt"],
    "dual_clip": [None, 1.5],
    "entropy_coeff": [0.0, 0.1],
}
COMBINATIONS = [
    options
    for values in itertools.product(*OPTIONS.values())
    if (options := dict(zip(OPTIONS, values)))
    and (options["surrogate"] == "clipped" or not options["dual_clip"])
    and (options["surrogate"] != "dppo" or options["importance_sampling_level"] == "token")
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("kl_coeff", [0.0, 0.7])
def test_loss_and_gradients_equal_the_loop(options, kl_coeff):
    """Summed over micro-batches of rows in another order."""
    batch = random_batch()
    low = None if options["surrogate"] == "cispo" else 0.1
    loss = GRPOLoss(kl_coeff=kl_coeff, epsilon_low=low, epsilon_high=0.3, **options)
    leaves = [batch["logprobs"].requires_grad_(), batch["entropy"].requires_grad_()]
    weights = loss.weights(MASK, prompt_indices=PROMPTS, **TOTALS).double()
    inputs = batch | {"weights": weights, "response_mask": MASK}
    value = 0.0
    for rows in torch.tensor([4, 0, 3, 5, 1, 2]).split(4):
        value = value + loss(**{name: part[rows] for name, part in inputs.items()}).loss
    grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    expected = loop_loss(batch, loss)
    expected_grads = torch.autograd.grad(expected, leaves, materialize_grads=True)
    torch.testing.assert_close(value, expected, atol=1e-7, rtol=0)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-7, rtol=0)


@pytest.mark.parametrize("masked", ["by the mask", "by an advantage of 0", "by the clip"])
@pytest.mark.parametrize(
    "surrogate",
    [{}, {"dual_clip": 3.0}, {"surrogate": "cispo"}, {"surrogate": "dppo"}],
    ids=lambda options: "-".join(map(str, options.values())) or "clipped",
)
def test_a_token_that_teaches_nothing_may_have_any_ratio(surrogate, masked):
    """e^200 is infinite in float32, and 0 * inf is NaN: others would have no gradient."""
    loss, advantage = GRPOLoss(kl_coeff=0, **surrogate), 1.0
    if masked == "by the clip" and "dual_clip" in surrogate:
        advantage = -1.0

    def gradient(log_ratio: float) -> torch.Tensor:
        logprobs = torch.tensor([[-0.1, -0.5], [-0.3, -0.2]], requires_grad=True)
        old = logprobs.detach() - torch.tensor([[log_ratio, 0.1], [0.0, 0.05]])
        mask = torch.ones(2, 2, dtype=torch.bool)
        mask[0, 0] = masked != "by the mask"
        first = 0.0 if masked == "by an advantage of 0" else advantage
        output = loss(
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=None,
            advantages=torch.tensor([first, -1.0]),
            weights=torch.full((2, 2), 0.25),
            response_mask=mask,
        )
        (grad,) = torch.autograd.grad(output.loss, logprobs)
        assert output.loss.isfinite() and (surrogate.get("surrogate") == "cispo" or grad[0, 0] == 0)
        return grad

    assert gradient(200.0).equal(gradient(2.0))


# --- Metrics, defaults and bad options --------------------------------------------------------


def test_clip_ratio_counts_tokens_where_clipping_bites():
    """Clipped is a low ratio that would still be pushed down, or a high one pushed up.

    A distance of 0 is one that is given. The last token is masked.
    """
    assert GRPOLoss(epsilon_low=0.0).epsilons == (0.0, 0.2)
    for advantage, low, high in ((1.0, 0, 2), (-1.0, 2, 0)):
        inputs = dict(
            logprobs=torch.tensor([[0.5, 0.5, 1.5, 1.5, 9.9]]).log(),
            old_logprobs=torch.zeros(1, 5),
            ref_logprobs=None,
            advantages=torch.tensor([advantage]),
            weights=torch.ones(1, 5),
            response_mask=torch.arange(5)[None] < 4,
        )
        names = ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
        assert GRPOLoss(kl_coeff=0)(**inputs).sums == dict(zip(names, (low, high, 2)))
        cispo = GRPOLoss(kl_coeff=0, surrogate="cispo", epsilon_high=0.2)
        assert cispo(**inputs).sums == {"cispo_clip_ratio": high}
        inputs["logprobs"] = torch.tensor([[0.1, 0.2, 0.8, 0.9, 0.9]]).log()
        inputs["old_logprobs"] = torch.tensor([[0.3, 0.3, 0.6, 0.6, 0.1]]).log()  # 0.1 is no move
        assert GRPOLoss(kl_coeff=0, surrogate="dppo")(**inputs).sums == dict(
            zip(names, (low // 2, high, low // 2 + high))
        )
        inputs["logprobs"] = inputs["old_logprobs"] + 1
        sequence = GRPOLoss(kl_coeff=0, importance_sampling_level="sequence")
        assert sequence(**inputs).sums == dict(zip(names, (0, 2 * high, 2 * high)))


@pytest.mark.parametrize(
    "bad",
    [
        {"dual_clip": 1.0},
        {"dual_clip": 2.0, "surrogate": "cispo"},
        {"epsilon_low": 0.2, "surrogate": "cispo"},
        {"dual_clip": 2.0, "surrogate": "dppo"},
        {"importance_sampling_level": "sequence", "surrogate": "dppo"},
    ],
)
def test_bad_options_are_refused_by_name(bad):
    node = OmegaConf.create({"_component_": "torchtune_grpo.loss.GRPOLoss", **bad})
    with pytest.raises(ConfigError, match=f"^loss.{next(iter(bad))}=[^\\n]*$"):
        make_loss(node)


class Bare(GRPOLoss):
    def __call__(self, **given):
        return super().__call__(**given).loss


class OfAnotherDevice(GRPOLoss):
    def __call__(self, **given):
        raise RuntimeError("no kernel for a CPU")


def test_a_loss_that_returns_a_tensor_is_refused_before_the_run():
    node = OmegaConf.create({"_component_": f"{__name__}.Bare"})
    with pytest.raises(ValueError, match=r"Bare: returns a Tensor; return LossOutput"):
        make_loss(node)
    assert make_loss(OmegaConf.create({"_component_": f"{__name__}.OfAnotherDevice"}))


def test_a_loss_that_is_none_is_refused_before_the_run():
    problem = "torch.nn.L1Loss: it has no weights, needs_reference, needs_ent.*docs/extending.md"
    with pytest.raises(ValueError, match=problem):
        make_loss(OmegaConf.create({"_component_": "torch.nn.L1Loss"}))
