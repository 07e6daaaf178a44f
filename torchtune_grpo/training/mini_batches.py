"""A step's rows -> what each of its optimizer steps works on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.loss import Loss
from torchtune_grpo.machine import parallel
from torchtune_grpo.training import MicroBatch, micro_batches
from torchtune_grpo.training.reference import Reference
from torchtune_grpo.trajectory import Trajectory


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step, of this rank.

    Attributes:
        trajectory (Trajectory): those that get a pass, with weights.
        parts (list[MicroBatch]): which of them share one.
        num_tokens (int): trained on, of all ranks; those of rows without a pass, too.
    """

    trajectory: Trajectory
    parts: list[MicroBatch]
    num_tokens: int


def mini_batches(
    trajectory: Trajectory, cfg: GRPOConfig, *, loss: Loss, reference: Reference | None
) -> list[MiniBatch]:
    """Deals out a step's groups to the optimizer steps of an epoch; every rank has to call it.

    Args:
        trajectory (Trajectory): N rows with advantages, whole groups or what is left of them.
        cfg (GRPOConfig): says how many steps there are, and how rows share forward passes.
        loss (Loss): gives the weights, whose denominators are of one step and all ranks.
        reference (Reference | None): computes its log-probs; None = no KL term.

    Returns:
        list[MiniBatch]: ``num_minibatches`` of them.
    """
    dealt = deal(trajectory, count=cfg.num_minibatches)
    return [_mini_batch(part, cfg, loss=loss, reference=reference) for part in dealt]


def deal(trajectory: Trajectory, *, count: int) -> list[Trajectory]:
    """The k-th group for the k-th optimizer step, and so on in turn; every rank has to call it.

    Each step has the same groups on any number of ranks. Their order is the sampler's, which is
    random already. Some may get no row.
    """
    if count == 1:
        return [trajectory]
    ranks = parallel.gather_over_ranks(trajectory.places.tolist())
    turns = {place: i % count for i, place in enumerate(sorted({*chain.from_iterable(ranks)}))}
    turn = torch.tensor([turns[place] for place in trajectory.places.tolist()])  # [N]
    device = trajectory.tokens.device
    rows = [(turn == number).nonzero()[:, 0] for number in range(count)]
    return [trajectory.select(each.to(device), numbers=each.tolist()) for each in rows]


def _mini_batch(
    trajectory: Trajectory, cfg: GRPOConfig, *, loss: Loss, reference: Reference | None
) -> MiniBatch:
    num_tokens = parallel.sum_over_ranks(int(trajectory.response_mask.sum()))
    weights = loss.weights(
        trajectory.response_mask,
        prompt_indices=trajectory.prompt_indices,
        num_rows=parallel.sum_over_ranks(trajectory.num_rows),
        num_tokens=num_tokens,
        max_generated_tokens=cfg.max_generated_tokens,
    )  # [N, L]
    trajectory = replace(trajectory, weights=weights)
    if not loss.needs_all_rows:  # the others count in the denominators alone
        assert trajectory.advantages is not None
        trajectory = trajectory.select(trajectory.advantages != 0)
    parts = micro_batches(
        trajectory,
        group_size=cfg.grpo_samples,
        pack=cfg.pack_groups,
        rows=cfg.rows_per_forward,
        token_budget=cfg.forward_token_budget,
        dense=cfg.compile,
    )
    if reference is not None:
        ref_logprobs = reference.logprobs(parts, temperature=cfg.temperature)
        trajectory = replace(trajectory, ref_logprobs=ref_logprobs)
    return MiniBatch(trajectory, parts, num_tokens)
