"""How sure a held-out number is: pass@k, majority votes, intervals and a paired test.

No prompt knows of another, while the samples of one prompt are alike; so the unit everywhere is the
prompt. Intervals hold for prompts drawn like these, not for another data set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_RESAMPLES = 10_000
_FINEST_UNIT = 256  # of scores: whole numbers of 1/256 at the finest


class Paired(NamedTuple):
    """What :func:`paired_test` says of two policies' scores on the same prompts."""

    difference: float  # mean of after minus before
    low: float  # of its 95 % interval
    high: float
    p: float  # how often chance alone gives a difference at least as large, of either sign


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of ``k`` of a prompt's samples (Chen et al. 2021, arXiv:2107.03374).

    Args:
        scores (Sequence[float]): of all n samples.
        k (int): at most n.

    Returns:
        float: the mean over all k-subsets of their best score, which is unbiased; for c scores of 1
        among zeros, 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: if there are fewer than ``k`` samples.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: with {n} samples, give 1 to {n}.")
    subsets = comb(n, k)  # of which the i-th smallest score, from 0, is the best in C(i, k - 1)
    ranked = enumerate(sorted(scores))
    return fsum(score * (comb(i, k - 1) / subsets) for i, score in ranked if score)


def majority(answers: Sequence[str | None]) -> int | None:
    """The vote of maj@k (Wang et al. 2022, arXiv:2203.11171): which sample speaks for all.

    Args:
        answers (Sequence[str | None]): of each sample; None = it states none, and has no vote.

    Returns:
        int | None: the first sample with the most frequent answer; of answers that are equally
        frequent, the first one given. None if no sample states any.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None


def bootstrap_interval(values: ArrayLike) -> tuple[float, float]:
    """95 % interval of the mean of ``values``, by resampling the prompts.

    Alone, the resamples of 100 wrong answers are 100 wrong answers, and the interval (0, 0). So two
    prompts that score 0 and two that score 1 are added first, as Agresti and Coull (1998) do for a
    proportion: (0, 0.05) there. They weigh as much less than a prompt as ``values`` (means over
    samples) vary less than zeros and ones of that mean. benchmarks/intervals.py counts how often
    the mean is in it.

    Args:
        values (ArrayLike): [P] one for each prompt, from 0 to 1.

    Returns:
        tuple[float, float]: low and high, the same for the same values in any order.
    """
    scores = np.asarray(values, dtype=np.float64)
    mean = scores.mean()
    weight = scores.var() / (mean * (1 - mean)) if 0 < mean < 1 else 1.0
    return _interval(scores, added=(0, 0, 1, 1), weight=weight)


def paired_test(before: ArrayLike, after: ArrayLike) -> Paired:
    """Whether scores differ by more than chance, when each prompt was answered before and after.

    Under the null hypothesis each prompt's difference is as likely to be positive as negative. All
    2^P choices of signs are counted, not sampled; for scores of 0 and 1 that is McNemar's exact
    test. The interval resamples the prompts, one gain and one loss of 1 added (Bonett and Price
    2012), with a weight as above.

    Args:
        before (ArrayLike): [P] score of each prompt, from 0 to 1; may be a mean over samples.
        after (ArrayLike): [P] of the same prompts. Differences that are not all multiples of one
            1/m, m <= 256, are rounded to 1/256 of the largest for ``p``.

    Returns:
        Paired: difference, interval and p.
    """
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    size = np.abs(difference).mean()
    weight = (difference**2).mean() / size if size else 1.0
    low, high = _interval(difference, added=(-1, 1), weight=weight)
    return Paired(float(difference.mean()), low, high, _sign_flip_p(difference))


def _interval(
    values: NDArray[np.float64], *, added: Sequence[float], weight: float
) -> tuple[float, float]:
    """Percentile bootstrap of the mean of ``values`` and, each with a weight, ``added``."""
    # Resamples are drawn as counts of equal values: few of these, and their order has no effect.
    unique, which = np.unique(np.concatenate([values, added]), return_inverse=True)
    # Of scores beyond 0 and 1, the spread has no such bound.
    weights = np.repeat([1.0, min(weight, 1.0)], [len(values), len(added)])
    share = np.bincount(which, weights) / weights.sum()
    total = round(weights.sum())
    drawn = np.random.default_rng(0).multinomial(total, share, size=_RESAMPLES)
    low, high = np.quantile(drawn @ unique / total, (0.025, 0.975))
    return float(low), float(high)


def _sign_flip_p(difference: NDArray[np.float64]) -> float:
    units = _in_units(difference[difference != 0])
    gained, total = int(units[units > 0].sum()), int(np.abs(units).sum())
    chance = np.ones(1)  # of each sum of the gains, with every sign drawn anew
    for size in np.abs(units):
        kept = np.pad(chance, (0, size))
        chance = (kept + np.roll(kept, size)) / 2
    tail = min(gained, total - gained)
    return min(1.0, 2 * float(chance[: tail + 1].sum()))


def _in_units(difference: NDArray[np.float64]) -> NDArray[np.int64]:
    """As whole numbers of the largest unit 1/m that fits all."""
    for m in range(1, _FINEST_UNIT + 1):
        if np.allclose(difference * m, np.rint(difference * m), rtol=0, atol=1e-6):
            return np.rint(difference * m).astype(np.int64)
    scaled = difference * (_FINEST_UNIT / np.abs(difference).max())
    return np.rint(scaled).astype(np.int64)
