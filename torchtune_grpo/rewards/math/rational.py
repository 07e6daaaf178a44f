"""Exact rational numbers of any length, read from decimal text.

Python's ``int`` reads text in quadratic time and refuses more than 4,300 digits; ``decimal`` reads
in linear time and multiplies fast at any length. A rational is therefore kept as two decimals, and
nothing is ever divided, so nothing is ever rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation

_ONE = Decimal(1)


def _exact() -> Context:
    """A context that rounds nothing. Made per use, because threads must not share its flags."""
    return Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact, InvalidOperation])


@dataclass(frozen=True, eq=False)
class Rational:
    """``numerator / denominator``, unreduced; the denominator is not 0."""

    numerator: Decimal
    denominator: Decimal = _ONE

    def same_as(self, other: Rational) -> bool:
        """Whether both are the same rational number (1/2, 0.5 and 2/4 are)."""
        if self.denominator == other.denominator:
            return self.numerator == other.numerator
        multiply = _exact().multiply
        left = multiply(self.numerator, other.denominator)
        return left == multiply(other.numerator, self.denominator)

    def negated(self) -> Rational:
        return Rational(self.numerator.copy_negate(), self.denominator)

    def plus(self, other: Rational) -> Rational:
        exact = _exact()
        if self.denominator == other.denominator:
            return Rational(exact.add(self.numerator, other.numerator), self.denominator)
        left = exact.multiply(self.numerator, other.denominator)
        right = exact.multiply(other.numerator, self.denominator)
        denominator = exact.multiply(self.denominator, other.denominator)
        return Rational(exact.add(left, right), denominator)

    def times(self, other: Rational) -> Rational:
        multiply = _exact().multiply
        numerator = multiply(self.numerator, other.numerator)
        return Rational(numerator, multiply(self.denominator, other.denominator))

    def over(self, other: Rational) -> Rational | None:
        """The quotient, or None where ``other`` is 0."""
        if not other.numerator:
            return None
        return self.times(Rational(other.denominator, other.numerator))


def read_decimal(text: str) -> Rational | None:
    """Reads ASCII digits with optional minus, fraction part, comma groups and exponent.

    Args:
        text (str): such as ``"1,234.50"``, ``"-.5"`` or ``"7.2e1"``; nothing else.

    Returns:
        The number, or None where the commas do not part groups of exactly three digits.
    """
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    first, *groups = whole.removeprefix("-").split(",")
    if groups:
        # "0,123" is how half of the world writes 0.123, and no way to write 123.
        if not 1 <= len(first) <= 3 or first[0] == "0" or any(len(g) != 3 for g in groups):
            return None
        whole = whole.replace(",", "")
    return Rational(Decimal(f"{whole or '0'}.{fraction}e{exponent or '0'}"))
