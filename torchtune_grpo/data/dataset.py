"""Prompts as tokens with the columns that rewards need, and their collation into batches."""

from __future__ import annotations

import copy
import string
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.utils import get_logger, log_rank_zero

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.chat import (
    GIVEN,
    BadRow,
    Prompt,
    PromptEncoder,
    check_messages,
    check_text,
)
from torchtune_grpo.data.load import load_rows, origin

Row = Mapping[str, Any]

_REPORT_SECONDS = 10  # between two log lines while data take long to read
_CHECKED = 50_000  # rows, checked in about ten seconds; later ones are read when they are drawn


@dataclass(frozen=True, slots=True)
class _Entry:
    """A usable row."""

    number: int  # in the data as read
    prompt: str | list[dict[str, Any]]
    tokens: array[int]  # machine integers: lists of Python ones take nine times the memory
    columns: dict[str, Any]


class RLDataset(Dataset[dict[str, Any]]):
    """Prompts to sample from, and the columns by which rewards judge the samples.

    An item is ``{"index": int, "tokens": list[int], "prompt": Prompt, "columns": dict[str, Any]}``:
    its position, the prompt's tokens (prefill included), the prompt's text, which carries the
    messages that it stands for, and the other columns. docs/data.md describes the arguments.

    The first 50,000 rows are checked and tokenized when the data set is made: those that cannot be
    used are left out and reported in the log before training. Later rows are read when they are
    drawn; one that cannot be used is replaced by the next one.

    The attribute ``prefill`` is what graders see before the sampled text: the given prefill,
    after the think block, if any, that the chat template opens.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        source: str | None = None,
        rows: Iterable[Row] | None = None,  # instead of a source
        transform: Callable[[Row], Row] | None = None,  # its ValueErrors leave rows out
        prompt_column: str = "prompt",
        columns: Mapping[str, str] | None = None,  # name for rewards -> name in the data
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        chat: bool = True,  # False: plain text, for a base model
        prefill: str | None = "",
        max_prompt_tokens: int | None = None,
        num_samples: int | None = None,  # number of usable rows to take, from the first on
        split: str = "train",
        data_files: Any = None,  # paths, or split -> paths
        **load_dataset_kwargs: Any,
    ) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: give 1 or more, or null for all rows.")
        known = signature(RLDataset).parameters
        for key, value in load_dataset_kwargs.items():
            if near := get_close_matches(key, known, n=1, cutoff=0.8):
                raise ValueError(f"{key}={value!r}: unknown argument. Did you mean {near[0]}?")
        self._encoder = PromptEncoder(
            tokenizer, chat=chat, system_prompt=system_prompt, prefill=prefill or ""
        )
        self.prefill = self._encoder.prefill
        self._limits = {
            "max_prompt_tokens": max_prompt_tokens,
            "tokenizer.max_seq_len": getattr(tokenizer, "max_seq_len", None),
        }
        self._transform, self._renamed = transform, dict(columns or {})
        self._prompt_column, self._template = prompt_column, prompt_template
        self._fields = _fields(prompt_template)
        options = {"split": split, "data_files": data_files, **load_dataset_kwargs}
        self._fault: Callable[[Row], str | None] | None = None  # of a later row's columns
        self._entries: list[_Entry] = []
        self._read(*_load(source, rows, **options), num_samples)

    def __len__(self) -> int:
        return len(self._entries) + len(self._unread)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position, entry = self._usable(range(len(self))[index])
        messages = self._encoder.messages(entry.prompt)
        is_chat = not isinstance(entry.prompt, str)
        return {
            "index": position,
            "tokens": entry.tokens.tolist(),
            "prompt": Prompt(messages[-1]["content"], messages, is_chat=is_chat),
            "columns": dict(entry.columns),
        }

    def _usable(self, position: int) -> tuple[int, _Entry]:
        """Return the position and entry of a row, or of the next one that can be used."""
        checked = len(self._entries)
        if position < checked:
            return position, self._entries[position]
        for later, number in enumerate(self._unread[position - checked :], position):
            try:
                entry = self._entry(self._rows[number], number)
                if fault := self._fault and self._fault(entry.columns):
                    raise BadRow(fault)
                return later, entry
            except ValueError as error:
                said = f"row {number} is left out: {shortened(str(error), 200)}"
                log_rank_zero(get_logger("INFO"), said)
        return 0, self._entries[0]

    @property
    def num_checked(self) -> int:
        """Number of rows that were checked when the data set was made; they come first."""
        return len(self._entries)

    def check_unread(self, *, max_tokens: int, fault: Callable[[Row], str | None]) -> None:
        """Also leave out later rows whose prompt is longer, or whose columns have a fault."""
        self._limits["the model's context, less max_generated_tokens"] = max_tokens
        self._fault = fault

    @property
    def checked_prompts(self) -> list[array[int]]:
        """The tokens of each prompt among the rows that were checked."""
        return [entry.tokens for entry in self._entries]

    @property
    def row_numbers(self) -> list[int]:
        """Each prompt's row in the data as read, from 0."""
        return [entry.number for entry in self._entries]

    def leave_out(self, positions: Collection[int]) -> None:
        """Remove prompts; later ones move up."""
        self._entries = [e for i, e in enumerate(self._entries) if i not in positions]

    def alike(self, *, source: str | None = None, rows: Iterable[Row] | None = None) -> RLDataset:
        """Make a data set of other rows with the same settings."""
        other = copy.copy(self)
        other._read(*_load(source, rows))
        return other

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt that is not in the data."""
        try:
            return self._encoder(self._fill({self._prompt_column: prompt}, 0))
        except KeyError as error:
            raise ValueError(
                f"prompt_template={self._template!r}: needs the column {error}, not only a prompt."
            ) from error

    def _read(self, rows: Iterable[Row], where: str, num_samples: int | None = None) -> None:
        entries: list[_Entry] = []
        left_out = defaultdict[str, list[int]](list)
        self._rows: Any = rows
        self._names: set[str] | None = None
        self._unread = range(0)
        total = f" of {min(len(rows), _CHECKED)}" if isinstance(rows, Sized) else ""
        next_report = time.monotonic() + _REPORT_SECONDS
        for number, row in enumerate(rows):
            if len(entries) == num_samples:
                break
            if number == _CHECKED and entries and isinstance(rows, Sized):
                count = len(rows) - number if num_samples is None else num_samples - len(entries)
                self._unread = range(number, min(len(rows), number + count))
                said = f"{where}: {len(self._unread)} later rows are read when they are drawn."
                log_rank_zero(get_logger("INFO"), said)
                break
            if time.monotonic() > next_report:
                said = f"{where}: {number}{total} rows are read and tokenized"
                log_rank_zero(get_logger("INFO"), f"{said}; num_samples takes fewer.")
                next_report += _REPORT_SECONDS
            try:
                entries.append(self._entry(row, number))
            except BadRow as error:
                left_out[str(error)].append(number)
        _report(left_out, len(entries), where)
        self._entries = entries

    def _entry(self, row: Any, number: int) -> _Entry:
        """Return a row's entry; raise BadRow for an unusable row, ValueError for unusable data."""
        row = self._transformed(row)
        if self._names is None:
            self._names, self._sources = {*row}, self._column_sources(row)
        if row.keys() != self._names:
            raise ValueError(
                f"row {number} has the columns {sorted(row)}, the ones before it "
                f"{sorted(self._names)}. Give every row the same columns."
            )
        prompt = self._fill(row, number)
        tokens = array("i", self._encoder(prompt))
        for key, limit in self._limits.items():
            if limit is not None and len(tokens) > limit:
                raise BadRow(f"the prompt is longer than {key}={limit}")
        columns = {name: _field(row, source) for name, source in self._sources.items()}
        return _Entry(number, prompt, tokens, columns)

    def _transformed(self, row: Any) -> Row:
        if not isinstance(row, Mapping):
            raise BadRow(f"it has no columns: {shortened(repr(row))}")
        try:
            return row if self._transform is None else self._transform(row)
        except KeyError as error:
            raise BadRow(f"it has no column {error}, but {sorted(row)}") from error
        except ValueError as error:
            raise BadRow(shortened(str(error), 200)) from error

    def _column_sources(self, row: Row) -> dict[str, str]:
        """Check the config's keys against a row; map rewards' names of columns to the data's."""
        for key, used in {
            "prompt_column": {self._prompt_column} if "prompt" in self._fields else set(),
            "prompt_template": self._fields - {"prompt"},
            "columns": {*self._renamed.values()},
        }.items():
            for name in used - row.keys():
                try:
                    _field(row if key == "columns" else {}, name)
                except BadRow:
                    there = f"there is no column {name!r} among {sorted(row)}"
                    raise ValueError(f"{key}: {there}.") from None
        taken = {self._prompt_column, *self._renamed.values(), *self._renamed}
        sources = self._renamed | {name: name for name in row if name not in taken}
        for name in sources.keys() & GIVEN:
            raise ValueError(
                f"columns: rewards already have an argument {name!r}. Rename the column: "
                f"columns={{other_name: {sources[name]}}}."
            )
        return sources

    def _fill(self, row: Row, number: int) -> str | list[dict[str, Any]]:
        """Fill in the template, or return a row's messages as they are."""
        if "prompt" in self._fields:
            prompt = row[self._prompt_column]
            if isinstance(prompt, (list, tuple)):
                if self._template != "{prompt}":
                    raise ValueError(
                        f"prompt_template={self._template!r}: row {number} has a list of messages, "
                        "which no template takes. Remove it."
                    )
                return check_messages(prompt)
            row = {**row, "prompt": check_text(prompt, f"column {self._prompt_column!r}")}
        values = {name: row[name] for name in self._fields}
        for name, value in values.items():
            if not isinstance(value, (str, int, float)):
                raise BadRow(f"column {name!r} is not text or a number: {shortened(repr(value))}")
        return check_text(self._template.format(**values), "the prompt")


def _load(
    source: str | None, rows: Iterable[Row] | None, *, split: str = "train", **options: Any
) -> tuple[Iterable[Row], str]:
    """Return the rows of a source, or those given, and the name of their origin."""
    given = {key: value for key, value in options.items() if value is not None}
    if source is not None and rows is None:
        return load_rows(source, split=split, **given), origin(source, options.get("data_files"))
    if source is not None or rows is None:
        raise ValueError(f"source={source!r}: give either source or rows.")
    for key, value in given.items():
        raise ValueError(f"{key}={value!r}: unknown argument for rows in memory.")
    table: Any = rows
    return (table.to_dict("records") if hasattr(rows, "iterrows") else rows), "rows"  # pandas


def _field(row: Row, path: str) -> Any:
    """Return a column's value, or one nested in it: ``reward_model.ground_truth``."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(f"it has no {path!r}")
        value = value[name]
    return value


def _fields(template: str) -> set[str]:
    """Return the columns that a prompt template names."""
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(
            f"prompt_template={template!r}: {error}. Write literal braces as {{{{ and }}}}."
        ) from error
    if not fields:
        raise ValueError(f"prompt_template={template!r}: has no column; use {{prompt}}, say.")
    return fields


def _report(left_out: Mapping[str, Sequence[int]], used: int, where: str) -> None:
    """Log which rows are left out and why; raise an error if none remains."""
    count = sum(map(len, left_out.values()))
    reasons = [
        f"{why} (row {rows[0]})" if len(rows) == 1 else f"{why} ({len(rows)} rows, first {rows[0]})"
        for why, rows in left_out.items()
    ]
    total, why = used + count, shortened("; ".join(reasons), 600)
    text = f"{count} of {total} rows (counted from 0) are left out: {why}."
    if not used:
        raise ValueError(f"{where}: {text if count else 'there are no rows.'}")
    if count:
        log_rank_zero(get_logger("INFO"), f"{where}: {text}")


@dataclass(frozen=True)
class PromptBatch:
    """B prompts, and the values of every other column."""

    tokens: list[list[int]]
    indices: list[int]  # positions in the data set: ``dataset[indices[b]]`` is prompt b
    prompts: list[str]  # texts as rewards see them; those from a data set carry all messages
    columns: dict[str, list[Any]]  # B values each
    # How often each prompt came earlier in this step, on any rank: each use gets its own noise.
    uses: list[int]
    places: list[int]  # positions among the step's prompts of all ranks, ascending


def collate_prompts(
    items: Sequence[dict[str, Any]],
    *,
    uses: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
) -> PromptBatch:
    """Collate B items of an :class:`RLDataset`; by default this rank has all of the step's."""
    names = items[0]["columns"].keys()
    return PromptBatch(
        tokens=[item["tokens"] for item in items],
        indices=[item["index"] for item in items],
        prompts=[item["prompt"] for item in items],
        columns={name: [item["columns"][name] for item in items] for name in names},
        uses=[0] * len(items) if uses is None else [*uses],
        places=[*range(len(items))] if places is None else [*places],
    )
