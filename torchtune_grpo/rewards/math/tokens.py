"""An answer's content as a short list of tokens, with LaTeX and Markdown wrapping taken off.

Wrapping is only ever dropped between tokens. Tokens are never joined, so that taking wrapping off
cannot turn two numbers into one or hide a word.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Whoever states one number needs few tokens; the limit keeps all that follows short.
MAX_TOKENS = 200
_MAX_WORD = 40

# Latin letters with their accents, and the Greek ones that units are written with. Other scripts
# hold letters that look like Latin ones, and words that multiply (ten thousand in one letter).
_LETTER = "A-Za-zÀ-ÖØ-öø-ÿμΩ\u00b5\u2126"
_SPACE = "\t\n\v\f\r\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

_EXPONENT = "(?:[eE][-+]?[0-9]{1,2}(?![0-9]))?"

# No alternative can fail after a repetition, so scanning never goes back: linear time.
_TOKEN = re.compile(
    rf"""
      (?P<space>(?:[{_SPACE}]+|\\(?:[ ,;:!]|(?:q?quad|displaystyle)(?![A-Za-z]))
                |(?<=[0-9A-Za-z{{}}])~(?=[A-Za-z\\]))+)
    | (?P<number>[0-9]+(?:(?:,|\{{,\}}|,\\!)[0-9]+)*(?:\.[0-9]+)?{_EXPONENT}|\.[0-9]+{_EXPONENT})
    | (?P<word>[{_LETTER}]+(?:['’-][{_LETTER}]+)*(?:(?<=[sS])['’])?)
    | (?P<command>\\(?:[A-Za-z]+|[^A-Za-z]))
    | (?P<currency>[€£¥¢₩₪₫₭₮₱₴₦₹₺₽₿฿])
    | (?P<power>[²³]|\^(?:[0-9]{{1,2}}(?![0-9]|[.,][0-9])|\{{[0-9]{{1,2}}\}}))
    | (?P<degree>°|\^\\circ|\^\{{\\circ\}})
    | (?P<mark>\*\*|\$\$|[-−–+*×·⋅∗÷/=%(){{}}$.,:!])
    """,
    re.VERBOSE,
)

_SAME_MARK = {"−": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/"}
_COMMAND_MARK = {"\\%": "%", "\\times": "*", "\\cdot": "*", "\\div": "/"}
_SUPERSCRIPT = str.maketrans("²³", "23", "^{}")
_FRACTIONS = frozenset(["\\frac", "\\dfrac", "\\tfrac"])
_BRACED = frozenset(
    ["\\boxed", "\\fbox", "\\mbox", "\\text", "\\textbf", "\\textit", "\\textrm"]
    + ["\\mathrm", "\\mathbf", "\\mathit"]
)
_OPENING = {"\\(": "\\)", "\\[": "\\]"}


class Token(NamedTuple):
    """``kind`` is number, fraction, power, degree, word, currency, or the mark itself.

    ``glued`` says that no white space stands before it. A fraction's text is ``"a/b"`` or
    ``"-a/b"``, a power's its exponent.
    """

    kind: str
    text: str
    glued: bool


def tokenize(content: str) -> list[Token] | None:
    """Splits an answer's content.

    Returns:
        At most ``MAX_TOKENS`` tokens, or None where there are more or where the content holds
        something that no statement of a number holds (a "?", a quote, a control character, ...).
    """
    tokens: list[Token] = []
    position, glued = 0, True
    while position < len(content):
        match = _TOKEN.match(content, position)
        if match is None:
            return None
        position = match.end()
        kind, text = match.lastgroup or "", match.group()
        if kind == "space":
            glued = False
            continue
        if len(tokens) == MAX_TOKENS or (kind == "word" and len(text) > _MAX_WORD):
            return None
        if kind == "number":
            text = text.replace("{,}", ",").replace(",\\!", ",")
        elif kind == "power":
            text = text.translate(_SUPERSCRIPT)
        elif text == "\\$":
            kind = "currency"
        elif kind in ("command", "mark"):
            kind = text = _COMMAND_MARK.get(text, _SAME_MARK.get(text, text))
        tokens.append(Token(kind, text, glued))
        glued = True
    return tokens


def unwrap(tokens: list[Token], *, dollars_wrap: bool) -> list[Token] | None:
    """Drops balanced wrapping: boxes, text commands, maths delimiters, bold.

    Args:
        tokens (list[Token]): what ``tokenize`` returned.
        dollars_wrap (bool): whether ``$`` delimits maths; otherwise it is a currency sign.

    Returns:
        The tokens inside, or None where wrapping is unbalanced or empty.
    """
    inside: list[Token] = []
    awaited: list[tuple[str, int]] = []  # closing mark, len(inside) at the opening
    glued, position = True, 0
    while position < len(tokens):
        kind, text, token_glued = tokens[position]
        glued = glued and token_glued  # white space before dropped wrapping is still white space
        following = tokens[position + 1 : position + 7]
        position += 1
        if awaited and kind == awaited[-1][0]:
            if awaited.pop()[1] == len(inside):
                return None
        elif kind in _BRACED and following and following[0].kind == "{":
            awaited.append(("}", len(inside)))
            position += 1
        elif kind in _OPENING:
            awaited.append((_OPENING[kind], len(inside)))
        elif kind == "**" or (dollars_wrap and kind in ("$", "$$")):
            awaited.append((kind, len(inside)))
        else:
            if kind in _FRACTIONS and (fraction := _fraction(tokens[position : position + 8])):
                kind, (text, width) = "fraction", fraction
                position += width
            inside.append(Token("currency" if kind == "$" else kind, text, glued))
            glued = True
    return None if awaited else inside


def _fraction(following: list[Token]) -> tuple[str, int] | None:
    """What ``\\frac`` stands before: ``"a/b"``, and in how many tokens; None if no two numbers."""
    shape = "".join(token.kind[0] for token in following)
    numbers = [token.text for token in following if token.kind == "number"]
    if match := re.match(r"\{(-?)n\}\{(-?)n\}", shape):
        return f"{match[1]}{numbers[0]}/{match[2]}{numbers[1]}", match.end()
    if shape.startswith("n") and len(numbers[0]) == 2 and numbers[0].isdigit():
        return "/".join(numbers[0]), 1
    return None
