"""Fills a prompt template with a row's columns."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.conversation import read_messages, read_text

_BRACES_HINT = "Write literal braces as {{ and }}."


class RowTemplate:
    """A format string over columns: ``{prompt}`` is the prompt column, others go by their name.

    Values are inserted and never read as a template, so braces in the data have no meaning.

    Args:
        template: the format string; ``{{`` and ``}}`` stand for literal braces.
        prompt_column: name of the column that ``{prompt}`` stands for; None for ``prompt``.
        names: the columns that there are.
        hint: ends the error for a prompt column that there is not.

    Raises:
        ValueError: for a placeholder that is no column, for one with a format, or for none at all;
            for a prompt column that no placeholder stands for.
    """

    def __init__(
        self, template: str, *, prompt_column: str | None, names: Collection[str], hint: str = ""
    ) -> None:
        try:
            fields = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"prompt_template={template!r}: cannot be read: {error}. {_BRACES_HINT}"
            ) from error
        self._template = template
        # Literal text, the column whose value follows it, and whether that is the prompt.
        self._parts: list[tuple[str, str | None, bool]] = []
        for literal, field, spec, conversion in fields:
            if spec or conversion:
                raise ValueError(
                    f"prompt_template={template!r}: the placeholder {field!r} has a "
                    f"format; placeholders are plain column names. {_BRACES_HINT}"
                )
            if field == "prompt":
                column = known_column("prompt_column", prompt_column or "prompt", names, hint)
                self._parts.append((literal, column, True))
            else:
                if field is not None:
                    known_column("prompt_template", field, ["prompt", *names], _BRACES_HINT)
                self._parts.append((literal, field, False))
        if all(column is None for _, column, _ in self._parts):
            raise ValueError(
                f"prompt_template={template!r}: has no placeholder, so all prompts would "
                "be the same. Use {prompt} for the prompt column."
            )

        if prompt_column not in (None, *(column for _, column, _ in self._parts)):
            raise ValueError(
                f"prompt_column={prompt_column!r}: has no effect: {{prompt}} is not in "
                f"prompt_template={template!r}. Remove one of the two keys."
            )

    def render(self, row: Mapping[str, Any], number: int) -> str | list[dict[str, Any]]:
        """Returns the prompt of a row: text, or messages where the template is one column.

        Raises:
            BadRow: if a value is no text, or no messages.
            ValueError: if messages stand where the template has room for a text.
        """
        texts = []
        for literal, column, is_prompt in self._parts:
            value = "" if column is None else row[column]
            value = value.tolist() if hasattr(value, "tolist") else value  # of arrays
            if isinstance(value, (list, tuple)):
                if len(self._parts) == 1 and not literal:
                    return read_messages(value)
                raise ValueError(
                    f"prompt_template={self._template!r}: takes texts, but in row {number} the "
                    f"column {column!r} is a list: {shortened(repr(value))}. Remove it."
                )
            if column is not None and (is_prompt or not isinstance(value, (str, int, float))):
                read_text(value, f"whose {column!r}")
            texts.append(f"{literal}{value}")
        return read_text("".join(texts), "whose prompt")


def known_column(key: str, name: str, names: Collection[str], hint: str = "") -> str:
    """Returns ``name`` if it is among ``names``.

    Raises:
        ValueError: naming the key of the data set and the nearest column.
    """
    if name in names:
        return name
    nearest = get_close_matches(name, names, n=1, cutoff=0.5)
    suggestion = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"{key}: the data set has no column {name!r}. {suggestion}"
        f"Choose one of {shortened(str(sorted(names)), 400)}. {hint}".rstrip()
    )
