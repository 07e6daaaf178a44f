"""Correctness of answers beyond one number: fractions with roots, intervals, polynomials, sets."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.math import (
    grade_math_answer,
    is_worked_answer,
    located_answers,
    math_gold_fault,
    stated_value,
)
from torchtune_grpo.rewards.workers import FunctionWorker, WorkerLost, WorkerPool

_COMMAND = re.compile(r"\\(?:(?:begin|end)\{[a-z]+\}|[A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]{2,}")
_MARK = re.compile(r"\\equiv(?![a-z])|\\?[\[\](){}]|,|(?<![<>!:])=")
_EQUALS = ("=", "\\equiv")
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?(?: ?\([a-z](?:, ?[a-z])*\))?|")
_TEXT_COMMAND = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)(?![A-Za-z])")
# Words that are mathematics. Any other makes the answer prose: a hedge ("x or y"), a negation.
_FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh".split())
_FUNCTIONS |= frozenset("log ln exp sqrt pi min max gcd lcm mod infty frac".split())

# Longer than any answer; what is longer is there to keep sympy busy.
LONGEST_ANSWER = 400
_UNREADABLE_GOLD = -1.0  # as in sandbox/_symbolic.py, which only the workers import


class SymbolicMathReward:
    """Rewards an answer that equals the gold as an expression: ``\\frac{\\sqrt2}{2}``, ``[0, 1)``.

    Needs ``pip install "math-verify<0.10"``. Where the gold states one number, it is
    ``math_correctness_reward``. Otherwise math-verify compares the located answer with the gold, in
    worker processes; what it does not find out in time is not correct.

    Args:
        timeout (float): seconds for one answer.
        workers (int): processes.

    Raises:
        ValueError: if math-verify is not installed, or a number is not positive.
    """

    __name__ = "symbolic_math_reward"
    decides = True

    def __init__(self, *, timeout: float = 5.0, workers: int = 2) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "rewards: SymbolicMathReward needs math-verify: pip install 'math-verify<0.10'"
            )
        if timeout <= 0 or workers < 1:
            raise ValueError(
                f"rewards: timeout is {timeout} and workers {workers}; give numbers above 0."
            )
        path = "torchtune_grpo.sandbox.symbolic.expressions_equal"
        self._pool = WorkerPool([FunctionWorker(path, timeout=timeout) for _ in range(workers)])

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        answer: list[str | int | float],
        **columns: Any,
    ) -> list[float | Exception]:
        """Grades N completions.

        Returns:
            N numbers, 1.0 or 0.0; an exception where the gold cannot be read or a worker was lost.
        """
        scores: list[float | Exception] = [0.0] * len(completions)
        asked: dict[tuple[str, str], Any] = {}
        parts: dict[int, list[tuple[str, str]]] = {}
        for row, (text, gold) in enumerate(zip(completions, answer, strict=True)):
            if not isinstance(gold, str) or stated_value(gold) is not None:
                scores[row] = float(grade_math_answer(text, gold))
                continue
            expression = stated_expression(text)
            if expression is not None:
                parts[row] = [(side, gold) for side in _sides(expression, gold)]
                asked |= dict.fromkeys(parts[row])
        if asked:
            asked = dict(zip(asked, self._pool.map(_ask, list(asked)), strict=True))
        for row, pairs in parts.items():
            values = [asked[pair] for pair in pairs]
            if _UNREADABLE_GOLD in values:
                scores[row] = ValueError(f"cannot read the answer {answer[row]!r}")
            else:  # 0 for what took too long or was too much
                lost = (value for value in values if isinstance(value, WorkerLost))
                scores[row] = next(lost, float(all(value == 1.0 for value in values)))
        return scores

    @staticmethod
    def check_row(*, answer: object) -> str | None:
        """What keeps every answer from being right with a gold, or None; without math-verify.

        A gold of words alone is refused. One of words and more may hold a unit, a list or a product
        of variables; what math-verify cannot read of these fails when it is asked.
        """
        fault = math_gold_fault(answer=answer)
        if fault is None or not isinstance(answer, str) or is_worked_answer(answer):
            return fault
        text = _TEXT_COMMAND.sub(" ", answer)
        words = [word for word in _WORD.findall(text) if word not in ("or", "and")]
        has_more = re.search(r"[^\W_]|[\\∞∅+*/=^_<>|]", _WORD.sub(" ", text))
        if has_more or (words and all(word in _FUNCTIONS for word in words)):
            return None
        return f"answer={shortened(repr(answer))} is no number and no expression"

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        self._pool.close()


def _ask(worker: FunctionWorker, pair: tuple[str, str]) -> Any:
    try:
        return worker(given=pair[0], gold=pair[1])
    except (RuntimeError, TimeoutError) as error:
        return error


def _sides(expression: str, gold: str) -> list[str]:
    """What must equal a gold: of a chain of equations all sides but a name before the first "=".

    With a gold that is an equation itself, or where a comma parts the answer: all of it. An
    equation in brackets equals nothing.
    """
    sides, start, depth, braces = [], 0, 0, 0
    for found in _MARK.finditer(expression):
        mark = found.group()
        depth += (mark[-1] in "([{") - (mark[-1] in ")]}")
        braces += (mark == "{") - (mark == "}")
        if any(equals in gold for equals in _EQUALS) or (mark == "," and depth == 0):
            return [expression]
        if mark in _EQUALS and depth > braces:
            return [""]
        if mark in _EQUALS and depth == 0:
            sides.append(expression[start : found.start()].strip())
            start = found.end()
    named = bool(sides) and _NAME.fullmatch(sides[0]) is not None
    return [*sides, expression[start:].strip()][named:]


def stated_expression(text: str) -> str | None:
    """A text's located answer as LaTeX without delimiters, or None unless it is one expression."""
    blocks = located_answers(text)
    if len(blocks) != 1:
        return None
    (block,) = blocks
    block = block.strip().removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if block.startswith(opening) and block.endswith(closing) and len(block) > len(opening):
            block = block[len(opening) : -len(closing)].strip()
            break
    if not block or len(block) > LONGEST_ANSWER or not block.isprintable():
        return None
    if "$" in block or "\\approx" in block or "\\sim" in block:
        return None
    words = _WORD.findall(_COMMAND.sub(" ", block))
    return block if all(word in _FUNCTIONS for word in words) else None
