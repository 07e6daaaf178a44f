"""Scores of samples -> rates, by hand, and a split that two ranks share."""

import math
from types import SimpleNamespace

import pytest
import torch

from torchtune_grpo import evaluation
from torchtune_grpo.evaluation import Evaluator, pass_rates
from torchtune_grpo.rollout import SamplingParams


def test_pass_at_n_is_the_share_of_prompts_with_a_right_answer():
    """Neither the share of right answers nor that of the sample that is right most often."""
    scores = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, math.nan]])
    assert pass_rates(scores) == {"pass@1": pytest.approx(4 / 12), "pass@3": 3 / 4}


def test_one_sample_has_no_pass_at_n():
    assert pass_rates(torch.tensor([[1.0], [0.0]])) == {"pass@1": 0.5}


class Split:
    """Prompts that are their own indices."""

    prefill = ""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        return {"index": index, "tokens": [index], "prompt": str(index), "columns": {}}


class Rewards:
    """Two rewards; prompt p's sample s is right, by the second, if s < p (greedy: if p is odd)."""

    names = ["length", "correct"]

    def __call__(self, *, completions, trainer_state, **rows):
        assert trainer_state == "state"
        return SimpleNamespace(scores=torch.tensor([[9.0, float(c)] for c in completions]))


def fake_roll_out(engine, prompts, *, group_size, params, seed, step, **_):
    assert (seed, step) == (3, -1)
    if params.temperature == 0:
        assert group_size == 1 and params.top_k is None and params.min_new_tokens == 1
        right = [p % 2 for p in prompts.indices]
    else:
        assert params.temperature == 0.7 and params.top_k == 5
        right = [s < p for p in prompts.indices for s in range(group_size)]
    completions = [int(value) for value in right]
    return SimpleNamespace(prompts=[], completions=completions, columns={}, completion_ids=[])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_the_prompts_and_agree(ranks, monkeypatch):
    """Each prompt counts once on any number of ranks, more than there are prompts included."""
    monkeypatch.setattr(evaluation, "roll_out", fake_roll_out)
    monkeypatch.setattr(evaluation, "world_size", lambda: ranks)
    evaluator = Evaluator(
        dataset=Split(5),
        tokenizer=None,
        rewards=Rewards(),
        accuracy_reward="correct",
        params=SamplingParams(max_generated_tokens=4, temperature=0.7, top_k=5, min_new_tokens=1),
        num_samples=2,
        seed=3,
    )
    gathered: list[list[torch.Tensor]] = [[], []]  # greedy and sampled scores, rank by rank

    def gather(scores):
        everyone = gathered[scores.shape[1] - 1]
        everyone.append(scores)
        return everyone

    monkeypatch.setattr(evaluation, "gather_over_ranks", gather)
    for rank in range(ranks):  # the last one finds the scores of all others
        monkeypatch.setattr(evaluation, "rank", lambda rank=rank: rank)
        result = evaluator(None, state="state")
    # Greedy: prompts 1 and 3 of 5. Sampled: 0, 1, 2, 2, 2 right of 2; 4 of 5 prompts at all.
    assert result == pytest.approx({"eval/accuracy": 0.4, "eval/pass@1": 0.7, "eval/pass@2": 0.8})


def test_unknown_accuracy_reward_is_refused():
    settings = dict(dataset=Split(1), tokenizer=None, rewards=Rewards(), num_samples=0, seed=0)
    with pytest.raises(ValueError, match="no reward of this name; rewards has length, correct"):
        Evaluator(
            accuracy_reward="corect", params=SamplingParams(max_generated_tokens=1), **settings
        )
