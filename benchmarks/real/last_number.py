"""The usual lenient grader of GSM8K: the last number of a text, whatever its form.

It shows whether a policy got better at the problems, or only at the form that its reward reads.
"""

from __future__ import annotations

import re

from torchtune_grpo.rewards.reward import declares

_NUMBER = re.compile(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


@declares(reads="text", reward_range=(0.0, 1.0))
def last_number_reward(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: object
) -> list[float]:
    """Score 1.0 if the last number of a completion equals the gold."""
    return [float(_last_number(text) == float(gold)) for text, gold in zip(completions, answer)]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
