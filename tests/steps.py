"""A step's rows and their scores, small enough to compute by hand."""

import math
from types import SimpleNamespace

import torch
from common import rows_of

from torchtune_grpo.monitor.recorder import GroupRecorder
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Completion, Prompt, Trajectory

NAN = math.nan
LENGTHS = torch.tensor([1, 2, 3, 2])


def make_trajectory() -> Trajectory:
    """Make two groups of two; row 2's last token is not trained on, and row 3 was cut off."""
    rows = rows_of(
        torch.arange(16).view(4, 4),
        torch.ones(4, dtype=torch.long),
        LENGTHS,
        prompt_indices=torch.tensor([7, 7, 3, 3]),
        step_indices=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([False, False, False, True]),
        sampler_logprobs=torch.full((4, 3), -1.0),
        behaviour_logprobs=torch.full((4, 3), -1.0) - torch.tensor([0.0, math.log(0.5), 9.0]),
        prompts=[Prompt.of(text) for text in "ppqq"],
        completions=[Completion.of(text, "stop_string") for text in "abcd"],
        advantages=torch.tensor([0.7, -0.7, 0.0, 0.0]),
    )
    rows.response_mask[2, 2] = False
    return rows


def make_scores() -> RewardScores:
    """Reward ``a`` fails on row 3 and counts as its group's mean; ``b`` does not apply to row 0."""
    return RewardScores(
        names=["a", "b"],
        scores=torch.tensor([[1.0, NAN], [2.0, 0.5], [4.0, 0.5], [NAN, 0.5]]),
        weights=torch.tensor([1.0, 2.0]),
        total=torch.tensor([1.0, 3.0, 5.0, 5.0]),
        seconds=[0.25, 0.5],
        failed=torch.tensor([[False, False]] * 3 + [[True, False]]),
        extra={"note": ["w", "x", "y", "z"]},
        metrics=[("a/depth", 3.0), ("a/depth", 6.0)],
    )


def make_recorder(
    trajectory: Trajectory, scores: RewardScores, *, num_groups: int = 2
) -> GroupRecorder:
    """Make a recorder that has seen a rollout."""
    cfg = SimpleNamespace(log_groups=num_groups, grpo_samples=2, seed=0)
    recorder = GroupRecorder(cfg, decider="a")
    recorder.rollout(trajectory, scores)
    return recorder
