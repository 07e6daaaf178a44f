"""What number an answer's content states: the grammar of a stated number.

    content  := lead? (number | fraction | equation) tail?
    lead     := words, with "," ":" "=" between or behind them     "The answer is", "x ="
    number   := sign? currency? digits, or this in brackets        "-$1,234.50", "minus 7", "(7)"
    equation := arithmetic "=" (number | fraction)                 "6 * 2 = 12", and it must hold
    tail     := "%", a currency sign, a unit or further words      "km/h", "m²", "clips in May."

Whatever does not fit states no number. Nothing is executed, and nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torchtune_grpo.rewards.math._equation import VALUE_STARTS, evaluate, read_operand
from torchtune_grpo.rewards.math._rational import Rational
from torchtune_grpo.rewards.math._tokens import Token, tokenize, unwrap
from torchtune_grpo.rewards.math._words import lead_is_harmless, tail_is_harmless

_GLUED_CURRENCIES = frozenset(["USD", "EUR", "GBP", "INR", "CAD", "AUD", "JPY", "CNY", "Rs"])
_VALUES = frozenset(["number", "fraction", "currency"])
_ABBREVIATIONS = frozenset(["mr", "mrs", "ms", "dr", "st", "rs", "sq", "cu"])
_UNITS_WITH_POWER = frozenset(["mm", "cm", "dm", "m", "km", "in", "ft", "yd", "mi"])


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
    if value is None or not _tail_fits(right[width:], priced=priced):
        return None
    if equals is not None:
        left = evaluate(body[:equals])
        if left is None or not left.same_as(value):
            return None
    return value


def _signs(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with a sign for each word "minus" or "negative" right before a number."""
    signed = list(tokens)
    for index, (word, number) in enumerate(pairwise(tokens)):
        if word.text.lower() in ("minus", "negative") and number.kind in _VALUES:
            signed[index : index + 2] = [Token("-", "-", word.glued), number._replace(glued=True)]
    return signed


def _lead_fits(lead: Sequence[Token], first: Token) -> bool:
    """Whether ``lead`` is words that hand over to a number, whose first token is ``first``."""
    for index, token in enumerate(lead):
        before = lead[index - 1] if index else None
        after_word = before is not None and before.kind == "word"
        is_last = index == len(lead) - 1
        fits = {
            "word": True,
            ".": before is not None and before.text.lower() in _ABBREVIATIONS,
            "=": is_last and (after_word or index == 0),
            ":": after_word,
            ",": after_word and not (is_last and first.glued),
        }
        if not fits.get(token.kind, False):
            return False
    right_before = bool(lead) and lead[-1].kind in ("word", ".")
    if right_before and first.glued:  # US$12, USD12, but not x12 and x-12
        right_before = False
        if first.kind != "currency" and lead[-1].text not in _GLUED_CURRENCIES:
            return False
    words = [token.text for token in lead if token.kind == "word"]
    return lead_is_harmless(words, right_before=right_before)


def _number(tokens: Sequence[Token]) -> tuple[Rational | None, int, bool]:
    """Reads a signed, perhaps priced, number or fraction at the start of ``tokens``.

    Returns:
        The value or None, how many tokens it takes, and whether a currency sign stands before it.
    """
    failed = None, 0, False
    if tokens and tokens[0].kind == "(":
        value, width, priced = _number(tokens[1:])
        closed = [token.kind for token in tokens[width + 1 : width + 2]] == [")"]
        return (value, width + 2, priced) if closed else failed
    signs = currencies = ""
    position = 0
    while position < len(tokens) and tokens[position].kind in ("+", "-", "currency"):
        token = tokens[position]
        position += 1
        if token.kind == "currency":
            currencies += token.text
        elif position == len(tokens) or not tokens[position].glued:
            return failed  # a sign apart from its number may be a bullet or a dash
        else:
            signs += token.kind
    if position == len(tokens) or len(signs) > 1 or len(currencies.replace("\\", "")) > 1:
        return failed
    value = read_operand(tokens[position])
    following = [token.kind for token in tokens[position : position + 3]]
    position += 1
    if value and following == ["number", "/", "number"]:
        denominator = read_operand(tokens[position + 1])
        value = value.over(denominator) if denominator else None
        position += 2
    if value and signs == "-":
        value = value.negated()
    return value, position, bool(currencies)


def _tail_fits(tail: Sequence[Token], *, priced: bool) -> bool:
    """Whether ``tail`` is a unit or the rest of a sentence, with a final period at most."""
    kinds = [token.kind for token in tail]
    if kinds[-1:] == ["."] or kinds[-2:] == ["word", "!"]:  # "12!" is a factorial
        tail = tail[:-1]
    if tail and (tail[0].kind in ("%", "degree") or (tail[0].kind == "currency" and not priced)):
        tail = tail[1:]
    bracketed = False
    for index, token in enumerate(tail):
        if token.kind in ("(", ")"):
            if bracketed == (token.kind == "("):
                return False
            bracketed = not bracketed
        if not _fits_in_tail(token, tail[:index][-1:], tail[index + 1 :][:1]):
            return False
    words = [token.text for token in tail if token.kind == "word"]
    means_million = priced and words[:1] in (["m"], ["mm"], ["MM"])
    glued_article = words[:1] == ["a"] and tail[0].glued  # "12a"
    unit = [token.kind for token in tail[:2]] == ["word", "word"]
    if bracketed or means_million or glued_article:
        return False
    return tail_is_harmless(words, priced=priced, unit=unit)


def _fits_in_tail(token: Token, before: Sequence[Token], after: Sequence[Token]) -> bool:
    """Whether a token may stand between its neighbours, each of which may be missing."""
    word_before = before[0].text if before and before[0].kind == "word" else ""
    unit_before = bool(word_before) or (bool(before) and before[0].kind == "power")
    word_after = bool(after) and after[0].kind == "word"
    fits = {
        "word": True,
        "/": word_after and (unit_before or not before),  # km/h, and 12/hour
        ",": word_after and (unit_before or not before),
        "*": word_after and unit_before,  # N·m
        "(": word_after,
        ")": unit_before,
        "power": bool(word_before) and token.text in ("2", "3"),
        "number": token.glued and token.text in ("2", "3") and word_before in _UNITS_WITH_POWER,
        ".": word_before.lower() in _ABBREVIATIONS,
    }
    return fits.get(token.kind, False)
