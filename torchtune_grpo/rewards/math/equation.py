"""The left side of an equation, evaluated exactly: + - * / and brackets, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from torchtune_grpo.rewards.math.rational import Rational, read_decimal
from torchtune_grpo.rewards.math.tokens import Token
from torchtune_grpo.rewards.math.words import changes_number

VALUE_STARTS = frozenset(["number", "fraction", "currency", "+", "-", "("])
_OPERANDS = frozenset(["number", "fraction"])
_OPERATIONS: dict[type[ast.operator], Callable[[Rational, Rational], Rational | None]] = {
    ast.Add: Rational.plus,
    ast.Sub: lambda left, right: left.plus(right.negated()),
    ast.Mult: Rational.times,
    ast.Div: Rational.over,
}

# The cost of an evaluation is bounded by tokens * characters. Within this bound lie a sum of two
# numbers of 60,000 digits each and one of a hundred numbers of 100 digits each.
MAX_WORK = 2_000_000
_MAX_BRACKETS = 16  # far from what Python's own parser takes


def read_operand(token: Token) -> Rational | None:
    """The value of a number or fraction token, else None."""
    if token.kind == "number":
        return read_decimal(token.text)
    if token.kind != "fraction":
        return None
    numerator, denominator = map(read_decimal, token.text.split("/"))
    return numerator.over(denominator) if numerator and denominator else None


def evaluate(tokens: Sequence[Token]) -> Rational | None:
    """The exact value of ``tokens``, or None where they are no arithmetic or too much of it."""
    bare = _without_units(tokens)
    if len(bare) * sum(len(token.text) for token in bare) > MAX_WORK:
        return None
    # Python's grammar knows which operator binds tighter; it sees an "n" for each operand.
    text = "".join("n " if token.kind in _OPERANDS else token.kind for token in bare)
    if not set(text) <= set("n +-*/()") or text.count("(") > _MAX_BRACKETS:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return None
    operands = (read_operand(token) for token in bare if token.kind in _OPERANDS)
    return _value(tree.body, operands)


def _value(node: ast.expr, operands: Iterator[Rational | None]) -> Rational | None:
    """The value of an expression, whose names are the next ``operands`` from left to right."""
    if isinstance(node, ast.Name):
        return next(operands)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.UnaryOp):
        value = _value(node.operand, operands)
        return value.negated() if value and isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left, operands), _value(node.right, operands)
    if left is None or right is None:
        return None
    operation = _OPERATIONS.get(type(node.op))
    return operation(left, right) if operation else None


def _without_units(tokens: Sequence[Token]) -> list[Token]:
    """Operands and operators in one spelling, without currency signs and harmless unit words.

    A unit stands right behind its operand ("48 clips + 24 clips", "$15/phone + $5/phone"); any
    other word stays, and makes the arithmetic fail.
    """
    bare: list[Token] = []
    for index, token in enumerate(tokens):
        following = tokens[index + 1].kind if index + 1 < len(tokens) else ""
        if token.kind == "word" and bare and bare[-1].kind in ("number", "fraction", ")"):
            if token.text in ("x", "X") and following in VALUE_STARTS:
                bare.append(token._replace(kind="*"))
            elif changes_number(token.text):
                bare.append(token)
        elif token.kind == "–":
            bare.append(token._replace(kind="-"))
        elif token.kind != "currency" and not (token.kind == "/" and following == "word"):
            bare.append(token)
    return bare
