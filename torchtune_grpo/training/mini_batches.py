"""A step's rows -> mini-batches, one per optimizer step, each cut into micro-batches.

The rows of a micro-batch share a forward pass. Micro-batches and their layouts are made once a
step, and serve the reference, the old log-probs and the optimizer steps of every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.parallel import gather_over_ranks, sum_over_ranks
from torchtune_grpo.machine.segments import fill_parts
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.packing import (
    MicroBatch,
    empty_layout,
    packed_layout,
    row_layout,
)
from torchtune_grpo.training.parts import Parts
from torchtune_grpo.trajectory import Trajectory, length_mask


@dataclass
class MiniBatch:
    """This rank's rows of one optimizer step."""

    trajectory: Trajectory  # the rows that get a pass, with weights
    micro_batches: list[MicroBatch]
    num_tokens: int  # tokens trained on, over all ranks, including rows without a pass
    old_logprobs: Tensor | None = None  # [N, L]; None: the policy is the one that sampled


def mini_batches(trajectory: Trajectory, parts: Parts) -> list[MiniBatch]:
    """Deal out a step's scored groups to an epoch's optimizer steps; every rank has to call it."""
    cfg, policy = parts.cfg, parts.policy
    dealt = _deal(trajectory, count=cfg.num_minibatches)
    batches = [_mini_batch(dealt_rows, parts) for dealt_rows in dealt]
    if cfg.objective.sampling_correction == "old_logprobs":
        for batch in batches:
            batch.old_logprobs = batch.trajectory.sampler_logprobs
    else:
        # The first update's own pass yields its old log-probs. With dropout these would come from a
        # policy other than the one that sampled, and from a different one in each epoch.
        has_dropout = any(
            isinstance(module, nn.Dropout) or getattr(module, "attn_dropout", 0) > 0
            for module in policy.modules()
        )
        first = 0 if cfg.updates_per_step > 1 and has_dropout else 1
        policy.eval()
        for batch in batches[first:]:
            batch.old_logprobs = trajectory_logprobs(
                policy, batch.micro_batches, temperature=cfg.temperature
            )
    return batches


def _deal(trajectory: Trajectory, *, count: int) -> list[Trajectory]:
    """Deal the groups to the optimizer steps in turn, the same way on any number of ranks.

    The sampler's order is random already. A step may get no rows on a rank.
    """
    if count == 1:
        return [trajectory]
    ranks = gather_over_ranks(trajectory.step_indices.tolist())
    turns = {index: i % count for i, index in enumerate(sorted({*chain.from_iterable(ranks)}))}
    turn = torch.tensor([turns[index] for index in trajectory.step_indices.tolist()])  # [N]
    device = trajectory.tokens.device
    steps = [(turn == step).nonzero()[:, 0] for step in range(count)]  # each step's rows
    return [trajectory.select(rows.to(device), on_host=rows.tolist()) for rows in steps]


def _mini_batch(trajectory: Trajectory, parts: Parts) -> MiniBatch:
    """Weigh and cut the rows of a step, and add the reference's log-probs."""
    cfg, loss = parts.cfg, parts.loss
    num_tokens = sum_over_ranks(int(trajectory.response_mask.sum()))
    weights = loss.weights(
        trajectory.response_mask,
        prompt_indices=trajectory.prompt_indices,
        num_rows=sum_over_ranks(trajectory.num_rows),
        num_tokens=num_tokens,
        max_generated_tokens=cfg.max_generated_tokens,
    )  # [N, L]
    trajectory = replace(trajectory, weights=weights)
    if not loss.needs_all_rows:  # rows left out only count in the denominators
        trajectory = trajectory.select(trajectory.is_informative)
    passes = cut(trajectory, cfg)
    if parts.reference is not None:
        logprobs = parts.reference.logprobs(passes, temperature=cfg.temperature)
        trajectory = replace(trajectory, ref_logprobs=logprobs)
    return MiniBatch(trajectory, passes, num_tokens)


def cut(trajectory: Trajectory, cfg: GRPOConfig) -> list[MicroBatch]:
    """Cut N rows into micro-batches as the config says."""
    rows = cfg.forward_batch_size
    assert rows != "auto", "Run.build chooses what fits"
    return micro_batches(
        trajectory,
        group_size=cfg.grpo_samples,
        pack=cfg.pack_groups,
        rows=rows or max(1, trajectory.num_rows),
    )


def micro_batches(
    trajectory: Trajectory, *, group_size: int, pack: bool, rows: int
) -> list[MicroBatch]:
    """Cut N rows, grouped by prompt, into micro-batches of at most ``rows`` rows.

    Groups that do not fit are split. ``pack`` lays out rows with the same prompt as one.

    All ranks get the same number, at least one, as a sharded model requires; some may be empty. The
    largest comes first: its memory can be reused for the others.
    """
    groups = _groups(trajectory, most=min(rows, group_size) if pack else 1)
    plan = fill_parts(groups, size=len, room=rows)
    passes = max(1, *gather_over_ranks(len(plan)))
    plan += [[] for _ in range(passes - len(plan))]
    parts = [_micro_batch(trajectory, packs) for packs in plan]
    return sorted(parts, key=lambda part: -part.layout.tokens.numel())


def _micro_batch(trajectory: Trajectory, packs: list[list[int]]) -> MicroBatch:
    on_host = tuple(chain.from_iterable(packs))
    rows = torch.tensor(on_host, dtype=torch.long, device=trajectory.tokens.device)
    if not packs:
        return MicroBatch(on_host, rows, empty_layout(trajectory))
    part = trajectory.select(rows, on_host=())  # without texts
    if all(len(pack) == 1 for pack in packs):
        return MicroBatch(on_host, rows, row_layout(part))
    of_rows = [number for number, pack in enumerate(packs) for _ in pack]
    return MicroBatch(on_host, rows, packed_layout(part, of_rows))


def _groups(trajectory: Trajectory, *, most: int) -> list[list[int]]:
    """Split the rows into runs with the same prompt, of at most ``most`` rows each."""
    is_prompt = length_mask(trajectory.prompt_lengths, trajectory.tokens.shape[1])
    prompts = trajectory.tokens.where(is_prompt, -1)
    same = (prompts[1:] == prompts[:-1]).all(dim=1).tolist()
    groups: list[list[int]] = []
    for row in range(trajectory.num_rows):
        if row and same[row - 1] and len(groups[-1]) < most:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
