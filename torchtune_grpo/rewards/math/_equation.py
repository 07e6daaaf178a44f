"""The left side of an equation, evaluated exactly: + - * / and brackets, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_grpo.rewards.math._rational import Rational, read_decimal
from torchtune_grpo.rewards.math._tokens import Token
from torchtune_grpo.rewards.math._words import tail_is_harmless

VALUE_STARTS = frozenset(["number", "fraction", "currency", "+", "-", "("])

# The cost of an evaluation is bounded by tokens * characters. Within this bound lie a sum of two
# numbers of 60,000 digits each and one of a hundred numbers of 100 digits each.
MAX_WORK = 2_000_000
_MAX_DEPTH = 16  # of brackets, far from Python's own limit


def read_operand(token: Token) -> Rational | None:
    """The value of a number or fraction token, else None."""
    if token.kind == "number":
        return read_decimal(token.text)
    if token.kind != "fraction":
        return None
    numerator, denominator = map(_read_signed, token.text.split("/"))
    return numerator.over(denominator) if numerator and denominator else None


def _read_signed(text: str) -> Rational | None:
    value = read_decimal(text.removeprefix("-"))
    return value.negated() if value and text.startswith("-") else value


def evaluate(tokens: Sequence[Token]) -> Rational | None:
    """The exact value of ``tokens``, or None where they are no arithmetic or too much of it."""
    bare = _without_units(tokens)
    if len(bare) * sum(len(token.text) for token in bare) > MAX_WORK:
        return None
    descent = _Descent(bare)
    value = descent.sum()
    return value if descent.finished() else None


def _without_units(tokens: Sequence[Token]) -> list[Token]:
    """Operands and operators in one spelling, without currency signs and harmless unit words.

    A unit stands right behind its operand ("48 clips + 24 clips", "$15/phone + $5/phone"); any
    other word stays, and makes the arithmetic fail.
    """
    bare: list[Token] = []
    for index, token in enumerate(tokens):
        following = tokens[index + 1].kind if index + 1 < len(tokens) else ""
        has_value = bool(bare) and bare[-1].kind in ("number", "fraction", ")")
        if token.kind == "word" and has_value:
            if token.text in ("x", "X") and following in VALUE_STARTS:
                bare.append(token._replace(kind="*"))
            elif not tail_is_harmless([token.text]):
                bare.append(token)
        elif token.kind == "–":
            bare.append(token._replace(kind="-"))
        elif token.kind != "currency" and not (token.kind == "/" and following == "word"):
            bare.append(token)
    return bare


class _Descent:
    """Recursive descent. Each method reads what it is named after, and gives None if it cannot."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def finished(self) -> bool:
        return self._position == len(self._tokens)

    def sum(self) -> Rational | None:
        value = self._product()
        while value and (operator := self._take("+", "-")):
            other = self._product()
            if other is None:
                return None
            value = value.plus(other.negated() if operator == "-" else other)
        return value

    def _product(self) -> Rational | None:
        value = self._factor()
        while value and (operator := self._take("*", "/")):
            other = self._factor()
            if other is None:
                return None
            value = value.over(other) if operator == "/" else value.times(other)
        return value

    def _factor(self) -> Rational | None:
        negative = self._take("+", "-") == "-"
        if self._take("("):
            self._depth += 1
            value = self.sum() if self._depth <= _MAX_DEPTH else None
            self._depth -= 1
            if not self._take(")"):
                return None
        elif self._take("number", "fraction"):
            value = read_operand(self._tokens[self._position - 1])
        else:
            return None
        return value.negated() if value and negative else value

    def _take(self, *kinds: str) -> str:
        """Consumes the next token if it is one of ``kinds``, and returns its kind."""
        if self.finished() or self._tokens[self._position].kind not in kinds:
            return ""
        self._position += 1
        return self._tokens[self._position - 1].kind
