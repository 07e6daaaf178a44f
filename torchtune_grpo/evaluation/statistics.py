"""Uncertainty of held-out numbers, the best evaluation, and when a run ends by itself.

This module holds pass@k, majority votes, intervals, a paired test and a comparison of evaluations.

Prompts are independent of each other, while the samples of one prompt are alike, so the unit is the
prompt everywhere. Intervals hold for prompts drawn like these, not for another data set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchtune_grpo.config.text import aligned
from torchtune_grpo.evaluation.thresholds import SOLVED, SURE

ACCURACY = "eval/accuracy"
_RESAMPLES = 10_000
_FINEST_UNIT = 256  # scores are multiples of 1/256 at the finest


class Paired(NamedTuple):
    """The result of ``paired_test`` on two policies' scores for the same prompts."""

    difference: float  # mean of after minus before
    low: float  # bounds of its 95 % interval
    high: float
    p: float  # how often chance alone gives a difference at least as large, of either sign

    def __str__(self) -> str:
        p = f"p={self.p:.3f}" if self.p >= 0.001 else "p<0.001"
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] {p}"


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Estimate the best of ``k`` of a prompt's n samples (Chen et al. 2021, arXiv:2107.03374).

    The result is the mean of the best score over all k-subsets, which is unbiased; for c scores of
    1 among zeros, it is 1 - C(n - c, k) / C(n, k).
    """
    n = len(scores)
    subsets = comb(n, k)  # of which the i-th smallest score, from 0, is the best in C(i, k - 1)
    ranked = enumerate(sorted(scores))
    return fsum(score * (comb(i, k - 1) / subsets) for i, score in ranked if score)


def majority(answers: Sequence[str | None]) -> int | None:
    """Return which sample wins the vote of maj@k (Wang et al. 2022, arXiv:2203.11171).

    It is the first sample with the most frequent answer; of equally frequent answers, the first one
    given. A sample that states no answer (None) has no vote; None if no sample states any.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None


def bootstrap_interval(values: ArrayLike) -> tuple[float, float]:
    """Return the mean's 95 % interval for ``values`` [P], by resampling the prompts.

    Every resample of 100 wrong answers is 100 wrong answers, with the interval (0, 0). Therefore 2
    prompts that score 0 and 2 that score 1 are added first, as Agresti and Coull (1998) do for a
    proportion: (0, 0.05) then. Where ``values`` (means over samples) vary less than zeros and ones
    with that mean, the added ones weigh less by this ratio. Values beyond 0 to 1 are scaled to it
    and back. The order of the values has no effect.
    """
    scores = np.asarray(values, dtype=np.float64)
    lowest, highest = float(min(0, *scores)), float(max(1, *scores))
    scores = (scores - lowest) / (highest - lowest)
    mean = scores.mean()
    weight = scores.var() / (mean * (1 - mean)) if 0 < mean < 1 else 1.0
    low, high = _interval(scores, added=(0, 0, 1, 1), weight=weight)
    return lowest + low * (highest - lowest), lowest + high * (highest - lowest)


def paired_test(before: ArrayLike, after: ArrayLike) -> Paired:
    """Test whether scores [P] of the same prompts, before and after, differ more than by chance.

    Under the null hypothesis each prompt's difference is as likely to be positive as negative. All
    2^P choices of signs are counted, not sampled; for scores of 0 and 1 that is McNemar's exact
    test. The interval resamples the prompts plus one gain and one loss of 1 (Bonett and Price
    2012), weighted as above. Scores are from 0 to 1 and may be means over samples; differences
    that are not all 0 to 256 times the same 1/m, m <= 256, are rounded to 1/256 of the largest for
    ``p``.
    """
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    size = np.abs(difference).mean()
    weight = (difference**2).mean() / size if size else 1.0
    low, high = _interval(difference, added=(-1, 1), weight=weight)
    return Paired(float(difference.mean()), low, high, _sign_flip_p(difference))


class Score(NamedTuple):
    """A held-out number with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def scores_of(evaluation: Mapping[str, object]) -> dict[str, Score]:
    """Return a recorded evaluation's numbers with intervals: accuracy, pass@1, ..., maj@k."""
    found = {}
    for metric in [name.removesuffix("/low") for name in evaluation if name.endswith("/low")]:
        values: list[Any] = [evaluation.get(f"{metric}{end}") for end in ("", "/low", "/high")]
        if None not in values:
            found[metric.removeprefix("eval/")] = Score(*values)
    return found


def title_of(name: str, evaluation: Mapping[str, Any]) -> str:
    """Return a number's title, which is not ``name`` where the reward is not known to decide."""
    measure, (kind, _, k) = evaluation.get("measure", "accuracy"), name.partition("@")
    if measure == "accuracy":
        return name
    others = {"pass": f"{measure}, best of {k}", "maj": f"{measure}, majority of {k}"}
    return others.get(kind, measure)


def kind_of(evaluation: Mapping[str, Any]) -> str:
    """Say whether the problems of an evaluation are held out of training."""
    return "trained-on" if evaluation.get("trained_on", 0) >= 0.5 else "held-out"


def full_title(name: str, evaluation: Mapping[str, Any]) -> str:
    """Return a number's title, to begin a sentence: ``Held-out accuracy``."""
    title = title_of(name, evaluation)
    what = f"mean of {title}" if name == "accuracy" != title else title
    return f"{kind_of(evaluation).capitalize()} {what}"


def in_one_line(evaluation: Mapping[str, object]) -> str:
    """Put an evaluation in words: ``held-out accuracy 0.914 [0.859, 0.961], pass@1 0.873, ...``."""
    title = title_of("accuracy", evaluation)
    first = "accuracy" if title == "accuracy" else f"{title}: greedy"
    parts = [
        f"{title_of(name, evaluation).removeprefix(f'{title}, ')} {score.mean:.3f}"
        if name != "accuracy"
        else f"{first} {score}"
        for name, score in scores_of(evaluation).items()
    ]
    return f"{kind_of(evaluation)} {', '.join(parts)}"


@dataclass(frozen=True)
class Comparison:
    """Two recorded evaluations, before and after training; one may stand for both."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    best: Mapping[str, object] | None = None  # between them

    @classmethod
    def of_run(cls, evaluations: Sequence[Mapping[str, Any]]) -> Comparison | None:
        """Compare the first and last evaluation of a run's record; None if there is none."""
        known = [each for each in evaluations if "accuracy" in scores_of(each)]
        between = max(known[1:-1], key=lambda each: float(each[ACCURACY]), default=None)
        return cls(known[0], known[-1], between) if known else None

    @cached_property
    def fall(self) -> Paired | None:
        """The change from the best evaluation to the last, if the last is significantly worse."""
        if self.best is None or self.best[ACCURACY] <= self.before[ACCURACY]:
            return None
        test = Comparison(self.best, self.after).changes.get("accuracy")
        return test if test is not None and test.difference < 0 and test.p < SURE else None

    @property
    def ends(self) -> list[Mapping[str, object]]:
        """Both evaluations, or the one that stands for both."""
        return [self.before] if self.before is self.after else [self.before, self.after]

    @cached_property
    def changes(self) -> dict[str, Paired]:
        """The paired test of each number; empty where the prompts are not the same."""
        pairs = {name: self._pairs(name) for name in scores_of(self.after)}
        return {name: paired_test(*zip(*found)) for name, found in pairs.items() if found}

    def _pairs(self, name: str) -> list[tuple[float, float]]:
        """Return a number's values before and after, of the prompts that were scored both times."""
        before, after = (each.get("prompts", {}) for each in (self.before, self.after))
        if before is after or before.get("prompt_index") != after.get("prompt_index"):
            return []
        pairs = zip(before.get(name, ()), after.get(name, ()))
        return [pair for pair in pairs if None not in pair]

    @cached_property
    def decisive(self) -> str:
        """The number to judge by: the accuracy, unless only another one has changed for certain."""
        accuracy, others = self.changes.get("accuracy"), [*self.changes][1:]
        if accuracy is None or accuracy.p < SURE:
            return "accuracy"
        certain = (name for name in others if self.changes[name].p < SURE / len(others))
        return next(certain, "accuracy")

    @property
    def headline(self) -> str:
        name = self.decisive
        before, after = (each[f"eval/{name}"] for each in (self.before, self.after))
        what = full_title(name, self.after)
        if self.before is self.after:
            score = scores_of(self.after)["accuracy"]
            return f"{what} is {score} after step {self.after['step']}."
        if self.best is not None and self.fall is not None:
            best = f"{self.best[ACCURACY]:.3f} after step {self.best['step']}"
            return (
                f"{what} rose from {before:.3f} to {best}, and fell to {after:.3f} ({self.fall})."
            )
        change = self.changes.get(name)
        moved = f"{'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"
        moved = f"stayed at {after:.3f}" if before == after else moved
        return f"{what} {moved}{f' ({change})' if change else ''}."

    @property
    def tone(self) -> str:
        """Whether training has made the policy better: good, bad or unsure."""
        test = self.fall or self.changes.get(self.decisive)
        if test is None or test.p >= SURE:
            return "unsure"
        return "good" if test.difference > 0 else "bad"

    @property
    def reasons(self) -> list[str]:
        """Sentences: whether the headline is certain, and what to do about it."""
        if self.before is self.after:
            return ["The next evaluation will show whether training helps."]
        test = self.changes.get(self.decisive)
        if test is None:
            return ["Not tested: the two evaluations are not of the same problems."]
        if self.best is not None and self.fall is not None:
            return [
                f"The policy was better after step {self.best['step']}: take that checkpoint "
                "(evaluation.keep_best=eval/accuracy keeps it).",
                "Most often the learning rate is too high, or training has gone on for too long.",
            ]
        old, new = map(np.asarray, zip(*self._pairs(self.decisive)))
        significant = "Not significant yet" if self.tone == "unsure" else "Significant"
        found = [
            f"{significant}: on {len(old)} {kind_of(self.after)} problems, {(new > old).sum()} "
            f"improved and {(new < old).sum()} got worse."
        ]
        least = f"With {len(old)} problems, changes below {(test.high - test.low) / 2:.2f} may be"
        is_solved = float(self.after[ACCURACY]) >= SOLVED
        more, has_fallen = "harder prompts" if is_solved else "more num_steps", test.difference < 0
        otherwise = "lower optimizer.lr" if has_fallen else "train longer"
        advice = {
            "good": f"Take this checkpoint; {more} may teach it more.",
            "bad": "Training made it worse: lower optimizer.lr, and take an earlier checkpoint.",
            "unsure": f"{least} chance. Evaluate on more problems (eval_dataset), or {otherwise}.",
        }
        found.append(advice[self.tone])
        if title_of("accuracy", self.after) != "accuracy":
            found.append("No reward is known to tell right from wrong; deciding_reward names one.")
        return found

    @cached_property
    def rows(self) -> list[tuple[str, list[Score | None], str]]:
        """Each number's title, its scores at both ends, and its change."""
        ends = [scores_of(each) for each in self.ends]
        return [
            (title_of(n, self.after), [e.get(n) for e in ends], str(self.changes.get(n, "")))
            for n in ends[-1]
        ]

    def table(self, title: str, columns: Sequence[str]) -> list[str]:
        """Return lines with every number, a column for each evaluation, and the change."""
        rows = [[title, *columns[: len(self.ends)], "change" if self.changes else ""]]
        rows += [[name, *(str(s or "-") for s in scores), test] for name, scores, test in self.rows]
        for name in ("mean_length", "clipped_ratio", "none"):
            found = [each.get(f"eval/{name}", 0.0) for each in self.ends]
            if name != "none" or any(found):
                rows.append([name, *(f"{value:.3f}" for value in found), ""])
        return aligned(rows)


# These decide by the recorded evaluations alone, so that a resumed run decides like the first one.


def passes(num_samples: int) -> list[int]:
    """Return the k of pass@k: powers of two below the number of samples, and that number."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples else []


def evaluation_metrics(num_samples: int) -> list[str]:
    """Return the metrics that can decide which evaluation is best: shares of right answers."""
    votes = [f"eval/maj@{num_samples}"] if num_samples > 1 else []
    return [ACCURACY, *(f"eval/pass@{k}" for k in passes(num_samples)), *votes]


def best_step(evaluations: Sequence[Mapping[str, object]], metric: str | None) -> int | None:
    """Return the step of a run's best checkpoint: the first with the metric's highest value.

    Step 0 does not count: it is the base, and has no checkpoint. Without a metric there is no best.
    """
    found = [each for each in _values(evaluations, metric) if each[0] > 0]
    return max(found, key=lambda each: each[1])[0] if found else None


def should_stop(
    evaluations: Sequence[Mapping[str, object]], *, metric: str | None, stop_at: float | None
) -> str | None:
    """Say why a run ends with its newest evaluation, and the key to change; None = it goes on.

    It ends if that reaches ``stop_at``, by the accuracy if there is no metric. No run ends with the
    evaluation at step 0.
    """
    metric = metric or ACCURACY
    step, newest = next(reversed(_values(evaluations, metric)), (0, 0.0))
    if step == 0 or stop_at is None or newest < stop_at:
        return None
    reached = f"has reached evaluation.stop_at={stop_at}"
    return f"Ends after step {step}: {metric} is {newest:.3f}, and {reached}."


def _values(
    evaluations: Sequence[Mapping[str, Any]], metric: str | None
) -> list[tuple[int, float]]:
    return [(e["step"], e[metric]) for e in evaluations if metric and e.get(metric) is not None]


def _interval(
    values: NDArray[np.float64], *, added: Sequence[float], weight: float
) -> tuple[float, float]:
    """Bootstrap the mean of ``values`` and ``added`` (weighted); return the percentile interval."""
    # Resamples are drawn as counts of equal values: these are few, and their order has no effect.
    unique, which = np.unique(np.concatenate([values, added]), return_inverse=True)
    # A weight above 1 means scores beyond 0 and 1, whose spread has no such bound.
    weights = np.repeat([1.0, min(weight, 1.0)], [len(values), len(added)])
    share = np.bincount(which, weights) / weights.sum()
    total = round(weights.sum())
    drawn = np.random.default_rng(0).multinomial(total, share, size=_RESAMPLES)
    low, high = np.quantile(drawn @ unique / total, (0.025, 0.975))
    return float(low), float(high)


def _sign_flip_p(difference: NDArray[np.float64]) -> float:
    units = _in_units(difference[difference != 0])
    gained, total = int(units[units > 0].sum()), int(np.abs(units).sum())
    chance = np.ones(1)  # probability of each sum of gains, with every sign drawn anew
    for size in np.abs(units):
        kept = np.pad(chance, (0, size))
        chance = (kept + np.roll(kept, size)) / 2
    tail = min(gained, total - gained)
    return min(1.0, 2 * float(chance[: tail + 1].sum()))


def _in_units(difference: NDArray[np.float64]) -> NDArray[np.int64]:
    """Express the differences as whole multiples, up to 256, of the largest unit 1/m that fits."""
    largest = np.abs(difference).max(initial=0)
    for m in range(1, _FINEST_UNIT + 1):
        scaled = difference * m
        is_whole = np.allclose(scaled, np.rint(scaled), rtol=0, atol=1e-6)
        if is_whole and largest * m <= _FINEST_UNIT:
            return np.rint(scaled).astype(np.int64)
    return np.rint(difference * (_FINEST_UNIT / largest)).astype(np.int64)
