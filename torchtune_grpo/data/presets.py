"""Known data sets: defaults for an :class:`~torchtune_grpo.data.RLDataset`, and what rows become.

Each takes all other arguments of RLDataset, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.data.arithmetic import Split, arithmetic_problems
from torchtune_grpo.data.dataset import RLDataset

GSM8K_SYSTEM_PROMPT = (
    "Solve the problem step by step. Put your reasoning between <think> and </think>, and then the "
    "result, one plain number, between <answer> and </answer>. Your whole reply has this form: "
    "<think> reasoning </think> <answer> number </answer>"
)
HUMANEVAL_SYSTEM_PROMPT = (
    "Complete the Python function that the user gives. Reply with the whole function, its imports "
    "and helpers included, in one block that begins with ```python and ends with ```."
)
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def _shows_options(preset: Callable[..., RLDataset]) -> Callable[..., RLDataset]:
    """Put RLDataset's arguments into a preset's signature, against which configs are checked."""
    own = inspect.signature(preset, eval_str=True)
    shown = {**inspect.signature(RLDataset, eval_str=True).parameters, **own.parameters}
    del shown["options"]
    parameters = sorted(shown.values(), key=lambda parameter: parameter.kind)
    preset.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return preset


@_shows_options
def gsm8k_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: str = "openai/gsm8k",
    system_prompt: str | None = GSM8K_SYSTEM_PROMPT,
    **options: Any,
) -> RLDataset:
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade school problems with worked answers.

    The splits are ``train`` (7,473 problems) and ``test`` (1,319). The prompt is the question; the
    columns are ``question``, ``answer`` (the gold number as text) and ``solution`` (the worked
    answer, without calculator notes).
    """
    if source == "openai/gsm8k":
        options.setdefault("name", "main")
    options |= {"source": source, "system_prompt": system_prompt}
    return RLDataset(tokenizer, transform=_gsm8k_row, **options)


def _gsm8k_row(row: Mapping[str, Any]) -> dict[str, Any]:
    worked, mark, gold = str(row["answer"]).rpartition("#### ")
    gold = gold.replace(",", "").strip()
    if not (mark and gold):
        raise ValueError(f"answer does not end in '#### ' and the gold: {row['answer']!r}")
    solution = _CALCULATOR_NOTE.sub("", worked).strip()
    return {**row, "prompt": row["question"], "answer": gold, "solution": solution}


@_shows_options
def humaneval_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: str = "openai/openai_humaneval",
    split: str = "test",
    system_prompt: str | None = HUMANEVAL_SYSTEM_PROMPT,
    **options: Any,
) -> RLDataset:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): 164 functions to write, with unit tests.

    There is only the split ``test``. To train on some of the problems and evaluate on others, give
    slices, such as ``test[:132]`` and ``test[132:]``. The prompt is the function's head with its
    docstring; the columns are ``setup`` (the prompt as code), ``test``, ``entry_point`` and
    ``task_id``.
    """
    options |= {"source": source, "split": split, "system_prompt": system_prompt}
    return RLDataset(tokenizer, transform=_humaneval_row, **options)


def _humaneval_row(row: Mapping[str, Any]) -> dict[str, Any]:
    # The solution stays out, so that no reward and no log can show it.
    kept = {name: row[name] for name in ("task_id", "prompt", "entry_point", "test")}
    return {**kept, "setup": row["prompt"]}


@_shows_options
def arithmetic_dataset(
    tokenizer: ModelTokenizer,
    *,
    levels: int | Sequence[int],
    split: Split,
    num_samples: int,
    seed: int = 0,
    **options: Any,
) -> RLDataset:
    """:func:`~torchtune_grpo.data.arithmetic_problems` as a data set.

    The columns are ``solution``, ``answer`` and ``level``.
    """
    rows = arithmetic_problems(levels=levels, split=split, num_samples=num_samples, seed=seed)
    return RLDataset(tokenizer, rows=rows, prompt_column="question", **options)
