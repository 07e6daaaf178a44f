"""Statistics of a step -> one flat dict of named numbers. Names are TRL's where TRL has one."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtune_grpo.loss import LossOutput
from torchtune_grpo.parallel import gather_over_ranks
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory


class StepMetrics:
    """Collects a step's statistics as sums and counts, so that parts and ranks add up exactly."""

    def __init__(self) -> None:
        # name -> [sum, sum of squares, count]
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._max: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def add_values(self, name: str, values: Tensor) -> None:
        """Adds values to the mean called ``name``; NaN means "does not apply"."""
        values = values.detach().double()
        values = values[~values.isnan()]
        self.add_sum(name, values.sum().item(), values.numel(), values.square().sum().item())

    def add_sum(self, name: str, total: float, count: float, squares: float = 0.0) -> None:
        """Adds ``count`` values of sum ``total`` to the mean called ``name``."""
        for i, value in enumerate((total, squares, count)):
            self._sums[name][i] += value

    def add_max(self, name: str, value: float) -> None:
        """Keeps the largest value."""
        self._max[name] = max(value, self._max.get(name, -math.inf))

    @contextmanager
    def timer(self, stage: str) -> Iterator[None]:
        """Adds the seconds that the block takes to ``time/<stage>``."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[f"time/{stage}"] += time.perf_counter() - start

    def add_rollout(self, trajectory: Trajectory, scores: RewardScores, *, group_size: int) -> None:
        """Adds what the rewards and the completions' lengths say.

        Args:
            trajectory (Trajectory): N rows.
            scores (RewardScores): of the same N rows.
            group_size (int): G.
        """
        spread = scores.total.view(-1, group_size).std(dim=1)  # [B]
        self.add_values("reward", scores.total)
        self.add_values("reward_std", spread)
        self.add_values("frac_reward_zero_std", (spread == 0).float())
        self.add_values("frac_informative_groups", (spread != 0).float())
        for column, name in enumerate(scores.names):
            failed = scores.failed[:, column]
            self.add_values(f"rewards/{name}/mean", scores.scores[:, column])
            self.add_values(f"rewards/{name}/errors", failed.float())
            none = scores.scores[:, column].isnan() & ~failed
            self.add_values(f"rewards/{name}/none", none.float())
            self._seconds[f"time/rewards/{name}"] += scores.seconds[column]
        for name, value in scores.metrics:
            self.add_sum(f"rewards/{name}", value, 1)
        lengths = trajectory.response_lengths
        self.add_values("completions/mean_length", lengths)
        self.add_max("completions/max_length", lengths.max().item())
        self.add_values("completions/clipped_ratio", trajectory.truncated.float())
        self.add_values("completions/mean_terminated_length", lengths[~trajectory.truncated])
        if trajectory.drawn_logprobs is not None:
            kept = (trajectory.sampler_logprobs - trajectory.drawn_logprobs).exp()
            self.add_values("sampling/kept_mass", kept[trajectory.response_mask])

    def add_update(
        self,
        part: Trajectory,
        output: LossOutput,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        share: float,
        first: bool,
    ) -> None:
        """Adds what a micro-batch's loss says.

        Args:
            part (Trajectory): n rows.
            output (LossOutput): of the same rows.
            logprobs (Tensor): [n, L] under the current policy, without gradient.
            entropy (Tensor): [n, L].
            share (float): n over the rows of the whole optimizer step.
            first (bool): whether the policy is still the one that sampled the rows.
        """
        tokens = int(part.response_mask.sum())
        # The shares of a step add up to one, and so do those of each of several optimizer steps.
        self.add_sum("loss", output.loss.item(), share)
        self.add_values("entropy", entropy[part.response_mask])
        for name, total in output.sums.items():
            self.add_sum(name, total.item(), tokens)
        if first:
            difference = (logprobs - part.sampler_logprobs)[part.response_mask].abs()
            self.add_values("sampling/logp_difference/mean", difference)
            if tokens:
                self.add_max("sampling/logp_difference/max", difference.max().item())

    def compute(self) -> dict[str, float]:
        """Means, standard deviations (``.../std`` beside ``.../mean``), maxima and seconds.

        Over all ranks: sums and counts are added before they are divided; times are the slowest
        rank's.
        """
        sums, maxima = _over_ranks(dict(self._sums), {**self._max, **self._seconds})
        result = {}
        for name, (total, squares, count) in sums.items():
            if not count:
                continue  # nothing that it applies to
            mean = total / count
            result[name] = mean
            if name.startswith("rewards/") and name.endswith("/mean") and count > 1:
                variance = max(squares - count * mean**2, 0.0) / (count - 1)
                result[name.removesuffix("/mean") + "/std"] = math.sqrt(variance)
        result |= maxima
        if "time/rollout" in result:
            tokens = sums["completions/mean_length"][0]
            result["rollout/tokens_per_second"] = tokens / result["time/rollout"]
            result["tokens_per_second"] = tokens / result["time/step"]
        return result


def _over_ranks(
    sums: dict[str, list[float]], maxima: dict[str, float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    all_sums: dict[str, list[float]] = {}
    all_max: dict[str, float] = {}
    for rank_sums, rank_max in gather_over_ranks((sums, maxima)):
        for name, values in rank_sums.items():
            old = all_sums.get(name, [0.0] * len(values))
            all_sums[name] = [a + b for a, b in zip(old, values)]
        for name, value in rank_max.items():
            all_max[name] = max(value, all_max.get(name, -math.inf))
    return all_sums, all_max
