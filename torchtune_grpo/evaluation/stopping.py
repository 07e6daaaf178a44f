"""Which evaluation was the best, and whether a run ends before ``num_steps``. No torch here.

All is decided by the recorded evaluations, so that a resumed run decides as the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ACCURACY = "eval/accuracy"


def passes(num_samples: int) -> list[int]:
    """The k of pass@k: powers of two up to the number of samples, and that."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples else []


def evaluation_metrics(num_samples: int) -> list[str]:
    """The metrics of an evaluation that can be its best: shares of right answers."""
    votes = [f"eval/maj@{num_samples}"] if num_samples > 1 else []
    return [ACCURACY, *(f"eval/pass@{k}" for k in passes(num_samples)), *votes]


def best_step(evaluations: Sequence[Mapping[str, Any]], metric: str | None) -> int | None:
    """The step of a run's best checkpoint, the first one with the highest value of the metric.

    Step 0 does not count: it is the base, and has no checkpoint. Without a metric there is no best.
    """
    values = [(value, step) for step, value in _values(evaluations, metric) if step > 0]
    return max(values, key=lambda each: each[0])[1] if values else None


def should_stop(
    evaluations: Sequence[Mapping[str, Any]],
    *,
    metric: str | None,
    stop_at: float | None,
    patience: int | None,
) -> str | None:
    """Why a run ends with the newest of its evaluations, with the key to change; None = it goes on.

    Without a metric, the accuracy decides. A run ends if the newest evaluation reaches ``stop_at``,
    or if ``patience`` evaluations in a row are not above the best before them. That of step 0 is
    one to beat; but no run ends with it.
    """
    metric = metric or ACCURACY
    found = _values(evaluations, metric)
    if not found or found[-1][0] == 0:
        return None
    (step, newest), values = found[-1], [value for _, value in found]
    if stop_at is not None and newest >= stop_at:
        reached = f"has reached evaluation.stop_at={stop_at}"
        return f"Ends after step {step}: {metric} is {newest:.3f}, and {reached}."
    best = values.index(max(values))
    waited = len(values) - 1 - best
    if patience is not None and waited >= patience:
        return (
            f"Ends after step {step}: the last {waited} evaluations were not above the {metric} "
            f"of {values[best]:.3f} after step {found[best][0]}, and evaluation.patience="
            f"{patience}."
        )
    return None


def _values(
    evaluations: Sequence[Mapping[str, Any]], metric: str | None
) -> list[tuple[int, float]]:
    return [(e["step"], e[metric]) for e in evaluations if metric and e.get(metric) is not None]
