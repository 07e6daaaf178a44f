"""Prompts that are lists of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.bad_rows import BadRow

ROLES = ("system", "user", "assistant", "tool")
_ILL_FORMED = "with ill-formed messages"


def read_text(value: Any, subject: str) -> str:
    """A text that holds more than white space.

    Args:
        value: the text.
        subject: what it is in the fault, as in "whose prompt".

    Raises:
        BadRow: if it does not.
    """
    if value is None:
        raise BadRow(f"{subject} is null")
    if not isinstance(value, str):
        raise BadRow(f"{subject} is no text ({type(value).__name__})", repr(value))
    if not value.strip():
        raise BadRow(f"{subject} is blank")
    try:
        value.encode()
    except UnicodeEncodeError:  # tokenizers would replace it
        raise BadRow(f"{subject} is no valid Unicode", value) from None
    return value


def read_messages(value: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation that a model can continue, without the keys that are null.

    Args:
        value: ``{"role": ..., "content": ...}`` each; the last is of the user, or a tool's.

    Raises:
        BadRow: if it is none.
    """
    if not value:
        raise BadRow(_ILL_FORMED, "there are none")
    for number, message in enumerate(value):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise BadRow(_ILL_FORMED, f"{where} is {shortened(repr(message))}")
        if message.get("role") not in ROLES:
            said = f"{where} has the role {message.get('role')!r}"
            raise BadRow(_ILL_FORMED, f"{said}, which is none of {', '.join(ROLES)}")
        try:
            read_text(message.get("content"), f"the content of {where}")
        except BadRow as error:
            raise BadRow(_ILL_FORMED, str(error)) from None
    if value[-1]["role"] in ("assistant", "system"):
        raise BadRow(_ILL_FORMED, f"the last one is the {value[-1]['role']}'s")
    return [{k: v for k, v in message.items() if v is not None} for message in value]
