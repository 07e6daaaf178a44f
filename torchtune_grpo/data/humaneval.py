"""HumanEval (Chen et al. 2021, arXiv:2107.03374): 164 functions to write, with unit tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.rl_dataset import RLDataset, check_keys

HUMANEVAL_SYSTEM_PROMPT = (
    "Complete the Python function that the user gives. Reply with the whole function, its imports "
    "and helpers included, in one block that begins with ```python and ends with ```."
)


def humaneval_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: str = "openai/openai_humaneval",
    split: str = "test",
    data_files: Any = None,
    system_prompt: str | None = HUMANEVAL_SYSTEM_PROMPT,
    prefill: str = "",
    max_prompt_tokens: int | None = None,
    num_samples: int | None = None,
    **dataset_kwargs: Any,
) -> RLDataset:
    """An :class:`~torchtune_grpo.data.RLDataset` of HumanEval, from the hub or from its jsonl file.

    Whoever trains on some of the problems must not report results on them: give slices, such as
    ``split: test[:132]`` for training and ``test[132:]`` for evaluation.

    Args:
        tokenizer: a torchtune model tokenizer.
        source: data set on the hub with HumanEval's columns, or whatever RLDataset takes: the path
            of a file (jsonl, also gzipped), for instance.
        split: HumanEval has only ``test``; slices are allowed.
        data_files: path of local files (jsonl, also gzipped) with the problems of ``split``.
        system_prompt: asks for one fenced block of Python by default.
        prefill, max_prompt_tokens, num_samples, **dataset_kwargs: as RLDataset takes them.

    Returns:
        RLDataset: the prompt is the function's head with its docstring; the items' columns are
        ``setup`` (the prompt as code), ``test``, ``entry_point`` and ``task_id``.

    Raises:
        ValueError: if a column of HumanEval is missing, and as RLDataset does.
    """
    fixed = ("rows", "transform", "prompt_column")
    check_keys(humaneval_dataset, dataset_kwargs, source=source, fixed=fixed)
    return RLDataset(
        tokenizer,
        source=source,
        split=split,
        data_files=data_files,
        transform=_to_row,
        system_prompt=system_prompt,
        prefill=prefill,
        max_prompt_tokens=max_prompt_tokens,
        num_samples=num_samples,
        **dataset_kwargs,
    )


def _to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("task_id", "prompt", "entry_point", "test")
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"HumanEval has the text columns {', '.join(names)}, but here {name} is "
                f"{shortened(repr(row.get(name)))}. Use RLDataset for other data."
            )
    # The solution stays out, so that no reward and no log can show it.
    return {**{name: row[name] for name in names}, "setup": row["prompt"]}
