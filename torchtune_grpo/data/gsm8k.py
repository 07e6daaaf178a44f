"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade school word problems with worked answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.load import source_kind
from torchtune_grpo.data.rl_dataset import GSM8K_MARK, RLDataset, check_keys

GSM8K_SYSTEM_PROMPT = (
    "Solve the problem step by step. Put your reasoning between <think> and </think>, and then the "
    "result, one plain number, between <answer> and </answer>. Your whole reply has this form: "
    "<think> reasoning </think> <answer> number </answer>"
)

_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def gsm8k_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: str = "openai/gsm8k",
    name: str | None = "main",
    split: str = "train",
    data_files: Any = None,
    system_prompt: str | None = GSM8K_SYSTEM_PROMPT,
    prefill: str = "",
    max_prompt_tokens: int | None = None,
    num_samples: int | None = None,
    **dataset_kwargs: Any,
) -> RLDataset:
    """An :class:`~torchtune_grpo.data.RLDataset` of GSM8K, from the hub or from its jsonl files.

    Args:
        tokenizer: a torchtune model tokenizer.
        source: data set on the hub with GSM8K's columns ``question`` and ``answer``, or whatever
            RLDataset takes: the path of a file, for instance.
        name: configuration of the hub data set. Files have none, so ``data_files`` overrides it.
        split: ``train`` (7,473 problems) or ``test`` (1,319).
        data_files: path of local files with the problems of ``split``.
        system_prompt: asks for ``<think> ... </think> <answer> ... </answer>`` by default.
        prefill, max_prompt_tokens, num_samples, **dataset_kwargs: as RLDataset takes them.

    Returns:
        RLDataset: the prompt is the question; the items' columns are ``question``, ``answer`` (the
        gold number as text) and ``solution`` (the worked answer, without calculator notes).

    Raises:
        ValueError: if a row's answer has no ``#### `` with a gold behind it, and as RLDataset does.
    """
    fixed = ("rows", "transform", "prompt_column")
    check_keys(gsm8k_dataset, dataset_kwargs, source=source, fixed=fixed)
    return RLDataset(
        tokenizer,
        source=source,
        split=split,
        name=name if data_files is None and source_kind(source) == "hub" else None,
        data_files=data_files,
        transform=_to_row,
        system_prompt=system_prompt,
        prefill=prefill,
        max_prompt_tokens=max_prompt_tokens,
        num_samples=num_samples,
        **dataset_kwargs,
    )


def _to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    for column in ("question", "answer"):
        if column not in row:
            raise ValueError(
                f"GSM8K has the columns question and answer, but here are {sorted(row)}. "
                "Use RLDataset for other data."
            )
    worked, mark, gold = str(row["answer"]).rpartition(GSM8K_MARK)
    gold = gold.replace(",", "").strip()
    if not (mark and gold):
        raise ValueError(
            f"its answer does not end in {GSM8K_MARK!r} and the gold: "
            f"{shortened(repr(row['answer']))}. Use RLDataset for other data."
        )
    return {
        **row,
        "prompt": row["question"],
        "answer": gold,
        "solution": _CALCULATOR_NOTE.sub("", worked).strip(),
    }
