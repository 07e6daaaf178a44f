"""The one data set class for reinforcement learning: prompts as tokens, and what rewards need."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import datasets
from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.utils import get_logger, log_rank_zero

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.data.bad_rows import BadRow, LeftOut
from torchtune_grpo.data.load import described, load_rows, loader_keys, source_kind
from torchtune_grpo.data.prompt import GIVEN, Prompt
from torchtune_grpo.data.prompt_encoder import PromptEncoder
from torchtune_grpo.data.prompt_template import RowTemplate, known_column

Row = Mapping[str, Any]
GSM8K_MARK = "#### "  # between a worked answer and the gold
_REFUSED = "that cannot be used"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A usable row: its number in the data as read, and what becomes of it."""

    number: int
    prompt: str | list[dict[str, Any]]
    tokens: array[int]
    columns: dict[str, Any]


class RLDataset(Dataset[dict[str, Any]]):
    """Prompts to sample from, and the columns by which rewards judge the samples.

    Rows come from ``source`` or from ``rows``. Each becomes
    ``{"index": int, "tokens": list[int], "prompt": Prompt, "columns": dict[str, Any]}``: its
    position here, the prompt's tokens (prefill included), the prompt's text, which knows the
    messages that it stands for, and the other columns.

    A prompt is a text, or a list of messages ``{"role": ..., "content": ...}`` with the roles
    system, user, assistant and tool, of which the last is to be answered.

    All prompts are tokenized when the data set is made, so that faulty rows show before training
    and ``max_prompt_length`` is known. Rows that cannot be used are left out and counted in the
    log: those whose prompt is empty, null, too long or neither text nor messages, and those that
    the transform or the chat format refuses. No other row is changed.

    Example in a config::

        dataset:
          _component_: torchtune_grpo.data.RLDataset
          source: problems.jsonl
          prompt_column: problem
          columns: {answer: final_answer}

    Args:
        tokenizer: a torchtune model tokenizer, or one of ``torchtune_grpo.models.hf_tokenizer``.
        source: a local file, whose name says its format (.jsonl, .json, .csv, .tsv, .parquet,
            .arrow, .txt, and .gz of these); a folder written by ``Dataset.save_to_disk``; a data
            set on the Hugging Face hub; from Python also a ``datasets.Dataset`` or
            ``DatasetDict``. Or the name of a format (json, csv, parquet, arrow, text), together
            with ``data_files``.
        rows: the rows themselves, instead of ``source``.
        transform: makes each row into the one that is used. For use from Python.
        prompt_column: holds the prompt; ``prompt`` unless given. Not among an item's columns unless
            named in ``columns``.
        columns: reward's name of a column -> its name in the data set. Other columns keep theirs;
            one whose name is taken by a renamed column is left out.
        system_prompt: text of the system message, unless the prompt has one of its own; with
            ``chat: False`` it stands above the prompt.
        prompt_template: text of the user message: ``{prompt}`` for the prompt column, any other
            column by its name; ``{{`` and ``}}`` for literal braces. Not for lists of messages.
        chat: True for the model's chat format, with an assistant turn opened at the end; False
            for plain text, which is what a base model expects.
        prefill: text that every response begins with. Part of ``tokens``, not of ``prompt``.
        max_prompt_tokens: longer prompts are left out. None keeps all.
        num_samples: use only so many rows, the first usable ones. None uses all.
        split: the split to load, slices such as ``train[:100]`` included.
        **load_dataset_kwargs: for ``datasets.load_dataset``: ``name``, ``data_files`` and so on.

    Attributes:
        prefill (str): what graders see in front of what was sampled: as given, behind the think
            block that the model's chat template opens, if it does.

    Raises:
        ValueError: if a key does not fit the data or the tokenizer, or no row can be used; the
            message names the key.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        source: str | datasets.Dataset | datasets.DatasetDict | None = None,
        rows: Iterable[Row] | None = None,
        transform: Callable[[Row], Row] | None = None,
        prompt_column: str | None = None,
        columns: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        chat: bool = True,
        prefill: str | None = "",
        max_prompt_tokens: int | None = None,
        num_samples: int | None = None,
        split: str = "train",
        **load_dataset_kwargs: Any,
    ) -> None:
        given = {
            "source": source,
            "prompt_column": prompt_column,
            "columns": columns,
            "system_prompt": system_prompt,
            "prompt_template": prompt_template,
            "chat": chat,
            "prefill": prefill,
        }
        load_dataset_kwargs = {
            key: value
            for key, value in load_dataset_kwargs.items()
            if value is not None or key not in ("name", "data_files")
        }
        check_keys(RLDataset, load_dataset_kwargs, source=source)
        if not (transform is None or callable(transform)):
            raise ValueError(
                f"transform={transform!r}: is no function. Remove it; a config can give "
                "none, but the dotpath of a data set of your own as _component_."
            )
        _check_positive("max_prompt_tokens", max_prompt_tokens)
        _check_positive("num_samples", num_samples)
        self._tokenizer = tokenizer
        self._form: dict[str, Any] = given | {"transform": transform}
        if (source is None) == (rows is None):
            raise ValueError(f"source={source!r}: give either source or rows, and not both.")
        self._encoder = PromptEncoder(
            tokenizer, chat=chat, system_prompt=system_prompt, prefill=prefill or ""
        )
        self.prefill = self._encoder.prefill
        self._prompt_column = prompt_column or "prompt"
        self._entries: list[_Entry] = []
        if source is not None:
            rows = load_rows(source, split=split, **load_dataset_kwargs)
        left_out, too_long, template = LeftOut(), list[int](), None
        for number, row in _transformed(() if rows is None else rows, transform, left_out):
            if len(self._entries) == num_samples:
                break
            if template is None:
                template = self._template = RowTemplate(
                    prompt_template,
                    prompt_column=prompt_column,
                    names=[*row],
                    hint=_gsm8k_hint(row),
                )
                sources = _column_sources([*row], self._prompt_column, columns or {})
            try:
                prompt = template.render(row, number)
                # Machine integers: lists of Python ones take nine times the memory.
                tokens = array("i", self._encoder(prompt))
                if len(tokens) > (max_prompt_tokens or len(tokens)):
                    too_long.append(len(tokens))
                    kind = f"longer than max_prompt_tokens={max_prompt_tokens}"
                    raise BadRow(kind, f"{len(tokens)} tokens")
            except BadRow as fault:
                left_out.add(number, fault)
            else:
                values = {name: row[column] for name, column in sources.items()}
                self._entries.append(_Entry(number, prompt, tokens, values))
        where = described(source, load_dataset_kwargs.get("data_files"))
        if too_long and len(too_long) == left_out.count() and not self._entries:
            shortest = min(too_long)
            raise ValueError(
                f"max_prompt_tokens={max_prompt_tokens}: leaves none of the {len(too_long)} "
                f"prompts, which have {shortest} to {max(too_long)} tokens. Set it to {shortest} "
                "or more."
            )
        _check_left_out(left_out, used=len(self._entries), where=where)
        _check_tokenizer_limit(tokenizer, self.max_prompt_length)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = range(len(self))[index]
        entry = self._entries[position]
        messages = self._encoder.messages(entry.prompt)
        return {
            "index": position,
            "tokens": entry.tokens.tolist(),
            "prompt": Prompt(messages[-1]["content"], messages),
            "columns": dict(entry.columns),
        }

    @property
    def max_prompt_length(self) -> int:
        """Length of the longest prompt in tokens."""
        return max(len(entry.tokens) for entry in self._entries)

    @property
    def highest_token(self) -> int:
        """The highest token id of all prompts."""
        return max(max(entry.tokens, default=0) for entry in self._entries)

    @property
    def row_numbers(self) -> list[int]:
        """Each prompt's row in the data as read, from 0."""
        return [entry.number for entry in self._entries]

    def leave_out(self, positions: Collection[int]) -> None:
        """Removes prompts; those behind them move up."""
        self._entries = [e for i, e in enumerate(self._entries) if i not in positions]

    def alike(
        self, *, source: str | datasets.Dataset | None = None, rows: Iterable[Row] | None = None
    ) -> RLDataset:
        """A data set of other rows, in the form of these."""
        return RLDataset(self._tokenizer, **self._form | {"source": source, "rows": rows})

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt that is not in the data, in the form of those that are.

        Raises:
            ValueError: if ``prompt_template`` needs more columns than the prompt's.
        """
        try:
            return self._encoder(self._template.render({self._prompt_column: prompt}, 0))
        except KeyError as error:
            raise ValueError(
                f"prompt_template: needs the column {error} of a row, so that it cannot be "
                "filled with a prompt alone."
            ) from error


def check_keys(
    component: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    source: Any,
    fixed: Collection[str] = (),
) -> None:
    """Checks the keys that a data set's component does not name itself, but passes on.

    Args:
        component: RLDataset, or a function that makes one.
        given: the keys and their values.
        source: as RLDataset takes it.
        fixed: those of RLDataset's keys that the component sets itself.

    Raises:
        ValueError: for a key that is fixed, or that neither the component nor RLDataset nor the
            loader of the source takes; it names the nearest. On the hub there may be data sets with
            keys of their own, so that only what resembles another key is refused.
    """
    own = inspect.signature(component).parameters
    names = {**own, **inspect.signature(RLDataset).parameters}
    takes = [n for n, p in names.items() if p.kind is p.KEYWORD_ONLY and n not in fixed]
    known = {*takes, *loader_keys(source)}
    is_open = source_kind(source) == "hub"
    for key, value in given.items():
        cutoff = 0.8 if is_open else 0.6
        near = next(iter(get_close_matches(key, {*known, *fixed}, n=1, cutoff=cutoff)), None)
        if key == "path":
            near = "source"  # which load_dataset calls so
        if key in known or (near is None and is_open):
            continue
        remedy = f"unknown key. Did you mean {near}?"
        if near is None:
            remedy = f"unknown key. Known are {', '.join(takes)}."
        elif near in fixed:
            remedy = (
                f"{component.__name__} sets {near} itself. Remove the key, or use "
                "torchtune_grpo.data.RLDataset, which takes it."
            )
        raise ValueError(f"{key}={shortened(repr(value))}: {remedy}")


def _transformed(
    rows: Iterable[Row], transform: Callable[[Row], Row] | None, left_out: LeftOut
) -> Iterator[tuple[int, Row]]:
    """Numbers and rows, all of the same columns; what is no row is left out."""
    names = None
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            left_out.add(number, BadRow("that have no columns", shortened(repr(row))))
            continue
        if transform is not None:
            try:
                row = transform(row)
            except (KeyError, ValueError) as error:
                said = describe(error) if isinstance(error, KeyError) else str(error)
                left_out.add(number, BadRow(_REFUSED, said))
                continue
        names = names or row.keys()
        if row.keys() != names:
            raise ValueError(
                f"row {number} has the columns {sorted(row)}, those before it have "
                f"{sorted(names)}. Give every row the same columns."
            )
        yield number, row


def _check_left_out(left_out: LeftOut, *, used: int, where: str) -> None:
    """Tells in the log what is left out; raises a ValueError where that is all, or too much."""
    total = used + left_out.count()
    if total == 0:
        raise ValueError(f"{where}: holds no rows. Give one row or more.")
    if not used or 2 * left_out.count(_REFUSED) > total:
        raise ValueError(
            f"{where}: of {total} rows, {used} can be used: {left_out}. Correct the rows, or the "
            "keys that read them."
        )
    if used < total:
        log_rank_zero(
            get_logger("INFO"),
            f"RLDataset, {where}: {used} of {total} rows are used. Left out (rows count from 0): "
            f"{left_out}.",
        )


def _gsm8k_hint(row: Row) -> str:
    if "question" in row and GSM8K_MARK in str(row.get("answer")):
        return "These are GSM8K's: use torchtune_grpo.data.gsm8k_dataset."
    return ""


def _column_sources(
    names: Collection[str], prompt_column: str, columns: Mapping[str, str]
) -> dict[str, str]:
    """Reward's name of each column -> its name in the data set."""
    sources = {name: known_column("columns", column, names) for name, column in columns.items()}
    placed = {prompt_column, *sources.values()}
    sources |= {name: name for name in names if name not in placed and name not in sources}
    for name in GIVEN:
        if name in sources:
            raise ValueError(
                f"columns: rewards already get an argument {name!r}, so no column may have "
                f"that name. Rename it: columns={{other_name: {sources[name]}}}."
            )
    return sources


def _check_positive(key: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{key}={value!r}: is no positive integer. Set one, or null for no limit.")


def _check_tokenizer_limit(tokenizer: Any, longest: int) -> None:
    limit = getattr(tokenizer, "max_seq_len", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"tokenizer.max_seq_len={limit}: is less than the longest prompt, {longest} tokens, "
            "which would lose its end. Set tokenizer.max_seq_len=null, or leave long prompts out "
            f"with max_prompt_tokens={limit}."
        )
