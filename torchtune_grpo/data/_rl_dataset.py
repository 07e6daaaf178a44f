"""The one data set class for reinforcement learning: prompts as tokens, and what rewards need."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.utils import get_logger, log_rank_zero

from torchtune_grpo.components import check_arguments
from torchtune_grpo.data._load import FILE_FORMATS, load_rows, loader_keys
from torchtune_grpo.data._prompt_encoder import PromptEncoder
from torchtune_grpo.data._prompt_template import RowTemplate, known_column
from torchtune_grpo.plain import shortened
from torchtune_grpo.reward_contract import GIVEN

Row = Mapping[str, Any]
GSM8K_MARK = "#### "  # between a worked answer and the gold


class RLDataset(Dataset[dict[str, Any]]):
    """Prompts to sample from, and the columns by which rewards judge the samples.

    Rows come from ``datasets.load_dataset`` or from ``rows``. Each becomes
    ``{"index": int, "tokens": list[int], "prompt": str, "columns": dict[str, Any]}``: its position
    here, the prompt's tokens (prefill included), the prompt's text, and the other columns.

    All prompts are tokenized when the data set is made, so that faulty rows show before training
    and ``max_prompt_length`` is known.

    Example in a config::

        dataset:
          _component_: torchtune_grpo.data.RLDataset
          source: json
          data_files: problems.jsonl
          prompt_column: problem
          columns: {answer: final_answer}

    Args:
        tokenizer: a torchtune model tokenizer.
        source: data set on the Hugging Face hub, or json (jsonl too), csv or parquet together with
            ``data_files``.
        rows: the rows themselves, instead of ``source``.
        transform: makes each row into the one that is used. For use from Python.
        prompt_column: holds the prompt; ``prompt`` unless given. Not among an item's columns unless
            named in ``columns``.
        columns: reward's name of a column -> its name in the data set. Other columns keep theirs;
            one whose name is taken by a renamed column is left out.
        system_prompt: text of the system message; with ``chat: False`` it stands above the prompt.
        prompt_template: text of the user message: ``{prompt}`` for the prompt column, any other
            column by its name; ``{{`` and ``}}`` for literal braces.
        chat: True for the tokenizer's chat format, with an assistant turn opened at the end; False
            for plain text, which is what a base model expects.
        prefill: text that every response begins with. Part of ``tokens``, not of ``prompt``.
        max_prompt_tokens: longer prompts are left out. None keeps all.
        num_samples: use only this many rows from the start. None uses all.
        split: the split to load, slices such as ``train[:100]`` included.
        **load_dataset_kwargs: for ``datasets.load_dataset``: ``name``, ``data_files`` and so on.

    Attributes:
        prefill (str): what graders see in front of what was sampled: as given, behind the think
            block that the model's chat template opens, if it does.
        max_prompt_length (int): length of the longest prompt in tokens.
        row_numbers (list[int]): each prompt's row in the data as read, from 0.

    Raises:
        ValueError: if a key does not fit the data or the tokenizer; the message names the key.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        source: str | None = None,
        rows: Sequence[Row] | None = None,
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
        parameters = inspect.signature(RLDataset, eval_str=True).parameters
        check_arguments(given, parameters)
        check_keys(RLDataset, load_dataset_kwargs, source=source)
        if not (transform is None or callable(transform)):
            raise ValueError(
                f"transform={transform!r}: is no function. Remove it; a config can give "
                "none, but the dotpath of a data set of your own as _component_."
            )
        _check_positive("max_prompt_tokens", max_prompt_tokens)
        _check_positive("num_samples", num_samples)
        encoder = PromptEncoder(
            tokenizer, chat=chat, system_prompt=system_prompt, prefill=prefill or ""
        )
        self.prefill = encoder.prefill
        rows = _read_rows(source, rows, split, num_samples, load_dataset_kwargs)
        if transform is not None:
            rows = _transform_rows(rows, transform)
        names = _check_same_columns(rows)
        template = RowTemplate(
            prompt_template, prompt_column=prompt_column, names=names, hint=_gsm8k_hint(rows[0])
        )
        self._prompt_column = prompt_column or "prompt"
        self._encoder, self._template = encoder, template
        sources = _column_sources(names, self._prompt_column, columns or {})

        prompts = [template.render(row, index) for index, row in enumerate(rows)]
        # Machine integers: lists of Python ones take nine times the memory.
        tokens = [array("i", encoder(prompt)) for prompt in prompts]
        kept = self.row_numbers = _rows_within([len(row) for row in tokens], max_prompt_tokens)
        self._tokens = [tokens[i] for i in kept]
        self._prompts = [prompts[i] for i in kept]
        self._columns = [{name: rows[i][key] for name, key in sources.items()} for i in kept]
        self.max_prompt_length = max(map(len, self._tokens))
        _check_tokenizer_limit(tokenizer, self.max_prompt_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = range(len(self))[index]
        return {
            "index": position,
            "tokens": self._tokens[position].tolist(),
            "prompt": self._prompts[position],
            "columns": dict(self._columns[position]),
        }

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
    source: str | None,
    fixed: Collection[str] = (),
) -> None:
    """Checks the keys that a data set's component does not name itself, but passes on.

    Args:
        component: RLDataset, or a function that makes one.
        given: the keys and their values.
        source: where the rows come from; None for nowhere.
        fixed: those of RLDataset's keys that the component sets itself.

    Raises:
        ValueError: for a key that is fixed, or that neither the component nor RLDataset nor the
            loader of the source takes; it names the nearest. On the hub there may be data sets with
            keys of their own, so that only what resembles another key is refused.
    """
    own = inspect.signature(component).parameters
    names = {**own, **inspect.signature(RLDataset).parameters}
    takes = [n for n, p in names.items() if p.kind is p.KEYWORD_ONLY and n not in fixed]
    known = {*takes, *(loader_keys(source) if source is not None else ())}
    is_open = source is not None and source not in FILE_FORMATS
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


def _gsm8k_hint(row: Row) -> str:
    if "question" in row and GSM8K_MARK in str(row.get("answer")):
        return "These are GSM8K's: use torchtune_grpo.data.gsm8k_dataset."
    return ""


def _read_rows(
    source: str | None,
    rows: Sequence[Row] | None,
    split: str,
    num_samples: int | None,
    load_dataset_kwargs: dict[str, Any],
) -> list[Row]:
    if (source is None) == (rows is None):
        raise ValueError(f"source={source!r}: give either source or rows, and not both.")
    if source is not None:
        rows = load_rows(source, split=split, num_samples=num_samples, **load_dataset_kwargs)
    read = list(rows or [])[:num_samples]
    if not read:
        raise ValueError(f"source={source!r}: holds no rows. Give one row or more.")
    return read


def _transform_rows(rows: list[Row], transform: Callable[[Row], Row]) -> list[Row]:
    transformed = []
    for index, row in enumerate(rows):
        try:
            transformed.append(transform(row))
        except (KeyError, ValueError) as error:
            raise ValueError(f"row {index} cannot be used: {error}") from error
    return transformed


def _check_same_columns(rows: Sequence[Row]) -> list[str]:
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"row {index} has the columns {sorted(row)}, row 0 has "
                f"{sorted(rows[0])}. "
                "Give every row the same columns."
            )
    return list(rows[0])


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


def _rows_within(lengths: list[int], max_prompt_tokens: int | None) -> list[int]:
    if max_prompt_tokens is None:
        return list(range(len(lengths)))
    kept = [i for i, length in enumerate(lengths) if length <= max_prompt_tokens]
    shortest, longest = min(lengths), max(lengths)
    if not kept:
        raise ValueError(
            f"max_prompt_tokens={max_prompt_tokens}: leaves none of the {len(lengths)} "
            f"prompts, which have {shortest} to {longest} tokens. Set it to {shortest} or more."
        )
    if len(kept) < len(lengths):
        log_rank_zero(
            get_logger("INFO"),
            f"RLDataset keeps {len(kept)} of {len(lengths)} prompts; {len(lengths) - len(kept)} "
            f"are longer than max_prompt_tokens={max_prompt_tokens} (up to {longest} tokens).",
        )
    return kept


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
