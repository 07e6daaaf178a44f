"""Named data sets: GSM8K, HumanEval, and problems that are generated."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import operator
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal

from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.data.dataset import RLDataset

Split = Literal["train", "test"]
Chain = tuple[tuple[str, int], ...]  # (("+", start), (operation, number), ...)

TEST_SHARE = 0.2

_NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
_ITEMS = ("apples", "coins", "books", "cards", "shells", "pens", "eggs", "stamps")
_GAINS = ("finds", "buys", "gets", "wins")
_LOSSES = ("loses", "sells", "gives away", "lends out")
_HOLDERS = ("bags", "boxes", "jars", "rows")


def _steps(rng: random.Random, count: int) -> Chain:
    return _with_steps((("+", rng.randint(1, 9)),), rng, count, limit=20)


def _product_and_step(rng: random.Random) -> Chain:
    product = (("+", rng.randint(2, 9)), ("*", rng.randint(2, 9)))
    return _with_steps(product, rng, 1, limit=90)


def _product_step_and_share(rng: random.Random) -> Chain:
    while True:
        chain = _product_and_step(rng)
        total = _running_values(chain)[-1]
        divisors = [n for n in range(2, 10) if total > 0 and total % n == 0]
        if divisors:
            return (*chain, ("/", rng.choice(divisors)))


def _with_steps(chain: Chain, rng: random.Random, count: int, *, limit: int) -> Chain:
    """Append one-digit sums and differences whose results are from 0 to the limit."""
    for _ in range(count):
        value = _running_values(chain)[-1]
        steps = [("+", n) for n in range(1, 10) if value + n <= limit]
        steps += [("-", n) for n in range(1, 10) if value - n >= 0]
        chain = (*chain, rng.choice(steps))
    return chain


# Level -> (function that draws a chain, whether the question is a story).
_LEVELS: dict[int, tuple[Callable[[random.Random], Chain], bool]] = {
    1: (lambda rng: (("+", rng.randint(0, 9)), ("+", rng.randint(0, 9))), False),
    2: (partial(_steps, count=2), False),
    3: (partial(_steps, count=3), False),
    4: (lambda rng: (("+", rng.randint(10, 99)), (rng.choice("+-"), rng.randint(10, 99))), False),
    5: (partial(_steps, count=2), True),
    6: (partial(_steps, count=3), True),
    7: (_product_and_step, True),
    8: (_product_step_and_share, True),
}
LEVELS = tuple(_LEVELS)


def _running_values(chain: Chain) -> list[int]:
    """Return the start number and the value after each step. Divisions are exact."""
    work = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
    values = [chain[0][1]]
    for operation, number in chain[1:]:
        values.append(work[operation](values[-1], number))
    return values


def _split_of(canonical: list[Any]) -> Split:
    """Return the split of a problem, given in a form that does not depend on any order."""
    digest = hashlib.blake2b(repr(canonical).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


def _canonical(chain: Chain) -> list[list[str]]:
    """Sort a chain's terms and factors."""
    start = ("*" if chain[1][0] == "*" else "+", chain[0][1])
    steps = (start, *chain[1:])
    runs = groupby(steps, key=lambda step: "+-" if step[0] in "+-" else step[0])
    return [sorted(f"{operation}{number}" for operation, number in run) for _, run in runs]


def _worked(chain: Chain) -> str:
    values = _running_values(chain)
    steps = zip(pairwise(values), chain[1:], strict=True)
    lines = [f"{a}{operation}{number}={b}" for (a, b), (operation, number) in steps]
    return "\n".join([*lines, f"#### {values[-1]}"])


def _question(chain: Chain, story: bool, rng: random.Random) -> str:
    if not story:
        expression = str(chain[0][1]) + "".join(f" {op} {number}" for op, number in chain[1:])
        return f"What is {expression}?"
    name, item = rng.choice(_NAMES), rng.choice(_ITEMS)
    start, steps = f"{chain[0][1]} {item}", chain[1:]
    if steps[0][0] == "*":
        start, steps = f"{chain[0][1]} {rng.choice(_HOLDERS)} of {steps[0][1]} {item}", steps[1:]
    acts = [
        f"shares them equally among {number} friends"
        if op == "/"
        else f"{rng.choice(_GAINS if op == '+' else _LOSSES)} {number}"
        for op, number in steps
    ]
    told = f"{', '.join([f'{name} has {start}', *acts[:-1]])} and {acts[-1]}"
    asked = "each friend get" if steps[-1][0] == "/" else f"{name} have now"
    return f"{told}. How many {item} does {asked}?"


def arithmetic_problems(
    *,
    levels: int | Sequence[int],
    split: Split,
    num_samples: int,
    seed: int = 0,
) -> list[dict[str, str | int]]:
    """Make arithmetic problems with worked answers; the same arguments give the same problems.

    Levels: 1 one-digit sums; 2 and 3 two and three sums or differences in a row; 4 one sum or
    difference of two-digit numbers; 5 and 6 like 2 and 3, as a story; 7 a story of a product and a
    sum or difference; 8 the same, ending in a division. No intermediate value is negative, and none
    of levels 2, 3, 5 and 6 is above 20.

    Levels have equal shares, as far as each has enough problems. All problems are different, and
    the splits have none in common. A row has ``question``, ``solution`` (a worked answer that ends
    in ``#### n``), ``answer`` (the gold ``n`` as text) and ``level``.
    """
    chosen = [levels] if isinstance(levels, int) else list(levels)
    unknown = [level for level in chosen if level not in _LEVELS]
    if unknown or not chosen:
        raise ValueError(f"levels={levels!r}: give some of {list(LEVELS)}.")
    rng = random.Random(f"{seed}/{split}")
    seen: set[str] = set()
    rows: list[dict[str, str | int]] = []
    left = deque(chosen)
    while len(rows) < num_samples:
        if not left:
            raise ValueError(
                f"num_samples={num_samples} asks for more different {split} problems than levels "
                f"{chosen} have; {len(rows)} were found. Lower num_samples or add a higher level."
            )
        row = _new_problem(left[0], split, rng, seen)
        if row is None:
            left.popleft()
        else:
            rows.append(row)
            left.rotate(-1)
    return rows


def _new_problem(
    level: int, split: Split, rng: random.Random, seen: set[str]
) -> dict[str, str | int] | None:
    """Draw a problem that was not seen; None if the level has no more."""
    draw, story = _LEVELS[level]
    # Level 1 has a few dozen problems per split; 2,000 misses in a row mean that all were used.
    for _ in range(2000):
        chain = draw(rng)
        values = _running_values(chain)
        if min(values) < 0 or _split_of(_canonical(chain)) != split:
            continue
        question, answer = _question(chain, story, rng), str(values[-1])
        if question not in seen:
            seen.add(question)
            return dict(question=question, solution=_worked(chain), answer=answer, level=level)
    return None


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

    There is only the split ``test``; slices such as ``test[:132]`` and ``test[132:]`` separate
    training and evaluation. The prompt is the function's head with its docstring; the columns are
    ``setup`` (the prompt as code), ``test``, ``entry_point`` and ``task_id``.
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
    """:func:`arithmetic_problems` with the columns ``solution``, ``answer`` and ``level``."""
    rows = arithmetic_problems(levels=levels, split=split, num_samples=num_samples, seed=seed)
    return RLDataset(tokenizer, rows=rows, prompt_column="question", **options)


# Task -> the question, how its numbers are joined, their count and range, and the answer.
_TASKS: dict[str, tuple[str, str, int, range, Callable[[list[int]], int]]] = {
    "largest": ("Which is the largest of these numbers: {}?", ", ", 4, range(10, 100), max),
    "product": ("What is {}?", " * ", 2, range(2, 13), math.prod),
    "sum": ("What is {}?", " + ", 2, range(10, 100), sum),
}


@_shows_options
def number_dataset(
    tokenizer: ModelTokenizer,
    *,
    task: Literal["largest", "product", "sum"],
    split: Split,
    num_samples: int,
    seed: int = 0,
    **options: Any,
) -> RLDataset:
    """Generated questions about a few numbers, which a small language model gets right in part.

    They ask for the ``largest`` of four two-digit numbers, the ``sum`` of two such numbers, or the
    ``product`` of two from 2 to 12. The columns are ``question`` and ``answer``. All questions
    differ, and the splits share no combination of numbers, in whatever order.
    """
    question, sign, count, numbers, answer = _TASKS[task]
    rng = random.Random(f"{seed}/{split}/{task}")
    drawn = (rng.choices(numbers, k=count) for _ in range(200 * num_samples))
    questions = ((each, question.format(sign.join(map(str, each)))) for each in drawn)
    rows = ((sorted(n), {"question": text, "answer": str(answer(n))}) for n, text in questions)
    different = _different(rows, task=task, split=split, num_samples=num_samples)
    return RLDataset(tokenizer, rows=different, prompt_column="question", **options)


def _different(
    drawn: Iterable[tuple[list[Any], dict[str, Any]]], *, task: str, split: Split, num_samples: int
) -> list[dict[str, Any]]:
    """Take a split's first rows whose questions differ; each comes with what decides its split."""
    rows: dict[str, dict[str, Any]] = {}
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
    settings: Mapping[str, Any] | None = None,
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
        near = ", ".join(get_close_matches(task, sorted(known), cutoff=0))
        raise ValueError(f"task={task}: not among reasoning-gym's stable ones, as {near} are.")
    made = create_dataset(task, seed=seed, size=50 * num_samples, **(settings or {}))
    of_task = {"task": task, "settings": json.dumps(settings or {})}
    signs = re.compile(r"\w+|\S")  # words, and each other character
    rows = ((sorted(signs.findall(e["question"])), {**e, "entry": e | of_task}) for e in made)
    different = _different(rows, task=task, split=split, num_samples=num_samples)
    return RLDataset(tokenizer, rows=different, prompt_column="question", **options)
