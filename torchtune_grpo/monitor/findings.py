"""Findings: what is wrong with a run, and what to change.

A rule reads a run's record so far and its config, and yields signs of findings. A finding begins
once several steps in a row show its signs, and ends after ``ENDS_AFTER`` steps without them. A
resumed run that reads its record again finds the same. A plan applies some rules to what it has
sampled.

A false alarm is worse than silence: what also comes with success, such as a low entropy, is a sign
only below ``SOLVED``. Each threshold has its reason beside it, or in evaluation/thresholds.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from statistics import stdev
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.evaluation import thresholds
from torchtune_grpo.evaluation.statistics import Comparison, kind_of
from torchtune_grpo.monitor.record import Finding, FindingEvent, Measured, metric

ENDS_AFTER = 5  # one good step between bad ones ends nothing

# Finding -> how many steps in a row must show its signs, with how many groups on a rank.
BEGINS_AFTER = {
    # These look at many steps themselves.
    # An evaluation may show the first of these, too.
    **dict.fromkeys(("collapsed", "steps_skipped", "reward_hacking"), (1, 0)),
    # If a fifth of the groups taught something, 24 in a row would teach nothing once in 200 times.
    **dict.fromkeys(("all_right", "all_wrong", "same_texts", "no_answer", "never_right"), (3, 24)),
    # If a fifth of the groups earned it, 20 would all miss it once in 90 times.
    **dict.fromkeys(("reward_constant", "tools_unused", "calls_fail"), (5, 20)),
    # One step is an accident.
    **dict.fromkeys(("truncated", "nothing_trained", "responses_shrink"), (3, 0)),
    **dict.fromkeys(("entropy_collapsed", "entropy_exploding", "kl_runaway"), (3, 0)),
    **dict.fromkeys(("sampler_trainer_gap", "reward_fails", "learning_rate_zero"), (3, 0)),
    **dict.fromkeys(("environment_fails", "prompts_differ"), (3, 0)),
}
# Finding -> findings that it causes, and that would give other advice.
_OF_A_POLICY = ("same_texts", "responses_shrink", "entropy_collapsed", "entropy_exploding")
SILENCES = {
    "collapsed": ("all_wrong", "truncated", "nothing_trained", "kl_runaway", *_OF_A_POLICY),
    "truncated": ("all_wrong", "no_answer", "reward_constant"),
    **dict.fromkeys(("no_answer", "never_right"), ("all_wrong",)),
    "same_texts": ("all_right", "all_wrong", "never_right"),
}
_MOST_STEPS = 100  # how far back a rule or a finding looks


class Sign(NamedTuple):
    """A sign that a rule has seen of a finding, and advice: a key to change."""

    name: str  # of the finding
    evidence: str  # a sentence
    key: str  # of the config
    remedy: str  # a sentence, with the new value if it is known
    override: str | None = None  # the same for the command line


Ranges = Mapping[str, tuple[float, float] | None]  # by reward, as far as one is declared
Advice = tuple[str, str, str | None]  # the last three of a sign
Signs = Iterator[Sign]


def by_name(signs: Iterable[Sign], *, known: Container[str] = ()) -> dict[str, Sign]:
    """Return each finding's first sign, except those that others or ``known`` findings explain."""
    found: dict[str, Sign] = {}
    for sign in signs:
        found.setdefault(sign.name, sign)
    explained = {o for name in SILENCES if name in found or name in known for o in SILENCES[name]}
    return {name: sign for name, sign in found.items() if name not in explained}


class Watch:
    """Reads a run's record event by event, and tracks which findings begin and end."""

    def __init__(self, cfg: GRPOConfig, rewards: Ranges, *, decider: str) -> None:
        self._run, self._batch_size = History(cfg, rewards, decider), cfg.batch_size
        # Finding -> the steps in a row that show its signs; once it is open, those without any
        self._row: dict[str, list[int]] = defaultdict(list)
        self.current: dict[str, Finding] = {}  # by name, what is open

    def add(self, event: Measured) -> list[FindingEvent]:
        """Read a step or an evaluation; return findings that begin or end with it."""
        self._run.add(event)
        is_step, step = event["kind"] == "step", event["step"]
        rules = RULES if is_step else (evaluations, fall)
        signs = by_name(chain.from_iterable(r(self._run) for r in rules), known=self.current)
        changes: list[FindingEvent] = []
        for name, (steps, groups) in BEGINS_AFTER.items():
            if (name == "reward_hacking") == is_step and name not in signs:
                continue
            sign, is_open = signs.get(name), name in self.current
            row = self._row[name] = [*self._row[name], step] if is_open != bool(sign) else []
            if is_open and len(row) == ENDS_AFTER:
                found = self.current.pop(name)
            elif sign and len(row) == max(steps, math.ceil(groups / self._batch_size)):
                _, evidence, key, remedy, _ = sign
                found = Finding(name=name, since=row[0], evidence=evidence, key=key, remedy=remedy)
                self.current[name] = found
            else:
                continue
            self._row[name] = []
            happened: Any = "ends" if is_open else "begins"
            changes.append({"kind": "finding", "step": step, "event": happened, **found})
        return changes


class Period(NamedTuple):
    """An evaluation, and the steps since the one before."""

    accuracy: float  # held out, greedy
    margin: float  # half of its 95 % interval
    reward: float  # mean over the steps
    error: float  # standard error of that mean
    spread: float  # mean of the steps' reward_std
    level: float  # mean of the deciding reward


class History:
    """A run as the rules see it, without numbers that are not finite; what is missing is NaN."""

    def __init__(self, cfg: GRPOConfig, rewards: Ranges, decider: str) -> None:
        nodes = [{**node, "weight": float(node.get("weight", 1.0))} for node in cfg.rewards]
        self._config = OmegaConf.create({**cfg.model_dump(), "rewards": nodes})
        # Each reward's key; an environment's own has that of the environment. Of several parts
        # with one name, the first counts.
        named = [node.get("name", index) for index, node in enumerate(nodes)]
        first = [index for index, name in enumerate(named) if name not in named[:index]]
        own = len(rewards) - len(first)  # of environments, without a node
        self.keys = [*(f"rewards.{index}" for index in first), *["environment"] * own]
        chosen: list[dict[str, Any]] = [nodes[index] for index in first] + [{"weight": 1.0}] * own
        self.rewards = [{**node, "name": name} for name, node in zip(rewards, chosen, strict=True)]
        self.decider = decider  # its mean is the accuracy
        self._ranges = rewards
        names = [reward["name"] for reward in self.rewards]
        self.key_of_decider = self.keys[names.index(decider)]
        self.wrong: str | None = None  # an answer of the newest step, if none is right
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[Period] = []
        self.fall: str | None = None  # evidence that the newest evaluation is far below the best
        self._measured: list[Measured] = []  # all evaluations
        self._evaluated = 0  # steps before the last evaluation

    def add(self, event: Measured) -> None:
        numbers = {n: v for n, v in event.items() if isinstance(v, (int, float))}
        # The squares of values that are kept are finite.
        values = {name: float(value) for name, value in numbers.items() if abs(value) < 1e100}
        if event["kind"] == "step":
            rates = [r for r in event.get("prompts", {}).get("pass_rate", []) if r is not None]
            error = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.nan
            self.steps.append(values | {"level_error": error})  # standard error of ``level``
            self.wrong = event.get("wrong")
            return
        self._measured.append(event)
        self.fall = _fall(self._measured)
        if not self.evaluations or len(self.steps) - self._evaluated >= 3:
            # After fewer steps there is no spread to judge a rise by.
            names = ("reward", "reward_std", f"rewards/{self.decider}/mean")
            since = self.steps[self._evaluated :]
            reward, spread, level = (mean([s.get(n, math.nan) for s in since]) for n in names)
            ends = ("", "/low", "/high")
            accuracy, low, high = (values.get(f"eval/accuracy{end}", math.nan) for end in ends)
            period = Period(accuracy, (high - low) / 2, *reward, spread[0], level[0])
            self.evaluations.append(period)
            self._evaluated = len(self.steps)

    def now(self, metric: str) -> float:
        return self.steps[-1].get(metric, math.nan)

    def last(self, metric: str, count: int) -> list[float]:
        """Return a metric of the ``count`` newest steps, without those that lack it."""
        return [step[metric] for step in self.steps[-count:] if metric in step]

    def first(self, metric: str) -> float:
        """The mean of a metric in the first three steps that have it; one alone is noisy."""
        return mean([*islice((step[metric] for step in self.steps if metric in step), 3)])[0]

    def is_constant(self, name: str) -> bool:
        """Whether a reward has been the same, or None, for all rows since step 1."""
        keys = [f"rewards/{name}/{what}" for what in ("mean", "std")]
        looked_at = (*self.steps[:_MOST_STEPS], self.steps[-1])
        if all(step.get(f"rewards/{name}/none") == 1 for step in looked_at):
            return True
        seen = {tuple(round(step.get(key, -1.0), 6) for key in keys) for step in looked_at}
        (_, spread), *others = seen
        return not others and spread == 0

    def blameless(self, index: int) -> set[float]:
        """The means of a reward that says nothing is wrong: a format always kept, no penalty."""
        lowest, highest = self._ranges[self.rewards[index]["name"]] or (0.0, 1.0)
        best = lowest if self.rewards[index]["weight"] < 0 else highest
        # An environment has to return a number for each turn, also if it rewards none.
        return {best, 0.0} if self.keys[index] == "environment" else {best}

    @property
    def decides_nothing(self) -> bool:
        """Whether the deciding reward has called all answers neither right nor wrong so far."""
        return self.level not in (0, 1) and self.is_constant(self.decider)

    @property
    def level(self) -> float:
        """The deciding reward's mean in the newest step."""
        return self.now(f"rewards/{self.decider}/mean")

    def config(self, key: str) -> Any:
        """The value of a dotted key of the config; None if the config does not give it."""
        return OmegaConf.select(self._config, key)

    def change(self, key: str, new: object) -> Advice:
        old = self.config(key)
        remedy = f"Set {key}: {'' if old is None else f'{_text(old)} -> '}{_text(new)}."
        return key, remedy, f"{key}={_text(new)}"

    def scale(self, key: str, factor: float) -> Advice:
        old = self.config(key)
        if not isinstance(old, (int, float)):
            return key, f"Multiply {key} by {factor:g}.", None
        return self.change(key, old * factor)

    def weigh(self, index: int, factor: float) -> Advice:
        """Give a reward another weight; an environment's own has none in the config."""
        key, reward = self.keys[index], self.rewards[index]
        if key == "environment":
            return key, f"Multiply what {reward['name']} pays by {factor:g}.", None
        return self.scale(f"{key}.weight", factor)


def _fall(measured: Sequence[Measured]) -> str | None:
    """Say from what held-out answers have fallen to what, if that is certain and far."""
    now = measured[-1]
    for name in ("accuracy", "pass@1"):
        known = [event for event in measured[:-1] if metric(event, f"eval/{name}") is not None]
        best = max(known, key=lambda event: metric(event, f"eval/{name}") or 0.0, default=now)
        test = Comparison(best, now).changes.get(name)
        was = metric(best, f"eval/{name}") or 0.0
        # As the best is one of many; and as much as of the steps' means, see ``collapse``.
        if test and test.p < thresholds.SURE / len(known) and -test.difference > max(was / 3, 0.1):
            what, end = f"{kind_of(now).capitalize()} {name}", f"{was + test.difference:.2f}"
            return f"{what} fell from {was:.2f} after step {best['step']} to {end}."
    return None


def fall(run: History) -> Signs:
    """Held-out answers were good and are now bad, which noisy rewards of steps may not show."""
    if run.fall is not None:
        yield Sign("collapsed", run.fall, *run.scale("optimizer.lr", 0.3))


def collapse(run: History) -> Signs:
    """The deciding reward was good and is now bad, most often after a step that was too large."""
    steps, window = run.steps[-_MOST_STEPS:], 3
    levels, paid = (run.last(n, _MOST_STEPS) for n in (f"rewards/{run.decider}/mean", "reward"))
    if len(steps) <= window or not len(levels) == len(paid) == len(steps):
        return
    # Means of three steps by the last one; the first step alone, too: a policy may be dead after it
    ends = range(window - 1, len(steps) - window)
    means = {0: levels[0]} | {end: mean(levels[end - window + 1 : end + 1])[0] for end in ends}
    best = max(means, key=means.__getitem__)
    now, first = mean(levels[-window:])[0], steps[best]
    error = first["level_error"] / math.sqrt(window if best else 1)
    # Four standard errors, as the best is one of many; a third of it, which no healthy run loses.
    # Where the sum has risen, shaping was learned.
    noise = 4 * math.hypot(error, run.now("level_error") / math.sqrt(window))
    is_paid = mean(paid[-window:])[0] >= paid[best]
    fell = means[best] - now > max(noise, means[best] / 3, 0.1)
    if fell and not is_paid:
        since = f"{means[best]:.2f} at step {first['step']:.0f}"
        evidence = f"{run.decider} fell from {since} to {now:.2f}."
        yield Sign("collapsed", evidence, *run.scale("optimizer.lr", 0.3))


def groups(run: History, *, few: float = 0.0) -> Signs:
    """No group teaches anything, or no more than a ``few``, and why."""
    teaching, score = run.now("frac_informative_groups"), f"{run.decider} is {run.level:.2f}"
    missing = run.now(f"rewards/{run.decider}/no_answer")
    if teaching <= few and not run.decides_nothing:
        evidence = f"{teaching:.0%} of the groups teach something; {score} in the mean."
        if run.level >= 0.5:
            remedy = "Take harder prompts in dataset, or end the run."
            yield Sign("all_right", evidence, "dataset", remedy)
        elif run.level < 0.5:
            _, remedy, override = run.scale("grpo_samples", 2)
            remedy = f"Take easier prompts in dataset. If some are solved at times: {remedy}"
            override = override if run.level > 0 else None
            yield Sign("all_wrong", evidence, "dataset", remedy, override)
    if run.wrong and run.level == 0 and run.is_constant(run.decider) and missing < 0.1:
        evidence = (
            f"{run.decider} has never been above 0, and {1 - missing:.0%} of the responses hold an "
            f"answer, such as {run.wrong}."
        )
        remedy = "See whether it reads both as it should, or take easier prompts in dataset."
        yield Sign("never_right", evidence, run.key_of_decider, remedy)
    if missing >= 0.5 and run.level < thresholds.HARDLY_ANY_RIGHT:
        evidence = f"{run.decider} finds no answer in {missing:.0%} of the responses."
        remedy = "Ask for the form that it reads (dataset.system_prompt), or read another."
        yield Sign("no_answer", evidence, run.key_of_decider, remedy)
    same = run.now("frac_groups_same_text")
    is_cause = teaching <= few and same >= 0.5
    if (same >= thresholds.SAME_TEXTS or is_cause) and run.level < thresholds.SOLVED:
        evidence = f"In {same:.0%} of the groups all texts are the same; {score} in the mean."
        warmer = max(1.0, 1.5 * run.config("temperature"))
        yield Sign("same_texts", evidence, *run.change("temperature", warmer))


def responses(run: History) -> Signs:
    cut = run.now("completions/clipped_ratio")
    first, name = run.first("completions/clipped_ratio"), f"rewards/{run.decider}/mean"
    # Nearly all are cut, unless more are right than ended; or many are, and hardly any is right, or
    # no more than when fewer were cut.
    is_hopeless = run.level < thresholds.HARDLY_ANY_RIGHT
    has_grown = first < cut / 2  # the policy has changed, not its task
    level, error = mean(run.last(name, 10))
    is_no_better = level - 2 * error <= run.first(name)
    many = cut >= thresholds.MANY_CUT_OFF and (is_hopeless or (has_grown and is_no_better))
    if many or (cut >= 0.9 and run.level < 1.2 - cut):
        key = _limit(run)
        evidence, advice = f"{key} cut off {cut:.0%} of the responses.", run.scale(key, 2)
        if first == cut == 1:
            evidence += " None ever ended by itself: does this model follow its chat template?"
        if has_grown:
            evidence = f"{evidence.removesuffix('.')}, and {first:.0%} in the first steps."
            advice = run.scale("optimizer.lr", 0.3)
            mask = "objective.mask_truncated_completions"
            if cut < 0.9 and not run.config(mask):  # what did not end may have been paid as right
                advice = run.change(mask, True)
        yield Sign("truncated", evidence, *advice)
    length, first = run.now("completions/mean_length"), run.first("completions/mean_length")
    # A mean over all tokens that are trained on is missing where there are none.
    if not math.isnan(length) and math.isnan(run.now("sampling/kept_mass")):
        key = "objective.mask_truncated_completions"
        longer = run.scale("max_generated_tokens", 2)
        advice = run.change(key, False) if run.config(key) else longer
        yield Sign("nothing_trained", "No token was trained on.", *advice)
    if length < first / 10 and is_no_better and run.level < thresholds.SOLVED:
        evidence = f"Responses shrank from {first:.3g} to {length:.3g} tokens; no more are right."
        remedy = "Ask for the steps to an answer, or show some: `torchtune-grpo prompts`."
        yield Sign("responses_shrink", evidence, "dataset.system_prompt", remedy)


def _limit(run: History) -> str:
    """Return the key of the limit that cut off most responses, as far as the metrics tell."""
    ended = {
        "max_generated_tokens": run.now("environment/ended/max_tokens"),
        "environment.max_response_tokens": run.now("environment/ended/context"),
        "rollout.deadline": run.now("environment/ended/deadline"),
    }
    if run.config("environment.max_response_tokens") is not None:
        return max(ended, key=ended.__getitem__)
    has_deadline = run.config("rollout.deadline") is not None
    is_late = run.now("completions/max_length") < run.config("max_generated_tokens")
    return "rollout.deadline" if has_deadline and is_late else "max_generated_tokens"


def policy(run: History) -> Signs:
    entropy, first = run.now("sampling/entropy"), run.first("sampling/entropy")
    evidence = f"The entropy of a token went from {first:.3g} to {entropy:.3g} nats."
    # Models begin with 0.1 to 1; at 0.05 the likeliest token is taken 99 times in 100.
    if entropy < min(0.05, 0.1 * first) and run.level < thresholds.SOLVED:
        more = 2 * (run.config("loss.entropy_coeff") or 0.0005)
        yield Sign("entropy_collapsed", evidence, *run.change("loss.entropy_coeff", more))
    if entropy > max(2 * first, first + 1):  # one nat: as if from e times as many tokens
        yield Sign("entropy_exploding", evidence, *run.scale("optimizer.lr", 0.5))
    kl = run.now("kl")
    if kl > 1:  # each token is e times as likely as before; below 0.1 is usual
        evidence = f"The KL to the reference is {kl:.3g} nats a token."
        yield Sign("kl_runaway", evidence, *run.scale("loss.kl_coeff", 2))
    gap = run.now("sampling/sampling_logp_difference/mean")
    if gap > 0.1:  # rounding in bf16 makes 0.01 to 0.03
        advice = run.change("dtype", "fp32")
        if run.config("objective.sampling_correction") is None:
            advice = run.change("objective.sampling_correction", "token_truncate")
        if run.config("model.lora_dropout"):  # acts in the trainer alone
            advice = run.change("model.lora_dropout", 0.0)
        evidence = f"The two log-probs of a token differ by {gap:.3g}."
        yield Sign("sampler_trainer_gap", evidence, *advice)


def rewards(run: History) -> Signs:
    for index, reward in enumerate(run.rewards):
        name, weight, key = reward["name"], reward["weight"], run.keys[index]
        failed, none = (run.now(f"rewards/{name}/{what}") for what in ("errors", "none"))
        if failed >= thresholds.FAILS:
            remedy = "Correct what its error in the log says, or return None there."
            evidence = f"{name} failed on {failed:.0%} of the rows."
            yield Sign("reward_fails", evidence, key, remedy)
        level, decides = run.now(f"rewards/{name}/mean"), name == run.decider
        is_useless = run.is_constant(name) and level not in run.blameless(index)
        is_bad = run.decides_nothing if decides else is_useless
        if weight and is_bad:
            said = "None" if none == 1 else f"{level:.3g}"
            remedy = "Correct what it looks for, or leave it out, unless it cannot be better."
            evidence = f"{name} has been {said} on all rows so far."
            if decides:
                evidence = f"{name} was {said} for every answer so far, so nothing is learned."
                remedy = "Fix that reward."
            yield Sign("reward_constant", evidence, key, remedy)


def environments(run: History) -> Signs:
    failed = run.now("environment/ended/tool_failed")
    if failed >= thresholds.FAILS:
        evidence = f"The environment failed in {failed:.0%} of the conversations."
        remedy = "Correct what its error in the log says."
        yield Sign("environment_fails", evidence, "environment", remedy)
    same = run.now("environment/same_prompt")
    if same < 0.9:  # a few may have another prompt because their environment failed
        evidence = (
            f"{1 - same:.0%} of the answers were to another prompt than others of their group."
        )
        remedy = "Let reset take `seed`, or draw from Python's own generator, which is seeded."
        yield Sign("prompts_differ", evidence, "environment", remedy)
    calls = run.last("tools/call_frequency", _MOST_STEPS)
    if calls and not any(calls) and run.level < thresholds.SOLVED:
        remedy = "Say there when to call them, or take a model that calls tools."
        evidence = "No answer has called a tool so far."
        yield Sign("tools_unused", evidence, "dataset.system_prompt", remedy)
    if run.now("tools/failure_frequency") == 1:
        remedy = (
            "Read their errors in completions.jsonl, and correct the tools or describe them better."
        )
        yield Sign("calls_fail", "All calls of tools failed.", "environment", remedy)


def optimizer(run: History) -> Signs:
    if run.now("learning_rate") == 0:  # for longer than the first step of a warm-up
        evidence, remedy = "The learning rate is 0.", "Let lr_scheduler end later, or above 0."
        yield Sign("learning_rate_zero", evidence, "lr_scheduler", remedy)
    counts = [0.0, *run.last("nonfinite_steps", _MOST_STEPS)][-21:]
    if counts[-1] - counts[0] >= 2:  # one is an accident; three in a row end the run
        evidence = f"{counts[-1] - counts[0]:.0f} of 20 steps were not finite and skipped."
        yield Sign("steps_skipped", evidence, *run.scale("optimizer.lr", 0.5))


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
            index: abs(reward["weight"])
            for index, reward in enumerate(run.rewards)
            if reward["name"] != run.decider and reward["weight"]
        }
        less_like_it = run.change("loss.kl_coeff", 2 * (run.config("loss.kl_coeff") or 0.02))
        largest = max(others, key=others.__getitem__, default=None)
        advice = less_like_it if largest is None else run.weigh(largest, 0.5)
        yield Sign("reward_hacking", evidence, *advice)


RULES = (collapse, fall, groups, responses, policy, rewards, environments, optimizer)


def _text(value: object) -> str:
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the values' mean and its standard error; NaN if there are too few.

    The error is of the noise from one value to the next, whatever the trend (von Neumann).
    """
    count = len(values)
    squares = sum((b - a) * (b - a) for a, b in pairwise(values))
    error = math.sqrt(squares / (count - 1) / 2 / count) if count > 1 else math.nan
    return sum(values) / count if count else math.nan, error
