"""Prompts as tokens with the columns that rewards need, and their collation into batches."""

from __future__ import annotations

import copy
import re
import string
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any, Protocol, TypedDict

from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.utils import get_logger, log_rank_zero

from torchtune_grpo.config.text import shortened, suggest
from torchtune_grpo.data.chat import (
    GIVEN,
    BadRow,
    PromptEncoder,
    check_messages,
    check_text,
)
from torchtune_grpo.data.load import as_sequence, digest, load_rows, origin
from torchtune_grpo.trajectory import Prompt

Row = Mapping[str, object]

log = get_logger("INFO")

# Columns with which TRL changes the prompt.
_OF_PROMPTS = ("image", "images", "tools", "chat_template_kwargs")
_ELSEWHERE = {
    "path": "source names the file, folder or data set",
    "shuffle": "rows come in a random order anyway, unless sampler says otherwise",
}
_VALUE = re.compile(r"""=('.*'|".*"|\S*?)(?=:? )""")  # in what is wrong with a row
_REPORT_SECONDS = 10  # between two log lines while data take long to read
_FIRST = 10_000  # rows that are read at the start, in two seconds, so that mistakes surface


class Item(TypedDict):
    """A prompt, and the columns by which rewards judge the answers to it."""

    index: int  # position in the data set
    tokens: Sequence[int]  # of the prompt, prefill included
    prompt: Prompt
    columns: dict[str, object]


# Items -> by position, what is wrong with those that are judged, or None. If it raises a ValueError
# for the first rows of a data set, that ends the run.
Rule = Callable[[Sequence[Item]], Mapping[int, str | None]]


class PromptData(Protocol):
    """Prompts to train or to evaluate on, as a run uses them.

    ``prefill`` is what graders see before the sampled text: the given prefill, after the think
    block, if any, that the chat template opens. ``encoder`` encodes prompts. ``row_numbers`` holds
    the row of each position, in the data as read.
    """

    prefill: str
    asked: Mapping[str, object]  # arguments of RLDataset that say how a prompt is written
    row_numbers: Sequence[Any]

    @property
    def encoder(self) -> PromptEncoder: ...

    @property
    def digest(self) -> str:
        """A digest of the rows as read."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...

    def item(self, prompt: object, index: int) -> Item:
        """Make an item of a prompt that is not in the data."""
        ...

    def alike(self, *, source: str | None = None, rows: Iterable[Row] | None = None) -> RLDataset:
        """Make a data set of other rows with the same settings."""
        ...

    def check(self, rule: Rule, *, where: str, remedy: str = "", drawn_rows: bool = True) -> None:
        """Leave out rows that a rule finds faulty: of the first ones now, others when drawn.

        Raises a ValueError with the remedy if they are more than half of those that it judged.
        """
        ...


class RLDataset(Dataset[Item]):
    """Prompts to sample from; docs/data.md describes the arguments.

    A row is read, encoded and checked when it is first used. The first 10,000 are used at the
    start: those that cannot be are left out, and the log says why. A later one that cannot be used
    is skipped when it is drawn. In its place comes the next one, and after the last the first.
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
        **load_dataset_kwargs: object,
    ) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: give 1 or more, or null for all rows.")
        known = signature(RLDataset).parameters
        for key, value in load_dataset_kwargs.items():
            if key in _ELSEWHERE:
                raise ValueError(f"{key}={value!r}: unknown argument; {_ELSEWHERE[key]}.")
            if hint := suggest(key, known, cutoff=0.8):
                raise ValueError(f"{key}={value!r}: unknown argument.{hint}")
        self.encoder = PromptEncoder(
            tokenizer, chat=chat, system_prompt=system_prompt, prefill=prefill or ""
        )
        self.prefill = self.encoder.prefill
        form = (system_prompt, prompt_template, chat, prefill or "")
        names = ("system_prompt", "prompt_template", "chat", "prefill")
        self.asked: Mapping[str, object] = dict(zip(names, form, strict=True))
        self._limits = {
            "max_prompt_tokens": max_prompt_tokens,
            "tokenizer.max_seq_len": getattr(tokenizer, "max_seq_len", None),
        }
        self._transform, self._renamed = transform, dict(columns or {})
        self._prompt_column, self._template = prompt_column, prompt_template
        self._fields = template_fields(prompt_template)
        options = {"split": split, "data_files": data_files, **load_dataset_kwargs}
        self._open(*_load(source, rows, **options), num_samples)

    def alike(self, *, source: str | None = None, rows: Iterable[Row] | None = None) -> RLDataset:
        other = copy.copy(self)
        other._open(*_load(source, rows))
        return other

    def item(self, prompt: object, index: int) -> Item:
        try:
            filled = self._fill({self._prompt_column: prompt})
        except KeyError as error:
            raise ValueError(
                f"prompt_template={self._template!r}: needs the column {error}, not only a prompt."
            ) from error
        return Item(
            index=index, tokens=self.encoder(filled), prompt=self.encoder.prompt(filled), columns={}
        )

    @property
    def digest(self) -> str:
        return digest(self._rows)

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, index: int) -> Item:
        start = range(len(self))[index]
        for position in chain(range(start, len(self)), range(start)):
            if item := self._usable(self.row_numbers[position]):
                return {
                    "index": position,
                    "tokens": [*item["tokens"]],
                    "prompt": item["prompt"],
                    "columns": {**item["columns"]},
                }
        raise ValueError(f"{self._where}: no row can be used.")

    def _usable(self, number: int) -> Item | None:
        """Return a row's item, or None if it cannot be used, which is logged once."""
        if number in self._first:
            return self._first[number]
        if number in self._skipped:
            return None
        try:
            item = self._read(number)
            for rule in self._rules:
                if fault := rule([item]).get(0):
                    raise BadRow(fault)
            return item
        except ValueError as error:
            self._skipped.add(number)
            why = f"{shortened(str(error), 200)}; {len(self._skipped)} so far"
            log.info(f"{self._where}: row {number} (counted from 0) is skipped: {why}.")
            return None

    def check(self, rule: Rule, *, where: str, remedy: str = "", drawn_rows: bool = True) -> None:
        found = rule([self[position] for position in range(len(self._first))])
        faults = {self.row_numbers[p]: fault for p, fault in found.items() if fault is not None}
        most = len(found) // 2
        self._leave_out(faults, where, of=len(found), most=most, remedy=remedy)
        if drawn_rows:
            self._rules.append(rule)

    def _open(self, rows: Iterable[Row], where: str, num_samples: int | None = None) -> None:
        """Begin with other rows: read the first ones, and leave out those that cannot be used."""
        self._rows, self._where = as_sequence(rows, num_samples), where
        self._names: set[str] | None = None
        self._first: dict[int, Item] = {}  # by row number
        self._skipped = set[int]()  # numbers of later rows
        self._rules: list[Rule] = []
        # The row of each position, in the data as read.
        self.row_numbers: Sequence[int] = array("l", range(len(self._rows)))
        faults: dict[int, str] = {}
        total = min(len(self._rows), _FIRST)
        next_report = time.monotonic() + _REPORT_SECONDS
        for number in range(total):
            if len(self._first) == num_samples:
                break
            if time.monotonic() > next_report:
                said = f"{where}: {number} of {total} rows are read and tokenized"
                log_rank_zero(log, f"{said}; num_samples takes fewer.")
                next_report += _REPORT_SECONDS
            try:
                self._first[number] = self._read(number)
            except BadRow as error:
                faults[number] = str(error)
        if not total:
            raise ValueError(f"{where}: there are no rows.")
        tried = len(self._first) + len(faults)
        self._leave_out(faults, where, of=tried, most=tried - 1)
        self.row_numbers = self.row_numbers[:num_samples]

    def _leave_out(
        self, faults: Mapping[int, str], where: str, *, of: int, most: int, remedy: str = ""
    ) -> None:
        """Leave out rows and log why; raise a ValueError if they are more than ``most``."""
        numbers = defaultdict[str, list[int]](list)
        for number, why in faults.items():  # of values that are wrong alike, one is an example
            numbers[_VALUE.sub("", why)].append(number)
        reasons = "; ".join(
            f"{shortened(faults[n[0]], 200)} "
            + (f"(row {n[0]})" if len(n) == 1 else f"({len(n)} rows, first {n[0]})")
            for n in numbers.values()
        )
        said = f"{len(faults)} of {of} rows (counted from 0) are left out: "
        said = f"{where}: {said}{shortened(reasons, 600)}."
        if len(faults) > most:
            raise ValueError(f"{said} {remedy}".rstrip())
        if faults:
            log_rank_zero(log, said)
            self._first = {n: item for n, item in self._first.items() if n not in faults}
            self.row_numbers = array("l", (n for n in self.row_numbers if n not in faults))

    def _read(self, number: int) -> Item:
        """Read a row; raise BadRow for an unusable one, ValueError for unusable data."""
        row = self._transformed(self._rows[number])
        if self._names is None:
            self._names, self._sources = {*row}, self._column_sources(row)
        if row.keys() != self._names:
            raise ValueError(
                f"row {number} has the columns {sorted(row)}, the ones before it "
                f"{sorted(self._names)}. Give every row the same columns."
            )
        for name in _OF_PROMPTS:
            if self._sources.get(name) == name and row[name]:
                raise ValueError(
                    f"columns: row {number} has {name}, which the model would not see. If a reward "
                    f"needs it, rename it: columns={{other_name: {name}}}; or else remove it."
                )
        prompt = self._fill(row)
        # Machine integers: lists of Python's take nine times the memory.
        tokens = array("i", self.encoder(prompt))
        for key, limit in self._limits.items():
            if limit is not None and len(tokens) > limit:
                raise BadRow(f"the prompt is longer than {key}={limit}")
        columns = {name: _field(row, source) for name, source in self._sources.items()}
        return Item(
            index=number, tokens=tokens, prompt=self.encoder.prompt(prompt), columns=columns
        )

    def _transformed(self, row: object) -> Row:
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
                    _field({} if key == "prompt_template" else row, name)
                except BadRow:
                    there = f"there is no column {name!r} among {sorted(row)}."
                    if not re.fullmatch(r"\w+(\.\w+)*", name):  # as in \boxed{} or JSON
                        there = f"{{{name}}} is no column. Write literal braces as {{{{ and }}}}."
                    raise ValueError(f"{key}: {there}") from None
        taken = {self._prompt_column, *self._renamed.values(), *self._renamed}
        sources = self._renamed | {name: name for name in row if name not in taken}
        for name in sources.keys() & GIVEN:
            raise ValueError(
                f"columns: rewards already have an argument {name!r}. Rename the column: "
                f"columns={{other_name: {sources[name]}}}."
            )
        return sources

    def _fill(self, row: Row) -> str | list[dict[str, object]]:
        """Fill in the template, or return a row's messages as they are."""
        if "prompt" in self._fields:
            prompt = _field(row, self._prompt_column)
            if isinstance(prompt, (list, tuple)):
                if self._template != "{prompt}":
                    raise BadRow(f"prompt_template={self._template!r} takes no list of messages")
                return check_messages(prompt)
            text = check_text(prompt, f"column {self._prompt_column!r}")
            if re.match(r'\s*\[\s*\{\s*"(role|content|from)"', text):
                raise BadRow(
                    f"column {self._prompt_column!r} holds messages as text; give JSON lines with "
                    "lists, or a transform that parses them"
                )
            row = {**row, "prompt": text}
        values = {name: _as_written(row[name], name) for name in self._fields}
        return check_text(self._template.format(**values), "the prompt")


def _load(
    source: str | None, rows: Iterable[Row] | None, *, split: str = "train", **options: object
) -> tuple[Iterable[Row], str]:
    """Return the rows of a source, or those given, and the name of their origin."""
    given = {key: value for key, value in options.items() if value is not None}
    if source is not None and rows is None:
        return load_rows(source, split=split, **given), origin(source, options.get("data_files"))
    if source is not None or rows is None:
        raise ValueError(f"source={source!r}: give either source or rows.")
    for key, value in given.items():
        raise ValueError(f"{key}={value!r}: unknown argument for rows in memory.")
    return rows, "rows"


def _field(row: Row, path: str) -> object:
    """Return a column's value, or one nested in it: ``reward_model.ground_truth``."""
    if path in row:
        return row[path]
    value: object = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(f"it has no {path!r}")
        value = value[name]
    return value


def template_fields(template: str) -> set[str]:
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


class _Lines(list[object]):
    """A list that a template writes line by line; as ``{name:, }``, with commas between."""

    def __format__(self, separator: str) -> str:
        return (separator or "\n").join(map(str, self))


def _as_written(value: Any, name: str) -> Any:
    """Return a column's value as a template takes it."""
    is_list = isinstance(value, (list, tuple))
    if not all(isinstance(each, (str, int, float)) for each in (value if is_list else [value])):
        kinds = "text, a number or a list of these"
        raise BadRow(f"column {name!r} is not {kinds}: {shortened(repr(value))}")
    return _Lines(value) if is_list else value


@dataclass(frozen=True)
class PromptBatch:
    """B prompts, and the values of every other column."""

    tokens: list[list[int]]
    indices: list[int]  # positions in the data set: ``dataset[indices[b]]`` is prompt b
    prompts: list[Prompt]
    columns: dict[str, list[object]]  # B values each
    # How often each prompt came earlier in this step, on any rank: each use gets its own noise.
    uses: list[int]
    step_indices: list[int]  # positions among the step's prompts of all ranks, ascending


def first_prompts(dataset: PromptData) -> set[tuple[int, ...]]:
    """Return the prompts that are read at the start, as tokens; of mixed data sets, each one's."""
    found: set[tuple[int, ...]] = set()

    def note(items: Sequence[Item]) -> dict[int, str | None]:
        found.update(tuple(item["tokens"]) for item in items)
        return {}

    dataset.check(note, where="", drawn_rows=False)
    return found


def collate_prompts(
    items: Sequence[Item],
    *,
    uses: Sequence[int] | None = None,
    step_indices: Sequence[int] | None = None,
) -> PromptBatch:
    """Collate B items; by default this rank has all of the step's."""
    names = items[0]["columns"].keys()
    return PromptBatch(
        tokens=[[*item["tokens"]] for item in items],
        indices=[item["index"] for item in items],
        prompts=[Prompt.of(item["prompt"]) for item in items],
        columns={name: [item["columns"][name] for item in items] for name in names},
        uses=[0] * len(items) if uses is None else [*uses],
        step_indices=[*range(len(items))] if step_indices is None else [*step_indices],
    )
