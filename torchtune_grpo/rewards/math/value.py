"""What number an answer's content states: the grammar of a stated number.

    content  := lead? (number | fraction | equation) tail?
    lead     := words, with "," ":" "=" between or behind them     "The answer is", "x ="
    number   := sign? currency? digits, or this in brackets        "-$1,234.50", "minus 7", "(7)"
    equation := arithmetic "=" (number | fraction)                 "6 * 2 = 12", and it must hold
    tail     := "%", a currency sign, a unit or further words      "km/h", "m²", "clips in May."

Whatever does not fit states no number. Nothing is executed, and nothing is approximated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from torchtune_grpo.rewards.math.equation import VALUE_STARTS, evaluate, read_operand
from torchtune_grpo.rewards.math.rational import Rational
from torchtune_grpo.rewards.math.tokens import Token, tokenize, unwrap
from torchtune_grpo.rewards.math.words import lead_is_harmless, tail_is_harmless

_GLUED_CURRENCIES = frozenset(["USD", "EUR", "GBP", "INR", "CAD", "AUD", "JPY", "CNY", "Rs"])
_LETTERS = {"number": "n", "fraction": "f", "currency": "c", "degree": "°"}
_SAID = frozenset(["word", "/", "*"])  # "per" is said for the marks
_VALUES = frozenset(["number", "fraction", "currency"])
_ABBREVIATIONS = frozenset(["mr", "mrs", "ms", "dr", "st", "rs", "sq", "cu"])
_UNITS_WITH_POWER = frozenset(["mm", "cm", "dm", "m", "km", "in", "ft", "yd", "mi"])

# Parts of a statement, a letter per token as ``_letter`` writes them. A sign apart from its number
# may be a bullet or a dash.
_NUMBER = re.compile(
    r"(?P<opened>\(?) ?(?P<signs>(?:[+-](?:c ?)?|c ?[+-]?)?)[n2f](?P<divided>(?<!f) ?/ ?[n2])?"
    r" ?(?P<closed>\)?)"
)
_LEAD = re.compile(r"(?:(?:w|u|a\.?)[,:]?)*(?:(?<![,:.])=)?")
_UNIT = r"(?:(?:w|a\.?|u2?)p?)"
_UNITS = rf"{_UNIT}(?:[,/*]?{_UNIT})*"  # km/h, N·m
_TAIL = re.compile(rf"[%c°]?(?:[,/]?{_UNITS})?(?:\({_UNITS}\)(?:{_UNITS})?)*(?:\.|(?<=[wau])!)?")


def stated_value(content: str) -> Rational | None:
    """The one number that ``content`` states, or None where it states none, several or a doubt."""
    tokens = tokenize(content)
    if tokens is None:
        return None
    for dollars_wrap in (False, True):
        inside = unwrap(tokens, dollars_wrap=dollars_wrap)
        value = _statement(inside) if inside else None
        if value is not None:
            return value
    return None


def _statement(tokens: Sequence[Token]) -> Rational | None:
    tokens = _signs(tokens)
    start = next((i for i, token in enumerate(tokens) if token.kind in VALUE_STARTS), None)
    if start is None or not _lead_fits(tokens[:start], tokens[start]):
        return None
    body = tokens[start:]
    equals = next((i for i, token in enumerate(body) if token.kind == "="), None)
    right = body if equals is None else body[equals + 1 :]
    value, width, priced = _number(right)
    if value is None or not _tail_fits(value, right[width:], priced=priced):
        return None
    left = value if equals is None else evaluate(body[:equals])
    return value if left and left.same_as(value) else None


def _signs(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with a sign for each word "minus" or "negative" right before a number."""
    signed = list(tokens)
    for index, (word, number) in enumerate(pairwise(tokens)):
        if word.text.lower() in ("minus", "negative") and number.kind in _VALUES:
            signed[index : index + 2] = [Token("-", "-", word.glued), number._replace(glued=True)]
    return signed


def _lead_fits(lead: Sequence[Token], first: Token) -> bool:
    """Whether ``lead`` is words that hand over to a number, whose first token is ``first``."""
    if not _LEAD.fullmatch("".join(map(_letter, lead))):
        return False
    mark = lead[-1].kind if lead and lead[-1].kind in (",", ":", "=") else ""
    if first.glued and lead and mark in ("", ","):  # US$12, USD12, but not x12 and x-12
        if mark or not (first.kind == "currency" or lead[-1].text in _GLUED_CURRENCIES):
            return False
    return lead_is_harmless([token.text for token in lead if token.kind == "word"], mark)


def _number(tokens: Sequence[Token]) -> tuple[Rational | None, int, bool]:
    """Reads a signed, perhaps priced, number or fraction at the start of ``tokens``.

    Returns:
        The value or None, how many tokens it takes, and whether a currency sign stands before it.
    """
    spaced = ((" " * (not token.glued) + _letter(token)) for token in tokens[:9])
    match = _NUMBER.match("".join(spaced).lstrip())
    if match is None or bool(match["opened"]) != bool(match["closed"]):
        return None, 0, False
    start = len(match["opened"] + match["signs"].replace(" ", ""))
    value = read_operand(tokens[start])
    if match["divided"] and value:
        denominator = read_operand(tokens[start + 2])
        value = value.over(denominator) if denominator else None
    if value and "-" in match["signs"]:
        value = value.negated()
    return value, len(match.group().replace(" ", "")), "c" in match["signs"]


def _tail_fits(value: Rational, tail: Sequence[Token], *, priced: bool) -> bool:
    """Whether ``tail`` is a unit or the rest of a sentence, with a final period at most."""
    shape = "".join(map(_letter, tail))
    if not _TAIL.fullmatch(shape) or (priced and shape[:1] == "c"):
        return False
    if [token.text for token in tail[:1]] == ["a"] and tail[0].glued:  # "12a"
        return False
    words = [token.text if token.kind == "word" else "per" for token in tail if token.kind in _SAID]
    small = value.numerator.copy_abs() <= value.denominator.copy_abs()
    has_unit = priced or shape[:1] in ("%", "c")
    return tail_is_harmless(words, has_unit=has_unit, apposed=shape[:1] in (",", "("), small=small)


def _letter(token: Token) -> str:
    """A word (w), an abbreviation (a), a unit with powers (u), its power (p), a number (n), ..."""
    if token.kind == "word":
        if token.text in _UNITS_WITH_POWER:
            return "u"
        return "a" if token.text.lower() in _ABBREVIATIONS else "w"
    if token.kind in ("power", "number") and token.text in ("2", "3"):
        return "p" if token.kind == "power" else "2" if token.glued else "n"
    kind = _LETTERS.get(token.kind, token.kind)
    return kind if len(kind) == 1 else "?"
