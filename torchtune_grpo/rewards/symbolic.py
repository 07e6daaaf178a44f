"""Correctness of answers beyond one number: fractions with roots, intervals, polynomials, sets."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.foreign import expression_comparer
from torchtune_grpo.rewards.math import (
    grade_math_answer,
    located_answers,
    math_gold_fault,
    stated_answer,
    stated_value,
    without_overlines,
)
from torchtune_grpo.rewards.workers import FunctionWorker, WorkerLost, function_pool

_NUMERAL = re.compile(r"\(?0*([0-9][0-9A-Z]*)\)?_(?:([0-9]+)|\{([0-9]+)\})")  # 4210_7, 4210_{7}
_INDEXED = re.compile(r"(?<![A-Za-z_{^0-9])[0-9][0-9A-Z]*\)?_")  # a number with a base
_COMMAND = re.compile(r"\\(?:(?:begin|end)\{[a-z]+\}|[A-Za-z]+)")
_TEXT_COMMAND = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)(?![A-Za-z])")
_UNIT = re.compile(  # \text{ cm}^2 at the end; not \text{ million}, nor any other word
    r"(?:\\[ ,;:!]|[~\s])*\\(?:text(?:rm)?|mbox|mathrm)\s*\{[~\s]*"
    r"((?:(?:square|cubic|sq\.?|cu\.?) )?(?:[cdkm]?m|[km]?g|m?L|in|ft|yd|s|h|inch(?:es)?|foot|feet"
    r"|yards?|miles?|(?:centi|kilo|milli)?met(?:er|re)s?|units?|degrees?|radians?|dollars?|cents?"
    r"|hours?|minutes?|seconds?))\.?\s*\}(?:\^\{?([23])\}?)?\Z"
)
_LETTER = re.compile(r"\\(?:text(?:rm)?|mbox|mathrm)\s*\{\s*([A-Za-z])\s*\}")  # \mathrm{e}
_DELIMITED = re.compile(r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{(.+)\}", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]{2,}")
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_EQUALS = re.compile(r"\\equiv(?![a-z])|(?<![<>!:])=(?![^{}]*(?<!\\)\})")  # not as in \sum_{i=1}
_NAME = re.compile(  # x, x_1, f(x), (x, y), or nothing
    r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?(?: ?\([a-z](?:, ?[a-z])*\))?"
    r"|\([a-z](?:, ?[a-z])+\)|"
)
# Words that are mathematics; any other word makes an answer prose ("x or y").
_FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp".split())
_FUNCTIONS |= set("sqrt pi min max gcd lcm mod infty frac".split())
_LONGEST = 400  # characters in an answer; a longer one is meant to keep sympy busy
_MOST_DIGITS = 4300  # of a whole number; Python prints no longer ones
_NUMBERS = re.compile(r"[({](?:[-+* \d]*? )?(\d+)(?: *[-+] *\d{1,3})? *[)}]")  # (5 * 99 + 1) is 99
_FACTORIAL = re.compile(r"(?<!\d)(\d+) *!|binom *(\d+)")  # counts as 4^n: above n! up to n = 8
_POWER = re.compile(r"(?<!\d)(\d*+) *+\^ *(\d+)")  # of any base, or the end of a sum


class SymbolicMathReward:
    """Reward for an answer equal to the gold as an expression: ``\\frac{\\sqrt2}{2}``, ``[0, 1)``.

    Where the gold states one number, this is ``math_correctness_reward``. Otherwise math-verify
    compares the located answer with the gold in worker processes; an answer that times out is not
    correct. Nor is a number too large to evaluate (e.g. ``9^{9^{9}}``) unless the gold has one too.
    A numeral with a base, ``4210_7``, equals only itself. Of a unit at the end, ``\\text{ cm}^2``,
    either side may say nothing.
    """

    __name__ = "symbolic_math_reward"
    reads = "text"
    decides = True
    isolates = True  # in processes of its own

    def __init__(self, *, timeout: float = 2.0, workers: int = 2) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("SymbolicMathReward needs: pip install 'math-verify<0.10'")
        self._pool = function_pool(expression_comparer, timeout=timeout, workers=workers)

    def __call__(
        self, prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any
    ) -> list[float | Exception]:
        """Return 1.0 or 0.0 for each, or an exception for an unreadable gold or a lost worker."""
        scores: list[float | Exception] = [0.0] * len(completions)
        asked: dict[int, tuple[tuple[str, ...], str]] = {}
        for row, (text, gold) in enumerate(zip(completions, answer, strict=True)):
            if not isinstance(gold, str) or stated_value(gold) is not None:
                scores[row] = float(grade_math_answer(text, gold))
            elif expression := stated_expression(text):
                gold, its_unit = _split_unit(without_overlines(gold.strip()))
                expression, unit = _split_unit(without_overlines(expression))
                if unit and its_unit and unit != its_unit:
                    continue
                sides = tuple(_sides(expression, gold))
                if _INDEXED.search(f"{expression} {gold}"):  # math-verify does not see the base
                    scores[row] = float({*map(_numeral, sides)} == {_numeral(gold) or "none"})
                elif not _explodes(expression) or _explodes(gold):
                    asked[row] = sides, gold
        chains = list(dict.fromkeys(asked.values()))
        equal = dict(zip(chains, self._pool.map(_equal, chains), strict=True))
        for row, chain in asked.items():
            scores[row] = equal[chain]
        return scores

    @staticmethod
    def check_row(*, answer: object) -> str | None:
        """Say why no answer can equal a gold (it is words alone), without asking math-verify."""
        fault = math_gold_fault(answer=answer)
        if fault is None or not isinstance(answer, str) or "#### " in answer:
            return fault
        text = _TEXT_COMMAND.sub(" ", answer)
        known = _WORD.sub(lambda word: word[0] if word[0] in _FUNCTIONS else " ", text)
        if _INDEXED.search(answer) and not _numeral(answer):
            return f"answer={shortened(repr(answer))} has a base within an expression"
        if re.search(r"[^\W_]|[\\∞∅+*/=^_<>|]", known):
            return None
        return f"answer={shortened(repr(answer))} is neither a number nor an expression"

    @staticmethod
    def answer_of(text: str) -> str | None:
        """Return the located answer, for votes among samples."""
        return stated_answer(text) or stated_expression(text)

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        self._pool.close()


def _equal(worker: FunctionWorker, chain: tuple[tuple[str, ...], str]) -> float | Exception:
    sides, gold = chain
    try:
        verdicts = (worker(given=side, gold=gold) for side in sides)
        equal = next((verdict for verdict in verdicts if not verdict), True)  # asks no further side
    except WorkerLost as error:
        return error
    except (RuntimeError, TimeoutError):  # it took too much memory or time
        return 0.0
    return ValueError(f"cannot read the answer {gold!r}") if equal is None else float(equal)


def _split_unit(expression: str) -> tuple[str, tuple[str | None, ...]]:
    """Split off a known unit at the end. What else would be one to math-verify is a variable."""
    unit = _UNIT.search(expression)
    rest = expression[: unit.start()] if unit else expression
    return _LETTER.sub(r" \1 ", rest), unit.groups() if unit else ()


def _numeral(expression: str) -> str | None:
    """Return a numeral with its base, 4210_7 for 04210_{7}; None for any other expression."""
    found = _NUMERAL.fullmatch(expression.strip("$ "))
    return f"{found[1]}_{found[2] or found[3]}" if found else None


def _explodes(expression: str) -> bool:
    """Whether a power or factorial is too large for sympy, which evaluates it when it reads it."""
    text = re.sub(r"\\(?:left|right|cdot|times)|\\[,;:! ]|\s+", " ", expression)
    for _ in range(20):  # from the inside out; deeper nesting is left to the time limit
        text = _FACTORIAL.sub(r" (4^\1\2) ", _NUMBERS.sub(r" \1 ", text))
        if len(text) > _MOST_DIGITS:
            return True
        if any(len(base or "x") * int(top) > _MOST_DIGITS for base, top in _POWER.findall(text)):
            return True
        text = _POWER.sub(lambda p: f" {int(p[1]) ** int(p[2])} " if p[1] else p[0], text)
    return False


def _sides(expression: str, gold: str) -> list[str]:
    """Split a chain of equations into the sides that must equal the gold: all but a leading name.

    If the gold is an equation, or the answer a list with commas, the whole answer is compared.
    """
    if _EQUALS.search(gold) or "," in _BRACKETED.sub("", expression):
        return [expression]
    first, *others = (side.strip() for side in _EQUALS.split(expression))
    return others if others and _NAME.fullmatch(first) else [first, *others]


def stated_expression(text: str) -> str | None:
    """Return the located answer as LaTeX without delimiters; None unless it is one expression."""
    answers = located_answers(text)
    if len(answers) != 1:
        return None
    expression = answers.pop().strip().removesuffix(".").strip()
    for wrapper in (_DELIMITED, _BOXED):
        if wrapped := wrapper.fullmatch(expression):
            expression = next(filter(None, wrapped.groups())).strip()
    if not expression or len(expression) > _LONGEST or not expression.isprintable():
        return None
    if any(sign in expression for sign in ("$", "\\approx", "\\sim")):
        return None
    words = _WORD.findall(_COMMAND.sub(" ", _split_unit(expression)[0]))
    return expression if _FUNCTIONS.issuperset(words) else None
