"""Which rows share a forward pass: a fixed number of them, or as many as a token budget holds.

The micro-batches of a step and their layouts are made once, for the reference, the old log-probs
and every optimizer step alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtune_grpo.machine.parallel import gather_over_ranks
from torchtune_grpo.training.packing import (
    Layout,
    empty_layout,
    packed_layout,
    response_inputs,
    row_layout,
)
from torchtune_grpo.trajectory import Trajectory, length_mask


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass.

    Attributes:
        numbers (tuple[int, ...]): [n] rows of the trajectory; there may be none.
        rows (Tensor): the same on the device.
        layout (Layout): how they are laid out.
    """

    numbers: tuple[int, ...]
    rows: Tensor
    layout: Layout

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        return replace(self, rows=self.rows.to(device), layout=self.layout.to(device))


def micro_batches(
    trajectory: Trajectory,
    *,
    group_size: int,
    pack: bool,
    rows: int,
    token_budget: int | None = None,
    dense: bool = False,
) -> list[MicroBatch]:
    """Cuts a trajectory into micro-batches; each row is in exactly one.

    On all ranks there are equally many, at least one, as ranks that shard the model need it: where
    a rank runs out of rows, it gets some without any.

    Args:
        trajectory (Trajectory): N rows, those of a prompt after each other; not always G of them,
            if some were dropped.
        group_size (int): G.
        pack (bool): lay out rows with the same prompt as one.
        rows (int): the most rows of a micro-batch; without meaning under a budget.
        token_budget (int | None): the most tokens of a forward pass, padding included. Groups that
            do not fit are split, and what is of similar length shares a micro-batch. A single row
            that does not fit would run alone; the recipe refuses a budget that allows it.
        dense (bool): packed rows attend with a dense mask, as compiled layers need it.

    Returns:
        list[MicroBatch]: the largest first. If it fits, all do; and what it leaves to the allocator
        has room for the others, while small ones first leave holes that a larger one cannot use.
    """
    if token_budget is not None:
        plan = _within_budget(trajectory, group_size=group_size, pack=pack, budget=token_budget)
    else:
        plan = _within_rows(trajectory, most=min(rows, group_size) if pack else 1, rows=rows)
    passes = max(1, *gather_over_ranks(len(plan)))
    plan += [[] for _ in range(passes - len(plan))]
    parts = [_micro_batch(trajectory, packs, dense=dense) for packs in plan]
    return sorted(parts, key=lambda part: -part.layout.tokens.numel())


def _micro_batch(trajectory: Trajectory, packs: list[Tensor], *, dense: bool) -> MicroBatch:
    """packs: the rows of each packed row."""
    device = trajectory.tokens.device
    if not packs:
        none = torch.empty(0, dtype=torch.long, device=device)
        return MicroBatch((), none, empty_layout(trajectory))
    numbers = torch.cat(packs)
    rows = numbers.to(device)
    part = trajectory.select(rows, numbers=())  # without texts
    if all(len(pack) == 1 for pack in packs):
        return MicroBatch(tuple(numbers.tolist()), rows, row_layout(part))
    sizes = torch.tensor([len(pack) for pack in packs])
    of_rows = torch.arange(len(packs)).repeat_interleave(sizes).to(device)
    layout = packed_layout(part, of_rows, dense=dense)
    return MicroBatch(tuple(numbers.tolist()), rows, layout)


def _groups(trajectory: Trajectory, *, most: int) -> list[list[int]]:
    """Rows after each other that have the same prompt, at most ``most`` together."""
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


def _within_rows(trajectory: Trajectory, *, most: int, rows: int) -> list[list[Tensor]]:
    """As many packed rows, of at most ``most`` rows each, as fit into a micro-batch."""
    plan: list[list[Tensor]] = []
    free = 0
    for group in _groups(trajectory, most=most):
        if len(group) > free:
            plan.append([])
            free = rows
        plan[-1].append(torch.tensor(group))
        free -= len(group)
    return plan


def _within_budget(
    trajectory: Trajectory, *, group_size: int, pack: bool, budget: int
) -> list[list[Tensor]]:
    """First each group into as few packed rows as fit, then similar ones into micro-batches."""
    prompts = trajectory.prompt_lengths.tolist()
    inputs = response_inputs(trajectory).tolist()
    packs: list[list[int]] = []
    lengths: list[int] = []  # [packs] tokens of each
    for group in _groups(trajectory, most=group_size if pack else 1):
        for row in group:
            if row != group[0] and lengths[-1] + inputs[row] <= budget:
                packs[-1].append(row)
                lengths[-1] += inputs[row]
            else:
                packs.append([row])
                lengths.append(prompts[row] + inputs[row])

    plan: list[list[Tensor]] = []
    longest = 0
    for i in sorted(range(len(packs)), key=lambda i: -lengths[i]):
        if not plan or (len(plan[-1]) + 1) * longest > budget:
            plan.append([])
            longest = lengths[i]
        plan[-1].append(torch.tensor(packs[i]))
    return plan
