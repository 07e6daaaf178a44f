"""Dynamic sampling: uninformative groups are replaced by those of further prompts, in rounds.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2). A step rolls out and scores its
prompts, then as many further ones as groups failed the filter, and so on, until no group is missing
or ``max_resamples`` rounds have been added. The prompts are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.data.dataset import PromptData
from torchtune_grpo.data.samplers import prompts_of_rank
from torchtune_grpo.machine.parallel import rank, sum_over_ranks, world_size
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory


def passes_filter(scores: RewardScores, *, group_size: int, gate: str | None) -> Tensor:
    """Whether each group's rewards differ: [B] bool.

    A row's reward is the one named by ``gate``, ignoring NaN, or else the weighted sum.
    """
    values = (scores.total if gate is None else scores.of(gate)).view(-1, group_size)
    known = (group[~group.isnan()] for group in values)
    passes = [len(group) > 0 and bool((group != group[0]).any()) for group in known]
    return torch.tensor(passes, dtype=torch.bool)


class Rounds:
    """The rounds of one step's rollout: iterate over the prompts, and ``add`` their results.

    Without dynamic sampling there is one round, and all of its groups are kept. Every rank takes
    part in all rounds; a rank without a prompt gets one whose rows are not kept.
    ``next_rows(count, skip=n)`` gives rows of the data set, after the step's first n.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        dataset: PromptData,
        next_rows: Callable[..., list[int]],
        *,
        gate: str | None,
    ) -> None:
        self._gate = gate  # see passes_filter
        self._cfg, self._dataset, self._next_rows = cfg, dataset, next_rows
        self._rows: list[int] = []  # the data set's rows so far, of all ranks
        self._parts: list[tuple[Trajectory, RewardScores, Tensor]] = []
        self._own = 0  # this rank's groups in the round
        self.missing = cfg.batch_size * world_size()
        self.count = 0

    def __iter__(self) -> Iterator[PromptBatch]:
        while self.missing and self.count <= self._cfg.dynamic_sampling.max_resamples:
            rows = self._next_rows(self.missing, skip=len(self._rows))
            batch, self._own = prompts_of_rank(
                self._dataset, rows, before=self._rows, rank=rank(), world_size=world_size()
            )
            self._rows += rows
            self.count += 1
            yield batch

    def add(self, trajectory: Trajectory, scores: RewardScores) -> None:
        """Add a round's rows [n*G] and their scores."""
        size = self._cfg.grpo_samples
        kept = torch.ones(self._own, dtype=torch.bool)
        if self._cfg.dynamic_sampling.max_resamples:
            kept = passes_filter(scores, group_size=size, gate=self._gate)[: self._own]
        own = torch.arange(self._own * size)
        self._parts.append((trajectory.select(own), scores.select(own), kept))
        self.missing -= sum_over_ranks(int(kept.sum()))

    def result(self) -> tuple[Trajectory, RewardScores, Tensor]:
        """Return all N sampled rows, their scores, and whether each is kept, [N] bool."""
        trajectories, scores, kept = zip(*self._parts, strict=True)
        mask = torch.cat(kept).repeat_interleave(self._cfg.grpo_samples)
        return Trajectory.join(trajectories), RewardScores.join(scores), mask

    def metrics(self) -> dict[str, float]:
        """Return the numbers of added rounds and missing groups, and the share of groups kept."""
        if not self._cfg.dynamic_sampling.max_resamples:
            return {}
        full = self._cfg.batch_size * world_size()
        return {
            "dynamic_sampling/rounds": self.count - 1.0,
            "dynamic_sampling/kept": (full - self.missing) / len(self._rows),
            "dynamic_sampling/missing": float(self.missing),
        }
