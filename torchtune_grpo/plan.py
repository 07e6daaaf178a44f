"""Forecasts, before a run's first step, whether it learns, how long it takes and whether it fits.

    torchtune-grpo plan --config smollm2_135M_grpo optimizer.lr=1e-3

A plan sets up the run of a config in a folder of its own below ``output_dir``, samples the groups
of its first steps, trains on the last of them once, samples those prompts again, and throws that
run away. Only ``plan.json`` is left; the real run is the same as without a plan. The exit code is
0 if the run learns, 1 if that is doubtful, and 2 if it will not learn as it is.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, exp, lgamma, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import errors_in_one_line, plain
from torchtune_grpo.evaluation.statistics import bootstrap_interval
from torchtune_grpo.machine import lock
from torchtune_grpo.machine.device import free_bytes, only_warnings, seed_step
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.rewards import Reward, RewardScores
from torchtune_grpo.run import Run
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.trajectory import Trajectory

VERDICTS = ("learns", "doubtful", "will not learn")
_GROUP_SIZES = (4, 8, 16, 32)
_ROUNDS, _SECONDS = 4, 45  # limits on sampling; the first one reached ends it
_COMPARED = 10_000_000  # largest number of gradient entries to compare

# docs/plan.md says where these thresholds come from.
_FEW, _NEARLY_NONE = 0.15, 0.03  # shares of the groups
_FAR, _TOO_FAR = 0.5, 2.0  # nats a token, in one step
_NEAR = 0.2  # square root of nats a token, over all steps
_TIME_FACTOR = 1.6  # by which a step's time may differ, up or down
_SOON = 10  # number of steps for which shares are forecast

Numbers = dict[str, Any]
Array = NDArray[np.float64]


class Groups:
    """Stands in for the recorder's groups, and keeps all that rollouts returned."""

    def __init__(self, size: int, decider: str) -> None:
        self._size, self._decider = size, decider
        self.seen: list[tuple[Trajectory, RewardScores]] = []

    def rollout(self, trajectory: Trajectory, scores: RewardScores) -> None:
        self.seen.append((trajectory, scores))

    def update(self, trajectory: Trajectory, logprobs: Tensor) -> None:
        pass

    @property
    def scores(self) -> RewardScores:
        return RewardScores.join([scores for _, scores in self.seen])

    def outcomes(self, scores: RewardScores) -> Array:
        """The deciding reward by group, [B, G]; 0 where it does not apply."""
        return self.of(scores.of(self._decider).nan_to_num(0.0))

    def of(self, values: Tensor) -> Array:
        return values.double().cpu().numpy().reshape(-1, self._size)


class GradientSample:
    """Stands in for the optimizer, and keeps a part of the gradient instead of taking a step."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._stride = -(-sum(p.numel() for p in self._trained) // _COMPARED)
        self.values = torch.zeros(0)

    def step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        gradients = [p.grad.flatten() for p in self._trained if p.grad is not None]
        self.values = torch.cat([g[:: self._stride].float().cpu() for g in gradients])
        for parameter in self._trained:
            parameter.grad = None
        return {}


def make_plan(
    given: DictConfig,
    *,
    data: Mapping[str, Any] | None = None,
    rewards: Mapping[int, Reward] | None = None,
) -> Numbers:
    """Plan a config's run; ``data`` and ``rewards`` are those of :class:`Run`.

    Returns what :func:`lines` shows, and writes it to ``output_dir/plan.json``. Shares are lists of
    a mean and its 95 % interval over prompts, seconds under ``time``, and bytes under ``memory``.
    """
    start = time.perf_counter()
    folder = Path(given.output_dir).expanduser()
    cfg = given.copy()
    OmegaConf.set_readonly(cfg, False)
    logger = "torchtune.training.metric_logging.DiskLogger"
    cfg.update(
        output_dir=str(folder / ".plan"),
        metric_logger={"_component_": logger, "log_dir": "${output_dir}"},
        lr_scheduler=None,  # its first steps may be smaller than those to come
        resume_from_checkpoint=False,
        profiler=None,
    )
    recipe = GRPOFullFinetuneRecipe(cfg, Run(cfg, data=data, rewards=rewards))
    try:
        with only_warnings():
            recipe.setup(cfg)
        numbers = _measure(recipe)
    finally:
        recipe.run.close()
        lock.release(folder / ".plan")
        shutil.rmtree(folder / ".plan", ignore_errors=True)
    numbers = {**vars(judge(numbers, recipe.cfg)), **numbers}
    numbers["seconds"] = time.perf_counter() - start
    text = json.dumps(plain(numbers), indent=1)
    (folder / "plan.json").write_text(text, encoding="utf-8")
    return numbers


# --- Measuring ------------------------------------------------------------------------------------


def _measure(recipe: GRPOFullFinetuneRecipe) -> Numbers:
    run, cfg = recipe.run, recipe.cfg
    groups = Groups(cfg.grpo_samples, run.decider)
    vars(run.recorder)["groups"] = groups
    times: list[dict[str, float]] = []
    start = time.perf_counter()
    while not times or (len(times) < _ROUNDS and time.perf_counter() - start < _SECONDS):
        run.step = len(times)
        seed_step(cfg.seed, run.step)
        step = StepMetrics()
        before = run.sampler.state_dict()
        with step.timer("step_time"):
            rows = recipe.rollout(step)
        times.append(step.compute())
        trajectory, scores = groups.seen[-1]
        indices = trajectory.prompt_indices[:: cfg.grpo_samples].tolist()
        run.sampler.learn(indices, groups.outcomes(scores).mean(axis=1).tolist())
    rates = groups.outcomes(groups.scores).mean(axis=1).clip(0, 1)
    numbers = {
        "decider": run.decider,
        "prompts": len(rates),
        "samples": str(cfg.grpo_samples),
        "longest": cfg.max_generated_tokens,
        **_of_groups(groups, rates, cfg),
        **_of_rewards(groups),
        **_of_lengths(recipe, groups),
        **_of_update(recipe, rows, times),
    }
    run.sampler.load_state_dict(before)
    recipe.rollout(StepMetrics())  # on the same prompts
    for when, index in (("then", -2), ("after", -1)):
        trajectory, scores = groups.seen[index]
        numbers[f"pass_rate_{when}"] = float(groups.outcomes(scores).mean())
        numbers[f"cut_off_{when}"] = float(trajectory.truncated.double().mean())
    numbers |= share_ranges(numbers, rates, size=cfg.grpo_samples, samples=len(rows.prompts))
    return numbers | {"memory": _memory(run)}


def share_ranges(numbers: Numbers, rates: Array, *, size: int, samples: int) -> Numbers:
    """Forecast ranges for the means of two shares over the first steps.

    One end is no learning. At the other, every step moves the logits of pass rates, and of being
    cut off, as far as the plan's step did, or (pass rates) a standard error further, or (being cut
    off) in the other direction.
    """

    def logit(rate: Any, count: int) -> Any:
        return np.log((rate * count + 0.5) / ((1 - rate) * count + 0.5))

    def shift(name: str) -> float:
        then, after = (logit(numbers[f"{name}_{when}"], samples) for when in ("then", "after"))
        return float(after - then)

    def right(moved: float) -> Array:  # pass rate of each prompt
        return 1 / (1 + np.exp(-logit(rates, size) - moved))

    def teaching(moved: float) -> float:
        return float(1 - (right(moved) ** size + (1 - right(moved)) ** size).mean())

    def cut_off(moved: float) -> float:
        return float(1 / (1 + np.exp(-logit(numbers["cut_off"][0], rates.size * size) - moved)))

    def ends(now: Sequence[float], share: Callable[[float], float], shifts: Any) -> list[float]:
        paths = [
            sum(share(step * part * shift) for step in range(_SOON)) / _SOON / share(0)
            for part in (0, 0.25, 0.5, 1)
            for shift in shifts
        ]
        return [now[1] * min(paths), min(1.0, now[2] * max(paths) + 0.5 / rates.size)]

    known = [numbers[f"pass_rate_{when}"] * samples + 0.5 for when in ("then", "after")]
    error = sqrt(sum(1 / count + 1 / (samples + 1 - count) for count in known))
    # The logit of a mean rate moves less than the logits of the rates.
    each = np.linspace(-12, 12, 241)
    of_mean = logit(np.array([right(moved).mean() for moved in each]), samples)
    wanted = logit(right(0).mean(), samples) + shift("pass_rate") + np.array([0, error])
    return {
        "informative_soon": ends(
            numbers["informative"][str(size)], teaching, np.interp(wanted, of_mean, each)
        ),
        # Lengths may go the other way: a model learns to stop, and then to go on.
        "cut_off_soon": ends(numbers["cut_off"], cut_off, [shift("cut_off"), -shift("cut_off")]),
    }


def _of_groups(groups: Groups, right: Array, cfg: GRPOConfig) -> Numbers:
    """Return how often answers are right, and how often groups of some sizes teach something."""
    total = groups.of(groups.scores.total)
    teaching = {size: teaching_shares(total, size) for size in _GROUP_SIZES}
    known = [t.advantages for t, _ in groups.seen if t.advantages is not None]
    teaching[cfg.grpo_samples] = (groups.of(torch.cat(known)) != 0).any(axis=1).astype(float)
    shares = {size: values for size, values in sorted(teaching.items()) if values is not None}
    histogram = np.histogram(right, bins=[0, 1e-6, 0.25, 0.5, 0.75, 1 - 1e-6, 1])[0]
    return {
        "pass_rate": _share(right),
        "pass_rate_histogram": histogram.tolist(),  # 0, to 1/4, to 1/2, to 3/4, below 1, 1
        "informative": {str(size): _share(values) for size, values in shares.items()},
    }


def teaching_shares(values: Array, size: int) -> Array | None:
    """Return how likely ``size`` samples of each prompt are to have rewards that differ: [B].

    ``values`` [B, G] are rewards of G samples. Up to G the result is exact, over all subsets. For
    larger groups it is None if rewards take more than two values; otherwise a Beta prior is fitted
    to all prompts' pass rates, and updated with each prompt's samples.
    """
    rounded, drawn = np.round(values, 6), values.shape[1]
    if size <= drawn:
        same = [sum(comb(n, size) for n in Counter(row).values()) for row in rounded.tolist()]
        return 1 - np.array(same) / comb(drawn, size)
    levels = np.unique(rounded)
    if len(levels) > 2:
        return None
    hits = (rounded == levels[-1]).sum(axis=1)
    mean = (hits.sum() + 0.5) / (rounded.size + 1)
    excess = (hits / drawn).var() * drawn / (mean * (1 - mean)) - 1
    alike = float(np.clip(excess / (drawn - 1), 0.01, 0.99))  # correlation within a prompt
    a, b = mean * (1 / alike - 1), (1 - mean) * (1 / alike - 1)

    def all_hit(a: float, b: float) -> float:  # E[p^size], p ~ Beta(a, b)
        return exp(lgamma(a + size) - lgamma(a) + lgamma(a + b) - lgamma(a + b + size))

    posterior = [(a + k, b + drawn - k) for k in hits.tolist()]
    return np.array([1 - all_hit(a, b) - all_hit(b, a) for a, b in posterior])


def _share(values: Array) -> list[float]:
    return [float(values.mean()), *bootstrap_interval(values)]


def _of_rewards(groups: Groups) -> Numbers:
    """Return each reward's part of the spread within groups, and whether it says anything."""
    scores = groups.scores

    def centred(values: Tensor) -> Array:
        of_groups = groups.of(values.nan_to_num(0.0))
        return (of_groups - of_groups.mean(axis=1, keepdims=True)).flatten()

    weighted = scores.scores * scores.weights  # [N, R]
    parts = np.stack([centred(column) for column in weighted.unbind(1)])
    spread = parts.sum(axis=0)
    shares = parts @ spread / max(float(spread @ spread), 1e-12)
    rewards = {}
    for index, name in enumerate(scores.names):
        column, failed = scores.scores[:, index], scores.failed[:, index].double().mean()
        known = column[~column.isnan()]
        rewards[name] = {
            "mean": float(known.mean()) if len(known) else None,
            "share_of_spread": float(shares[index]),
            "failed": float(failed),
            "none": float(column.isnan().double().mean() - failed),
            "constant": bool((known == known[:1]).all()),
        }
    return {"rewards": rewards}


def _of_lengths(recipe: GRPOFullFinetuneRecipe, groups: Groups) -> Numbers:
    """Return the shares of responses that are cut off, now and at half and twice the tokens."""
    run, cfg = recipe.run, recipe.cfg
    trajectory = Trajectory.join([trajectory for trajectory, _ in groups.seen])
    half = trajectory.response_lengths > cfg.max_generated_tokens // 2
    ends = [prompt.strip()[-40:] for prompt in trajectory.prompts]
    repeats = [end and end in text for end, text in zip(ends, trajectory.completions, strict=True)]
    found: Numbers = {
        "cut_off": _share(groups.of(trajectory.truncated).mean(axis=1)),
        "cut_off_at_half": float(half.double().mean()),
        "prompt_repeated": float(np.mean([bool(each) for each in repeats])),
    }
    if found["cut_off"][0] > 0.05:
        longer = cfg.sampling_params.replace(max_generated_tokens=2 * cfg.max_generated_tokens)
        items = [run.dataset[i] for i in groups.seen[0][0].prompt_indices[:: cfg.grpo_samples]]
        size = cfg.grpo_samples
        rows = run.answer(recipe.engine, items, group_size=size, params=longer, seed=cfg.seed)
        found["cut_off_at_twice"] = float(rows.truncated.double().mean())
        found["pass_rate_at_twice"] = float(groups.outcomes(recipe.score(rows)).mean())
    return found


def _of_update(
    recipe: GRPOFullFinetuneRecipe, rows: Trajectory, times: Sequence[Mapping[str, float]]
) -> Numbers:
    """Return the gradient's signal to noise, how far a step moves the policy, and seconds."""
    run, cfg = recipe.run, recipe.cfg
    found: Numbers = {"signal_to_noise": _signal_to_noise(recipe, rows), "moved": 0.0}
    step = StepMetrics()
    with step.timer("step_time"):
        batches = recipe.mini_batches(rows, step)
        for batch in batches * cfg.ppo_epochs:
            recipe.update(batch, step)
    batch = max(batches, key=lambda each: each.trajectory.num_rows)
    if batch.trajectory.num_rows:
        recipe.model.eval()
        with torch.no_grad():
            new = trajectory_logprobs(recipe.model, batch.parts, temperature=cfg.temperature)
        change = (new - batch.old_logprobs).double()[batch.trajectory.response_mask]
        # The KL in nats a token, capped by the mean |change|, as a few ratios may be huge.
        found["moved"] = float(min((change.exp() - 1 - change).mean(), change.abs().mean()))
    later = times[1:] or times  # the first one also warms up
    seconds = {
        name: float(np.mean([each[f"time/{name}"] for each in later]))
        for name in ("rollout", "reward")
    }
    seconds["update"] = step.compute()["step_time"]
    seconds["step"] = sum(seconds.values())
    answers = len(run.eval_dataset or ()) * (1 + cfg.evaluation.samples)
    share = answers / (cfg.batch_size * cfg.grpo_samples)
    seconds["evaluation"] = share * (seconds["rollout"] + seconds["reward"])
    evaluations = 1 + -(-cfg.num_steps // (cfg.evaluation.every_n_steps or cfg.num_steps))
    seconds["run"] = cfg.num_steps * seconds["step"] + evaluations * seconds["evaluation"]
    return found | {"time": seconds}


def _signal_to_noise(recipe: GRPOFullFinetuneRecipe, rows: Trajectory) -> float | None:
    """Return the gradient's |mean| / |standard error|, from two halves of the teaching groups."""
    size, optimizer = recipe.cfg.grpo_samples, recipe.optimizer
    assert rows.advantages is not None
    teaching = (rows.advantages.view(-1, size) != 0).any(dim=1).nonzero()[:, 0]
    if len(teaching) < 2:
        return None
    sample = GradientSample(recipe.model)
    vars(recipe)["optimizer"] = sample
    halves = []
    for half in (teaching[::2], teaching[1::2]):
        numbers = (half[:, None] * size + torch.arange(size, device=half.device)).flatten()
        step = StepMetrics()
        recipe.update(recipe.mini_batches(rows.select(numbers), step)[0], step)
        halves.append(sample.values)
    recipe.optimizer = optimizer
    noise = float((halves[0] - halves[1]).norm() / 2)
    return sqrt(max(0.0, float(halves[0] @ halves[1]))) / noise if noise else None


def _memory(run: Run) -> dict[str, int]:
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(run.device)
        return {"peak": peak, "total": torch.cuda.mem_get_info(run.device)[1]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak, "total": peak + free_bytes(run.device)}


# --- The verdict ----------------------------------------------------------------------------------


@dataclass
class Judgement:
    """A verdict, its reasons, and the overrides that would change it."""

    verdict: str = "learns"
    reasons: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def add(self, verdict: str, reason: str, *changes: str) -> None:
        self.verdict = max(self.verdict, verdict, key=VERDICTS.index)
        self.reasons.append(reason)
        self.changes += changes


def judge(numbers: Numbers, cfg: GRPOConfig) -> Judgement:
    """Say whether a run learns, from what a plan has measured."""
    found = Judgement()
    _judge_rewards(found, numbers, cfg)
    _judge_groups(found, numbers, cfg)
    rate, moved = cfg.optimizer.get("lr", 1e-3), numbers["moved"]  # torch.optim's default
    if moved > _FAR:
        found.add(
            "doubtful" if moved < _TOO_FAR else "will not learn",
            f"One step at optimizer.lr={rate:g} moves the policy by {moved:.2g} nats a token, "
            f"where {_FAR} is much.",
            f"optimizer.lr={rate / (3 if moved < _TOO_FAR else 30):.1g}",
        )
    elif moved and sqrt(moved) * cfg.num_steps < _NEAR:
        found.add(
            "will not learn",
            f"{cfg.num_steps} steps at optimizer.lr={rate:g} hardly move the policy: the first by "
            f"{moved:.1g} nats a token.",
            f"optimizer.lr={max(10 * rate, 1e-5):.1g}",
        )
    if numbers["memory"]["peak"] > 0.9 * numbers["memory"]["total"]:
        rows = cfg.forward_batch_size or cfg.batch_size * cfg.grpo_samples
        found.add("doubtful", "Memory is nearly full.", f"forward_batch_size={max(1, rows // 2)}")
    return found


def _judge_groups(found: Judgement, numbers: Numbers, cfg: GRPOConfig) -> None:
    right, cut = numbers["pass_rate"][0], numbers["cut_off"][0]
    teaching = numbers["informative"][str(cfg.grpo_samples)][0]
    # Where some are right, groups that seldom teach may still be enough.
    is_hopeless = teaching < _NEARLY_NONE and not 0.05 < right < 0.95
    verdict = "will not learn" if is_hopeless else "doubtful"
    if cut > 0.5 and (teaching < _FEW or right < 0.05):
        twice, then = numbers["cut_off_at_twice"], numbers["pass_rate_at_twice"]
        found.add(
            verdict,
            f"{cut:.0%} of the responses are cut off, and {right:.0%} are right; with twice the "
            f"tokens {twice:.0%} would be cut off, and {then:.0%} right.",
            f"max_generated_tokens={(2 if twice < 0.5 else 4) * cfg.max_generated_tokens}",
        )
        if cut == twice == 1:
            repeated = f"; {numbers['prompt_repeated']:.0%} repeat the end of the prompt"
            found.reasons.append(
                f"No response ends by itself{repeated}: see whether this model was trained to "
                "follow its chat template, and whether the template is its own."
            )
    elif teaching < _FEW:
        difficulty = "harder" if right > 0.5 else "easier"
        more = 4 * cfg.grpo_samples
        larger = numbers["informative"].get(str(more), [0.0])[0]
        found.add(
            verdict,
            f"{teaching:.0%} of the groups teach something, and {right:.0%} of the answers are "
            f"right: take {difficulty} prompts in dataset.",
            *([f"grpo_samples={more}"] if larger > 2 * _FEW else []),
        )


def _judge_rewards(found: Judgement, numbers: Numbers, cfg: GRPOConfig) -> None:
    for index, (name, reward) in enumerate(numbers["rewards"].items()):
        key, failed, share = f"rewards.{index}", reward["failed"], reward["share_of_spread"]
        decides = name == numbers["decider"]
        if failed > 0.01:
            ends = failed > cfg.max_reward_failure_share
            verdict = "will not learn" if ends else "doubtful"
            found.add(verdict, f"{key} ({name}) fails on {failed:.0%} of the responses.")
        elif reward["none"] == 1:
            verdict = "will not learn" if decides else "doubtful"
            found.add(verdict, f"{key} ({name}) returned None for all responses.")
        elif not decides and reward["constant"]:
            found.reasons.append(f"{key} ({name}) is {reward['mean']:g} for all responses.")
        elif not decides and share > 0.5:
            lower = cfg.rewards[index].get("weight", 1.0) / 10
            reason = f"{share:.0%} of the rewards' spread in groups is that of {key} ({name})."
            found.add("doubtful", reason, f"{key}.weight={lower:g}")


def lines(numbers: Numbers) -> Iterator[str]:
    """Yield the lines of a plan, which fit on one screen."""
    share = "{:.2f} [{:.2f}, {:.2f}]".format
    size, teaching, seconds = numbers["samples"], numbers["informative"], numbers["time"]
    memory, cut = numbers["memory"], numbers["cut_off"]
    yield (
        f"From {numbers['prompts']} prompts with {size} samples each, and one step of training, in "
        f"{numbers['seconds']:.0f} s. [95 % interval over prompts]"
    )
    yield f"right            {share(*numbers['pass_rate'])}"
    labels = ("none", "to 1/4", "to 1/2", "to 3/4", "more", "all")
    counts = zip(labels, numbers["pass_rate_histogram"], strict=True)
    yield f"  of a prompt's  {', '.join(f'{label}: {count}' for label, count in counts)}"
    soon = "in the first {} steps {:.2f} to {:.2f}".format
    first = soon(_SOON, *numbers["informative_soon"])
    yield f"groups teaching  {share(*teaching[size])} with {size} samples, {first}"
    others = [f"{n}: {values[0]:.2f}" for n, values in teaching.items() if n != size]
    yield f"  with others    {', '.join(others)}"
    twice = f", {numbers['cut_off_at_twice']:.2f} at twice" if "cut_off_at_twice" in numbers else ""
    half = f"{numbers['cut_off_at_half']:.2f} at half"
    yield f"cut off          {share(*cut)} at {numbers['longest']} tokens, {half}{twice}"
    yield f"  later          {soon(_SOON, *numbers['cut_off_soon'])}"
    for name, reward in numbers["rewards"].items():
        mean = "None" if reward["mean"] is None else f"{reward['mean']:.3f}"
        yield f"{name:<16} {mean}, {reward['share_of_spread']:.0%} of the spread in groups"
    before, after = numbers["pass_rate_then"], numbers["pass_rate_after"]
    yield (
        f"one step         {before:.2f} -> {after:.2f} right; moves the policy by "
        f"{numbers['moved']:.2g} nats a token"
    )
    if (ratio := numbers["signal_to_noise"]) is not None:
        yield f"  its gradient   signal to noise {ratio:.2f}"
    low, high = (seconds["run"] / 60 * f for f in (1 / _TIME_FACTOR, _TIME_FACTOR))
    yield (
        f"time             {seconds['step']:.3g} s a step (rollout {seconds['rollout']:.3g}, "
        f"rewards {seconds['reward']:.2g}, update {seconds['update']:.3g}), "
        f"{seconds['evaluation']:.3g} s an evaluation"
    )
    yield f"  of the run     {seconds['run'] / 60:.3g} min [{low:.2g}, {high:.2g}]"
    yield f"memory           {memory['peak'] / 1e9:.1f} of {memory['total'] / 1e9:.1f} GB"
    yield f"Verdict: {numbers['verdict']}."
    for reason in numbers["reasons"]:
        yield f"- {reason}"
    if numbers["changes"]:
        yield f"Try: {' '.join(numbers['changes'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo plan", description="Says what a run is going to be like."
    )
    parser.add_argument("--config", required=True, help="name of a shipped config, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    args = parser.parse_intermixed_args()
    with errors_in_one_line():
        numbers = make_plan(load_config(args.config, args.overrides))
        print("\n".join(lines(numbers)))
        if numbers["changes"]:
            words = ["--config", args.config, *args.overrides, *numbers["changes"]]
            print(f"That is: torchtune-grpo plan {shlex.join(words)}")
    sys.exit(VERDICTS.index(numbers["verdict"]))
