"""Named data sets: GSM8K, HumanEval, shipped problems, and problems that are generated."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.config.text import suggest
from torchtune_grpo.data.dataset import RLDataset
from torchtune_grpo.data.load import load_rows

Split = Literal["train", "test"]

TEST_SHARE = 0.2
LEVELS = range(1, 9)

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
    """Add RLDataset's arguments to a preset's signature, against which configs are checked."""
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

    There are 7,473 in the split ``train`` and 1,319 in ``test``. The columns are ``question``,
    ``answer`` (the gold number as text) and ``solution`` (without calculator notes).
    """
    if source == "openai/gsm8k":
        options.setdefault("name", "main")
    options |= {"source": source, "system_prompt": system_prompt}
    return RLDataset(tokenizer, transform=_gsm8k_row, **options)


def _gsm8k_row(row: Mapping[str, object]) -> dict[str, object]:
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

    There is only the split ``test``; slices such as ``test[:132]`` and ``test[132:]`` separate
    training and evaluation. The prompt is the function's head with its docstring; the columns are
    ``setup`` (the prompt as code), ``test``, ``entry_point`` and ``task_id``.
    """
    options |= {"source": source, "split": split, "system_prompt": system_prompt}
    return RLDataset(tokenizer, transform=_humaneval_row, **options)


def _humaneval_row(row: Mapping[str, object]) -> dict[str, object]:
    # The solution stays out, so that no reward and no log can show it.
    kept = {name: row[name] for name in ("task_id", "prompt", "entry_point", "test")}
    return {**kept, "setup": row["prompt"]}


@_shows_options
def arithmetic_dataset(
    tokenizer: ModelTokenizer,
    *,
    levels: int | Sequence[int],
    split: Split,
    **options: Any,
) -> RLDataset:
    """Arithmetic in eight levels, 10,000 questions for training and 1,100 others for testing.

    Levels: 1 one-digit sums; 2 and 3 two and three sums or differences in a row; 4 one sum or
    difference of two-digit numbers; 5 and 6 like 2 and 3, as a story; 7 a story of a product and a
    sum or difference; 8 the same, ending in a division. They take turns while they last. The
    columns are ``solution`` (a worked answer that ends in ``#### n``), ``answer`` (``n`` as text)
    and ``level``.
    """
    chosen = [levels] if isinstance(levels, int) else [*levels]
    if not chosen or not {*chosen} <= {*LEVELS}:
        raise ValueError(f"levels={levels!r}: give some of {[*LEVELS]}.")
    shipped = [*load_rows(str(Path(__file__).with_name(f"arithmetic_{split}.jsonl.gz")))]
    by_level = [[row for row in shipped if row["level"] == level] for level in chosen]
    rows = [row for turn in zip_longest(*by_level) for row in turn if row is not None]
    return RLDataset(tokenizer, rows=rows, prompt_column="question", **options)


# Task -> the question, how its numbers are joined, their count and range, and the answer.
_TASKS: dict[str, tuple[str, str, int, range, Callable[[list[int]], int]]] = {
    "largest": ("Which is the largest of these numbers: {}?", ", ", 4, range(10, 100), max),
    "product": ("What is {}?", " * ", 2, range(2, 13), math.prod),
    "long_product": ("What is {}?", " * ", 2, range(100, 1000), math.prod),
    "sum": ("What is {}?", " + ", 2, range(10, 100), sum),
}


@_shows_options
def number_dataset(
    tokenizer: ModelTokenizer,
    *,
    task: Literal["largest", "product", "long_product", "sum"],
    split: Split,
    num_samples: int,
    seed: int = 0,
    **options: Any,
) -> RLDataset:
    """Generated questions about a few numbers, which a small language model gets right in part.

    They ask for the ``largest`` of four two-digit numbers, the ``sum`` of two such numbers, or the
    ``product`` of two from 2 to 12, or, as ``long_product``, of two with three digits. The columns
    are ``question`` and ``answer``. All questions differ, and the splits share no combination of
    numbers, in whatever order.
    """
    question, sign, count, numbers, answer = _TASKS[task]
    rng = random.Random(f"{seed}/{split}/{task}")
    drawn = (rng.choices(numbers, k=count) for _ in range(200 * num_samples))
    questions = ((each, question.format(sign.join(map(str, each)))) for each in drawn)
    rows = ((sorted(n), {"question": text, "answer": str(answer(n))}) for n, text in questions)
    different = _different(rows, task=task, split=split, num_samples=num_samples)
    return RLDataset(tokenizer, rows=different, prompt_column="question", **options)


def _split_of(canonical: list[object]) -> Split:
    """Return the split of a problem, given in a form that does not depend on any order."""
    digest = hashlib.blake2b(repr(canonical).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


def _different(
    drawn: Iterable[tuple[list[Any], dict[str, Any]]], *, task: str, split: Split, num_samples: int
) -> list[dict[str, object]]:
    """Take a split's first rows whose questions differ; each comes with what decides its split."""
    rows: dict[str, dict[str, object]] = {}
    for canonical, row in drawn:
        if _split_of(canonical) == split:
            rows[row["question"]] = row
        if len(rows) == num_samples:
            return [*rows.values()]
    raise ValueError(
        f"num_samples={num_samples}: task={task} has only {len(rows)} questions in the split "
        f"{split}; lower it."
    )


# Questions of these change with Python's hash seed or global random state: from rank to rank.
_CHANGING = "codeio intermediate_integration isomorphic_strings knight_swap list_functions "
_CHANGING += "polynomial_multiplication ransom_note word_ladder"


@_shows_options
def reasoning_gym_dataset(
    tokenizer: ModelTokenizer,
    *,
    task: str,
    split: Split,
    num_samples: int,
    seed: int = 0,
    settings: Mapping[str, object] | None = None,
    **options: Any,
) -> RLDataset:
    """A task of reasoning-gym (arXiv:2505.24760) with its own ``settings``.

    The columns are ``question``, ``answer`` (None where many are right), ``metadata``, and
    ``entry`` for ``ReasoningGymReward``. All questions differ, and the splits share none, even
    with its words in another order.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"task={task}: needs: pip install 'reasoning-gym<0.2'") from error
    known = DATASETS.keys() - _CHANGING.split()
    if task not in known:
        hint = suggest(task, sorted(known), cutoff=0)
        raise ValueError(f"task={task}: not among reasoning-gym's stable ones.{hint}")
    made = create_dataset(task, seed=seed, size=50 * num_samples, **(settings or {}))
    of_task = {"task": task, "settings": json.dumps(settings or {})}
    signs = re.compile(r"\w+|\S")  # words, and each other character
    rows = ((sorted(signs.findall(e["question"])), {**e, "entry": e | of_task}) for e in made)
    different = _different(rows, task=task, split=split, num_samples=num_samples)
    return RLDataset(tokenizer, rows=different, prompt_column="question", **options)
