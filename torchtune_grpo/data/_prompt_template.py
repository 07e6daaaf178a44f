"""Fills a prompt template with a row's columns."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from torchtune_grpo.plain import shortened

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
        # Literal text, the column whose value follows it, and what that value may be.
        self._parts: list[tuple[str, str | None, tuple[type, ...]]] = []
        for literal, field, spec, conversion in fields:
            if spec or conversion:
                raise ValueError(
                    f"prompt_template={template!r}: the placeholder {field!r} has a "
                    f"format; placeholders are plain column names. {_BRACES_HINT}"
                )
            if field == "prompt":
                column = known_column("prompt_column", prompt_column or "prompt", names, hint)
                self._parts.append((literal, column, (str,)))
            else:
                if field is not None:
                    known_column("prompt_template", field, ["prompt", *names], _BRACES_HINT)
                self._parts.append((literal, field, (str, int, float)))
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

    def render(self, row: Mapping[str, Any], index: int) -> str:
        """Returns the prompt of a row.

        Raises:
            ValueError: naming the row by its index, if a value is no text or the prompt is blank.
        """
        texts = []
        for literal, column, types in self._parts:
            value = "" if column is None else row[column]
            if not isinstance(value, types):
                raise ValueError(
                    f"row {index}: the prompt's column {column!r} holds "
                    f"{shortened(repr(value))} ({type(value).__name__}), not text. Correct or "
                    "remove the row, or choose another prompt_column."
                )
            texts.append(f"{literal}{value}")
        prompt = "".join(texts)
        if not prompt.strip():
            raise ValueError(f"row {index}: the prompt is blank. Correct or remove the row.")
        return prompt


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
