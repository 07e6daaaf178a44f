"""A step's statistics as one flat dict of named numbers. Names are TRL's where TRL has one."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtune_grpo.advantages import group_stds
from torchtune_grpo.environments.conversations import conversation_metrics
from torchtune_grpo.loss import LossOutput
from torchtune_grpo.machine.parallel import gather_over_ranks
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory

_NEGATED = "-"  # prefix of a minimum's name: it is kept as a negated maximum
_OF_NOTHING = -math.inf  # the maximum of no values


class StepMetrics:
    """Collects a step's statistics as sums and counts, so that parts and ranks add up exactly.

    Values stay on their device until ``compute``; adding them does not wait for a GPU.
    """

    def __init__(self) -> None:
        # name -> [3] sum, sum of squares, count
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}  # name -> scalar
        self._seconds: dict[str, float] = defaultdict(float)
        self._begun = time.perf_counter()
        self.updates = 0  # optimizer steps

    def add_values(self, name: str, values: Tensor) -> None:
        """Add values to the mean called ``name``; NaN means "does not apply"."""
        values = values.detach().double()
        applies = ~values.isnan()
        values = values.where(applies, 0)
        self.add_sum(name, values.sum(), applies.sum(), values.square().sum())

    def add_sum(
        self, name: str, total: Tensor, count: Tensor | float, squares: Tensor | float = 0.0
    ) -> None:
        """Add ``count`` values of sum ``total`` to the mean called ``name``."""
        sums = torch.stack([_on_device(v, total.device) for v in (total, squares, count)])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def add_max(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value).detach().double()
        known = self._largest.get(name, value)
        self._largest[name] = torch.maximum(known, value)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to ``name``."""
        start = time.perf_counter()
        yield
        self._add_seconds(name, since=start)

    def _add_seconds(self, name: str, *, since: float) -> None:
        if torch.cuda.is_initialized():  # a run on the CPU leaves GPUs alone
            torch.cuda.synchronize()
        self._seconds[name] += time.perf_counter() - since

    def finish(self) -> dict[str, float]:
        """End the step, with its ``step_time``, and ``compute``."""
        self._add_seconds("step_time", since=self._begun)
        return self.compute()

    def add_numbers(self, numbers: Mapping[str, float]) -> None:
        """Add numbers that are the same on all ranks."""
        for name, value in numbers.items():
            self.add_max(name, value)

    def add_rollout(self, trajectory: Trajectory, scores: RewardScores, *, group_size: int) -> None:
        """Add the rewards and the completions of N rows with advantages, trained on or not."""
        assert trajectory.advantages is not None
        spread = group_stds(scores.total, group_size=group_size)  # [B]
        informative = trajectory.is_informative.view(-1, group_size).any(dim=1)
        applies = ~scores.total.isnan().view(-1, group_size).all(dim=1)  # [B]
        self.add_values("reward", scores.total)
        self.add_values("reward_std_in_group", spread[applies])
        self.add_values("frac_reward_zero_std", spread[applies] == 0)
        self.add_values("frac_informative_groups", informative[applies.to(informative.device)])
        texts = [*map(str, trajectory.completions)]
        groups = [texts[i : i + group_size] for i in range(0, len(texts), group_size)]
        same = torch.tensor([len({*group}) == 1 for group in groups])
        self.add_values("frac_groups_same_text", same)
        for column, name in enumerate(scores.names):
            failed = scores.failed[:, column]
            none = scores.scores[:, column].isnan() & ~failed
            self.add_values(f"rewards/{name}/mean", scores.scores[:, column])
            self.add_values(f"rewards/{name}/errors", failed)
            self.add_values(f"rewards/{name}/none", none)
            self._seconds[f"time/rewards/{name}"] += scores.seconds[column]
        for name, values in conversation_metrics(trajectory.completions).items():
            self.add_values(name, torch.tensor(values, dtype=torch.float64))
        for name, value in scores.metrics:
            self.add_values(f"rewards/{name}", torch.tensor(value))
        lengths = trajectory.sampled_lengths
        ended = ~trajectory.truncated
        kept = (trajectory.sampler_logprobs - trajectory.behaviour_logprobs).exp()
        for kind, counted in (("", lengths), ("_terminated", lengths[ended])):
            self.add_values(f"completions/mean{kind}_length", counted)
            if len(counted):
                self.add_max(f"{_NEGATED}completions/min{kind}_length", -counted.min())
                self.add_max(f"completions/max{kind}_length", counted.max())
        self.add_values("completions/clipped_ratio", trajectory.truncated)
        tokens = trajectory.prompt_lengths + trajectory.response_lengths
        self.add_sum("num_tokens", tokens.sum(), 0)
        sampled = -trajectory.sampler_logprobs.where(trajectory.response_mask, math.nan)
        self.add_values("sampling/entropy", sampled)
        self.add_values("sampling/kept_mass", kept.where(trajectory.response_mask, math.nan))

    def add_sampling_gap(self, trajectory: Trajectory, logprobs: Tensor) -> None:
        """Add how far the trainer's log-probs [N, L] are from the sampler's, under one policy."""
        gap = (logprobs - trajectory.sampler_logprobs).abs()
        is_trained = trajectory.response_mask
        self.add_values("sampling/sampling_logp_difference/mean", gap.where(is_trained, math.nan))
        if len(gap):
            largest = gap.where(is_trained, _OF_NOTHING).max()
            self.add_max("sampling/sampling_logp_difference/max", largest)

    def add_update(self, output: LossOutput, *, entropy: Tensor, response_mask: Tensor) -> None:
        """Add the loss's statistics of n rows, and their entropy [n, L]."""
        self.add_values("entropy", entropy.where(response_mask, math.nan))
        count = response_mask.sum()
        for name, total in output.sums.items():
            self.add_sum(name, total, count)

    def compute(self) -> dict[str, float]:
        """Return means, standard deviations (``.../std`` beside ``.../mean``), extremes, seconds.

        They are over all ranks: sums and counts are added before they are divided; times are the
        slowest rank's.
        """
        own = {name: sums.tolist() for name, sums in self._sums.items()}
        largest = {name: value.item() for name, value in self._largest.items()}
        sums: dict[str, list[float]] = {}
        maxima: dict[str, float] = {}
        for rank_sums, rank_maxima in gather_over_ranks((own, largest | self._seconds)):
            for name, values in rank_sums.items():
                sums[name] = [*map(sum, zip(values, sums.get(name, [0.0] * 3), strict=True))]
            for name, value in rank_maxima.items():
                maxima[name] = max(value, maxima.get(name, _OF_NOTHING))
        result = {}
        for name, (total, squares, count) in sums.items():
            if not count:
                continue  # it applied to nothing, or has no mean
            result[name] = mean = total / count
            is_reward = name.startswith("rewards/") and name.endswith("/mean")
            if (is_reward or name == "reward") and count > 1:
                variance = max(squares - count * mean**2, 0.0) / (count - 1)
                std = "reward_std" if name == "reward" else name.removesuffix("mean") + "std"
                result[std] = math.sqrt(variance)
        for name, value in maxima.items():
            if value != _OF_NOTHING:
                is_min = name.startswith(_NEGATED)
                result[name.removeprefix(_NEGATED)] = -value if is_min else value
        if "num_tokens" in sums:
            result["num_tokens"] = sums["num_tokens"][0]
        tokens = sums.get("completions/mean_length", [0.0])[0]
        if "time/rollout" in result:  # a fork may not time it
            result["rollout/tokens_per_second"] = tokens / result["time/rollout"]
        if "step_time" in result:
            result["tokens_per_second"] = tokens / result["step_time"]
        return result


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a float64 scalar. A kernel fills in a number, as a copy would wait for the GPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
