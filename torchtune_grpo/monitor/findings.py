"""What is wrong with a run, and what to change.

A rule reads a run's record so far and its config, and yields signs of findings. A finding begins
once several steps in a row show its signs, and ends after ``ENDS_AFTER`` steps without them. A
resumed run that reads its record again finds the same.

A false alarm is worse than silence: what also comes with success, such as a low entropy, is a sign
only below ``SOLVED``. Each threshold has its reason beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median, stdev
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from torchtune_grpo.config.keys import GRPOConfig

SOLVED = 0.8  # mean of the deciding reward; above it, there is little left to learn
ENDS_AFTER = 5  # one good step between bad ones ends nothing

# Finding -> how many steps in a row must show its signs, with how many groups on a rank.
BEGINS_AFTER = {
    # It looks at three steps itself, and comes first.
    "collapsed": (1, 0),
    # If a fifth of the groups taught something, 24 in a row would teach nothing once in 200 times.
    **dict.fromkeys(("all_right", "all_wrong", "same_texts"), (3, 24)),
    # If it applied to a twentieth of the prompts, 100 would all be without it once in 170 times.
    "reward_never_applies": (3, 100),
    # If a fifth of the groups earned it, 20 would all miss it once in 90 times.
    "reward_constant": (5, 20),
    # One step is an accident.
    **dict.fromkeys(("truncated", "nothing_trained", "responses_shrink"), (3, 0)),
    **dict.fromkeys(("entropy_collapsed", "entropy_exploding", "kl_runaway"), (3, 0)),
    **dict.fromkeys(("sampler_trainer_gap", "reward_fails"), (3, 0)),
    # The first steps also compile and fill caches.
    "rewards_slow": (5, 0),
    # These look at many steps themselves.
    **dict.fromkeys(("only_shaping_rises", "learning_stopped"), (3, 0)),
    **dict.fromkeys(("gradient_spikes", "steps_skipped", "reward_hacking"), (1, 0)),
}
# Finding -> findings that it causes, and that would give other advice.
_OF_A_POLICY = ("same_texts", "responses_shrink", "entropy_collapsed", "entropy_exploding")
SILENCES = {
    "collapsed": ("all_wrong", "truncated", "nothing_trained", "kl_runaway", *_OF_A_POLICY),
    "truncated": ("all_wrong", "reward_constant"),
}
_MOST_STEPS = 100  # how far back a rule or a finding looks

Advice = tuple[str, str]  # the config key to change, and a sentence with its new value
Signs = Iterator[tuple[str, str, Advice]]  # name of the finding, a sentence of evidence, advice


class Watch:
    """Reads a run's record event by event, and tracks which findings begin and end."""

    def __init__(self, cfg: GRPOConfig, rewards: Sequence[str], *, decider: str) -> None:
        self._run, self._batch_size = History(cfg, rewards, decider), cfg.batch_size
        # Finding -> each step that was looked at, and the signs there.
        self._seen: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        self._current: dict[str, dict[str, Any]] = {}

    @property
    def current(self) -> list[dict[str, Any]]:
        """Open findings: name, since, evidence, key, remedy."""
        return [*self._current.values()]

    def add(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read a step or an evaluation; return findings that begin or end (``event``) with it."""
        self._run.add(event)
        is_step = event["kind"] == "step"
        signs: dict[str, tuple[str, Advice]] = {}
        for rule in RULES if is_step else (evaluations,):
            for name, evidence, advice in rule(self._run):
                signs.setdefault(name, (evidence, advice))
        for name, caused in SILENCES.items():
            if name in signs or name in self._current:
                signs = {other: sign for other, sign in signs.items() if other not in caused}
        names = [name for name in BEGINS_AFTER if (name != "reward_hacking") == is_step]
        changes = []
        for name in names:
            self._seen[name] = [*self._seen[name], (event["step"], signs.get(name))][-_MOST_STEPS:]
            changes += self._changes(name, self._seen[name])
        return changes

    def _changes(self, name: str, seen: list[tuple[int, Any]]) -> list[dict[str, Any]]:
        steps, groups = BEGINS_AFTER[name]
        steps = max(steps, math.ceil(groups / self._batch_size))
        if name in self._current:
            if any(signs for _, signs in seen[-ENDS_AFTER:]):
                return []
            return [{"event": "ends", **self._current.pop(name)}]
        if len(seen) < steps or not all(signs for _, signs in seen[-steps:]):
            return []
        evidence, (key, remedy) = seen[-1][1]
        found = {"name": name, "since": seen[-steps][0], "evidence": evidence}
        self._current[name] = found | {"key": key, "remedy": remedy}
        return [{"event": "begins", **self._current[name]}]


class Evaluation(NamedTuple):
    """An evaluation, and the steps since the one before."""

    accuracy: float  # held out, greedy
    margin: float  # half of its 95 % interval
    reward: float  # mean over the steps
    error: float  # standard error of that mean
    spread: float  # mean of the steps' reward_std
    level: float  # mean of the deciding reward


class History:
    """A run as the rules see it. A metric that is missing, null or not finite is NaN."""

    def __init__(self, cfg: GRPOConfig, rewards: Sequence[str], decider: str) -> None:
        self.rewards: list[dict[str, Any]] = [
            {"weight": 1.0, **node, "name": name}
            for name, node in zip(rewards, cfg.rewards, strict=True)
        ]
        self._config = OmegaConf.create({**cfg.model_dump(), "rewards": self.rewards})
        self.decider = decider  # its mean is the accuracy
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[Evaluation] = []
        self._evaluated = 0  # steps before the last evaluation

    def add(self, event: Mapping[str, Any]) -> None:
        values = {name: _number(value) for name, value in event.items()}
        if event["kind"] == "step":
            rates = event.get("prompts", {}).get("pass_rate", [])
            error = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.nan
            self.steps.append(values | {"level_error": error})  # standard error of ``level``
        elif not self.evaluations or len(self.steps) - self._evaluated >= 3:
            # After fewer steps there is no spread to judge a rise by.
            names = ("reward", "reward_std", f"rewards/{self.decider}/mean")
            since = self.steps[self._evaluated :]
            reward, spread, level = (mean([s.get(n, math.nan) for s in since]) for n in names)
            names = ("eval/accuracy", "eval/accuracy/low", "eval/accuracy/high")
            accuracy, low, high = (values.get(name, math.nan) for name in names)
            measured = (accuracy, (high - low) / 2, *reward, spread[0], level[0])
            self.evaluations.append(Evaluation(*measured))
            self._evaluated = len(self.steps)

    def now(self, metric: str) -> float:
        return self.steps[-1].get(metric, math.nan)

    def last(self, metric: str, count: int) -> list[float]:
        """Return a metric of the ``count`` newest steps, without those that lack it."""
        values = [step.get(metric, math.nan) for step in self.steps[-count:]]
        return [value for value in values if not math.isnan(value)]

    def first(self, metric: str) -> float:
        """The mean of a metric in the first three steps that have it; one alone is noisy."""
        values = (step.get(metric, math.nan) for step in self.steps)
        return mean([*islice((value for value in values if not math.isnan(value)), 3)])[0]

    def is_constant(self, name: str, *, best: float) -> bool:
        """Whether a reward has been the same for all rows since step 1, and not the best one."""
        keys = [f"rewards/{name}/{what}" for what in ("mean", "std", "none")]
        looked_at = (*self.steps[:_MOST_STEPS], self.steps[-1])
        seen = {tuple(round(step.get(key, -1.0), 6) for key in keys) for step in looked_at}
        (level, spread, none), *others = seen
        return not others and (none == 1 or (spread == 0 and level != best))

    @property
    def level(self) -> float:
        """The deciding reward's mean in the newest step."""
        return self.now(f"rewards/{self.decider}/mean")

    def config(self, key: str) -> Any:
        """The value of a dotted key of the config; None if the config does not give it."""
        return OmegaConf.select(self._config, key)

    def change(self, key: str, new: Any) -> Advice:
        old = self.config(key)
        return key, f"Set {key}: {'' if old is None else f'{_text(old)} -> '}{_text(new)}."

    def scale(self, key: str, factor: float) -> Advice:
        old = self.config(key)
        if not isinstance(old, (int, float)):
            return key, f"Multiply {key} by {factor:g}."
        return self.change(key, type(old)(old * factor))


def collapse(run: History) -> Signs:
    """The deciding reward was good and is now bad, most often after a step that was too large."""
    metric, window = f"rewards/{run.decider}/mean", 3
    levels = [step.get(metric, math.nan) for step in run.steps[-_MOST_STEPS:]]
    paid = [step.get("reward", math.nan) for step in run.steps[-_MOST_STEPS:]]
    if len(levels) <= window or any(map(math.isnan, (*levels, *paid))):
        return
    # The first step alone, too: a policy may be dead after it.
    starts = range(len(levels) - 2 * window + 1)
    windows = {i + window - 1: mean(levels[i : i + window])[0] for i in starts}
    means = {0: levels[0]} | windows
    best = max(means, key=means.__getitem__)
    now, first = mean(levels[-window:])[0], run.steps[-len(levels) :][best]
    error = first["level_error"] / math.sqrt(window if best else 1)
    # Four standard errors, as the best is one of many; a third of it, which no healthy run loses.
    # Where the sum has risen, shaping was learned; a curriculum's harder prompts are no fall.
    noise = 4 * math.hypot(error, run.now("level_error") / math.sqrt(window))
    fall = means[best] - now
    is_paid = mean(paid[-window:])[0] >= paid[best]
    is_harder = run.now("sampler/level") > first.get("sampler/level", math.nan)
    if fall > max(noise, means[best] / 3, 0.1) and not (is_paid or is_harder):
        since = int(first["step"])
        evidence = f"{run.decider} fell from {means[best]:.2f} at step {since} to {now:.2f}."
        yield "collapsed", evidence, run.scale("optimizer.lr", 0.3)


def groups(run: History) -> Signs:
    score = f"{run.decider} is {run.level:.2f} in the mean"
    if run.now("frac_informative_groups") == 0:
        evidence = f"No group teaches anything; {score}."
        if run.level >= 0.5:
            remedy = "Take harder prompts in dataset, or end the run."
            yield "all_right", evidence, ("dataset", remedy)
        if run.level < 0.5:
            _, more = run.scale("grpo_samples", 2)
            remedy = f"Take easier prompts in dataset. If some are solved at times: {more}"
            yield "all_wrong", evidence, ("dataset", remedy)
    same = run.now("frac_groups_same_text")
    if same >= 0.9 and run.level < SOLVED:  # the rest could hardly teach more
        evidence = f"In {same:.0%} of the groups all texts are the same; {score}."
        warmer = max(1.0, 1.5 * run.config("temperature"))
        yield "same_texts", evidence, run.change("temperature", warmer)


def responses(run: History) -> Signs:
    cut, longest = run.now("completions/clipped_ratio"), run.now("completions/max_length")
    # Nearly all are cut, unless more are right than ended; or half are, and hardly any is right.
    if (cut >= 0.9 and run.level < 1.2 - cut) or (cut >= 0.5 and run.level < 0.05):
        is_late = longest < run.config("max_generated_tokens")
        key = "rollout.deadline" if is_late else "max_generated_tokens"
        yield "truncated", f"{key} cut off {cut:.0%} of the responses.", run.scale(key, 2)
    length, first = run.now("completions/mean_length"), run.first("completions/mean_length")
    # A mean over all tokens that are trained on is missing where there are none.
    if not math.isnan(length) and math.isnan(run.now("sampling/kept_mass")):
        key = "objective.mask_truncated_completions"
        longer = run.scale("max_generated_tokens", 2)
        advice = run.change(key, False) if run.config(key) else longer
        yield "nothing_trained", "No token was trained on.", advice
    # Shrunk to a tenth; shorter responses that are right more often are welcome.
    if length < first / 10 and run.level <= run.first(f"rewards/{run.decider}/mean"):
        evidence = f"The mean response shrank from {first:.3g} to {length:.3g} tokens."
        least = run.change("sampling.min_new_tokens", math.ceil(first / 10))
        yield "responses_shrink", evidence, least


def policy(run: History) -> Signs:
    entropy, first = run.now("sampling/entropy"), run.first("sampling/entropy")
    evidence = f"The entropy of a token went from {first:.3g} to {entropy:.3g} nats."
    # Models begin with 0.1 to 1; at 0.05 the likeliest token is taken 99 times in 100.
    if entropy < min(0.05, 0.1 * first) and run.level < SOLVED:
        more = 2 * (run.config("loss.entropy_coeff") or 0.0005)
        yield "entropy_collapsed", evidence, run.change("loss.entropy_coeff", more)
    if entropy > max(2 * first, first + 1):  # one nat: as if from e times as many tokens
        yield "entropy_exploding", evidence, run.scale("optimizer.lr", 0.5)
    kl = run.now("kl")
    if kl > 1:  # each token is e times as likely as before; below 0.1 is usual
        evidence = f"The KL to the reference is {kl:.3g} nats a token."
        yield "kl_runaway", evidence, run.scale("loss.kl_coeff", 2)
    gap = run.now("sampling/sampling_logp_difference/mean")
    if gap > 0.1:  # rounding in bf16 makes 0.01 to 0.03
        advice = run.change("dtype", "fp32")
        if run.config("objective.sampling_correction") is None:
            advice = run.change("objective.sampling_correction", "token_truncate")
        if run.config("model.lora_dropout"):  # acts in the trainer alone
            advice = run.change("model.lora_dropout", 0.0)
        yield "sampler_trainer_gap", f"The two log-probs of a token differ by {gap:.3g}.", advice


def rewards(run: History) -> Signs:
    deciding, noise = rise(run.last(f"rewards/{run.decider}/mean", 20))
    decider_rises = not deciding <= noise or run.level >= SOLVED
    for index, reward in enumerate(run.rewards):
        name, weight, key = reward["name"], reward["weight"], f"rewards.{index}"
        failed, none = (run.now(f"rewards/{name}/{what}") for what in ("errors", "none"))
        if failed >= 0.01:  # in several steps: a bug, or one that responses provoke
            remedy = "Correct what its error in the log says, or return None there."
            yield "reward_fails", f"{name} failed on {failed:.0%} of the rows.", (key, remedy)
        # Nothing is wrong with a format that is always kept, or a penalty that is never incurred.
        best = 0 if weight < 0 or "penalty" in name else 1
        if weight and name != run.decider and run.is_constant(name, best=best):
            said = "returned None" if none == 1 else f"was {run.now(f'rewards/{name}/mean'):.3g}"
            remedy = "Correct what it looks for, or leave it out, unless it cannot be better."
            yield "reward_constant", f"Since step 1 {name} always {said}.", (key, remedy)
        elif none == 1:
            remedy = "Correct the column or the condition that it looks for, or leave it out."
            yield "reward_never_applies", f"{name} returned None for all rows.", (key, remedy)
        values = run.last(f"rewards/{name}/mean", 20)
        change, error = rise(values)
        spread = mean(run.last(f"rewards/{name}/std", 20))[0]
        # As for reward_hacking, but without evaluations: half a spread, beyond all noise.
        is_paid = math.copysign(change, change * weight) > max(3 * error, spread / 2)
        if len(values) == 20 and is_paid and weight and not decider_rises:
            evidence = f"In 20 steps {name} changed by {change:+.3g}; {run.decider} did not rise."
            yield "only_shaping_rises", evidence, run.scale(f"{key}.weight", 0.5)


def optimizer(run: History) -> Signs:
    norms = run.last("grad_norm", 40)
    before = [norm for norm in norms[:-10] if norm > 0]
    usual = median(before) if len(before) >= 10 else math.inf
    spikes = [norm for norm in norms[-10:] if norm > 10 * usual]  # other prompts make it 3 times
    if len(spikes) >= 3:
        evidence = f"{len(spikes)} gradient norms of 10 are beyond 10 times the usual {usual:.3g}."
        is_clipped = run.config("clip_grad_norm") is not None
        clip = run.change("clip_grad_norm", 2 * usual)
        yield "gradient_spikes", evidence, run.scale("optimizer.lr", 0.5) if is_clipped else clip
    counts = [0.0, *run.last("nonfinite_steps", _MOST_STEPS)][-21:]
    if counts[-1] - counts[0] >= 2:  # one is an accident; three in a row end the run
        evidence = f"{counts[-1] - counts[0]:.0f} of 20 steps were not finite and skipped."
        yield "steps_skipped", evidence, run.scale("optimizer.lr", 0.5)


def progress(run: History) -> Signs:
    paid = run.last("reward", _MOST_STEPS)  # fewer do not tell a slow rise from none
    level = mean(run.last(f"rewards/{run.decider}/mean", _MOST_STEPS))[0]
    change, error = rise(paid)
    # No rise, and one of a tenth of the spread would have been seen.
    spread = mean(run.last("reward_std", _MOST_STEPS))[0]
    is_flat = change <= 0 and change + 2 * error < 0.1 * spread
    # The end of a schedule is meant to be flat.
    rate, peak = run.now("learning_rate"), run.config("optimizer.lr")
    is_over = isinstance(peak, float) and rate < 0.1 * peak
    held_out = [evaluation.accuracy for evaluation in run.evaluations[-4:]]
    has_risen = held_out[-1:] > held_out[:1]
    if len(paid) == _MOST_STEPS and level < SOLVED and is_flat and not (is_over or has_risen):
        evidence = f"The reward has stayed at {mean(paid)[0]:.3g} for 100 steps."
        yield "learning_stopped", evidence, run.scale("optimizer.lr", 2)


def seconds(run: History) -> Signs:
    share = run.now("time/reward") / (run.now("step_time") or math.nan)
    if share > 0.5:  # an accelerator that waits for rewards most of the time
        each = [run.now(f"time/rewards/{reward['name']}") for reward in run.rewards]
        slowest = max(range(len(each)), key=each.__getitem__)
        evidence = f"{run.rewards[slowest]['name']}: rewards take {share:.0%} of a step."
        advice = run.change(f"rewards.{slowest}.isolation", "process")
        if "workers" in run.rewards[slowest]:
            advice = run.scale(f"rewards.{slowest}.workers", 2)
        yield "rewards_slow", evidence, advice


def evaluations(run: History) -> Signs:
    """The training reward rises and held-out accuracy does not, over the last four evaluations."""
    if len(run.evaluations) < 4:
        return
    before, first, third, last = run.evaluations[-4:]
    change = last.reward - first.reward
    most = last.accuracy - before.accuracy + math.hypot(before.margin, last.margin)
    # Two evaluations are no better, and a gain above 0.1 can be excluded.
    is_flat = 0 < before.accuracy >= max(third.accuracy, last.accuracy) and most <= 0.1
    # Samples may only catch up with what the policy's likeliest answer can do already.
    weights = {reward["name"]: reward["weight"] for reward in run.rewards}
    catches_up = weights.get(run.decider, 0) * (last.level - first.level) > change / 2
    catches_up &= last.level <= last.accuracy + last.margin
    # Half a spread (for a reward of 0 or 1, up to 0.25), beyond all noise of the steps.
    is_paid = change > max(3 * math.hypot(first.error, last.error), first.spread / 2)
    if is_flat and is_paid and not catches_up:
        evidence = (
            f"In 3 evaluations the reward rose from {first.reward:.3g} to {last.reward:.3g}, and "
            f"held-out {run.decider} went from {before.accuracy:.3g} to {last.accuracy:.3g}."
        )
        others = {
            f"rewards.{index}.weight": abs(reward["weight"])
            for index, reward in enumerate(run.rewards)
            if reward["name"] != run.decider and reward["weight"]
        }
        less_like_it = run.change("loss.kl_coeff", 2 * (run.config("loss.kl_coeff") or 0.02))
        largest = max(others, key=others.__getitem__, default=None)
        yield "reward_hacking", evidence, run.scale(largest, 0.5) if largest else less_like_it


RULES = (collapse, groups, responses, policy, rewards, optimizer, progress, seconds)


def _number(value: Any) -> float:
    # The squares of values that are kept are finite.
    is_kept = isinstance(value, (int, float)) and abs(value) < 1e100
    return float(value) if is_kept else math.nan


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the values' mean and its standard error; NaN if there are too few.

    The error is of the noise from one value to the next, whatever the trend (von Neumann).
    """
    count = len(values)
    squares = sum((b - a) * (b - a) for a, b in pairwise(values))
    error = math.sqrt(squares / (count - 1) / 2 / count) if count > 1 else math.nan
    return sum(values) / count if count else math.nan, error


def rise(values: Sequence[float]) -> tuple[float, float]:
    """Return the rise from the first half's mean to the second half's, and its standard error."""
    half = len(values) // 2
    (before, error), (after, other) = mean(values[:half]), mean(values[half:])
    return after - before, math.hypot(error, other)
