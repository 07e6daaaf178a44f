"""A prompt as rewards see it, and the names that are theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What every reward gets besides the columns, under TRL's names.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def message(role: str, text: str) -> dict[str, Any]:
    """A message as chat templates and rewards of ``format: chat`` get it."""
    return {"role": role, "content": text}


class Prompt(str):
    """The text of a prompt's last message, which also knows all its messages."""

    messages: list[dict[str, Any]]

    def __new__(cls, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.messages = [*map(dict, messages)]
        return prompt
