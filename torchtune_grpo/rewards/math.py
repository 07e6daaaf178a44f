"""Rewards for maths problems whose answer is one number.

An answer is located in a text (prefill and completion), and is right if it holds exactly one number
and that equals the gold. Grading any text takes linear time, executes nothing and raises nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TypeVar
from unicodedata import category

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.reward import declares

T = TypeVar("T")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORM = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>", re.DOTALL)
_BLOCK = re.compile("<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}")
_CLOSED = r"""["*_]*:(?:[*_]+(?=\s)|\*\*)?"""  # a colon in bold, or before its end
_MARK = re.compile(
    # A heading above the last line, and marks before the answer
    r"(?i)(?m:^)[#*_ ]*(?:final )?answer[*_ ]*(?=\n\s*+.++\s*+\Z)|####"
    r"|\b(?:the (?:final )?answer|correct (?:answer|option|choice))"
    rf"(?: to (?:the|this) (?:question|problem))? is\b(?:{_CLOSED})?|\banswer{_CLOSED}"
)
_DISPLAYED = re.compile(r"(?:\\\[|\$\$)\n(.*)")  # a formula on the next line
_ANY_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"
    r"(?:[0-9](?:[0-9,]|(?:\{,\}|(?<=,)\\! ?|\\,)(?=[0-9]{3}(?![0-9])))*(?:\.[0-9]+)?|\.[0-9]+)"
)

LONGEST = 1_000  # characters of an answer; a longer one is not read
_MOST_WORDS = 12  # of a line without a mark; a longer one is an unfinished thought
_MOST_ANSWERS = 20  # different blocks or boxes in a text; with more it is not correct
_LONGEST_SIDE = 100  # characters of one side of an equation, counting a number as one

# An answer is rewritten until only numbers, signs, brackets, and w for words are left; then its
# shape is read, with n for each number. "**Total:** \frac12 kg/day" becomes "Total: (1/2) kg/day"
# by _MARKUP, "w: (1/2) w w" by _WORDS, and "w (n/n) w" by _SHAPE. What else is left is no number.
_LATIN = "A-Za-zÀ-ÖØ-öø-\u024f\u1e00-\u1effμΩ\u00b5\u2126"
# A word is of one script: in "nоt", the "о" is Cyrillic. Those of CJK touch their numbers.
_SCRIPTS = (_LATIN, "ΆΈ-ώ", "Ѐ-ӿ", "א-ת", "ء-يٱ-ۓ", "\u0900-\u0963", "\u0e01-\u0e4e")
_LETTER = "".join(_SCRIPTS)
_UNIT = "mgshlLtVWANJCFΩгмлч"  # units of one letter
_UNKNOWN = rf"(?![{_UNIT}w])[{_LATIN}]\b"  # but w stands for a word
_WORD = "|".join(f"[{script}]++" for script in _SCRIPTS)
_CJK = "ぁ-ゖァ-ヺー\u3400-\u9fff가-힣"
_CJK_DIGIT = "一二三四五六七八九十百千万萬亿億兆半口ロー丨丶丿"  # and what looks like one
_CHARACTERS = (
    str.maketrans("−–×·⋅∗÷。、￥", "--****/.,¥")
    | {wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}  # full width
    | dict.fromkeys(map(ord, "°℃✅\u200b\u200c\u200d\u2060\ufeff"), " ")  # and zero width
)
_REPEATING = re.compile(
    r"(?<![\w.,])([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?(?:\{([0-9]+)\}|([0-9]))"
)
_TEN = r"10\^(?:\{(-?[0-9]{1,2})\}|(-?[0-9]))(?![\w{])"  # a power of ten
_STYLE = "[fm]?box(?:ed)?|text[a-z]*|math(?:rm|bf|it)|boldsymbol|underline"
_SIGN = rf"(?<![{_LATIN}])([-+]?)"
_MARKUP = [
    (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    # 3 * 10^{8} is 3e8, but not behind a stroke, and 10^6 is 1e6.
    (r"(?<![\w.,^/])(?<!/\s)(?<!\s\s)([0-9][0-9.,]*) ?[*xX] ?" + _TEN, r"\1e\2\3"),
    (r"(?<![\w.,^])" + _TEN, r"1e\1\2"),
    (r"\\(?=[%$])", ""),
    (r"(?<=[0-9])(?:\{,\}|,\\! ?|\\,|[\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),  # 1\,234 1{,}234
    (  # \frac12, \frac{27}5, \frac1{ 72 }
        r"(\\[dt]?frac) ?(?:\{ *(-?[0-9]+) *\}|([0-9])) ?(?:\{ *(-?[0-9]+) *\}|([0-9])(?![0-9]))",
        r"\1{\2\3}{\4\5}",
    ),
    (r"(?<=[0-9])\s?\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r" \1/\2"),  # 2\frac{1}{2}
    (r"(?<![\w.,/])([0-9]+)\s([0-9]+/[0-9]+)(?![\w/]|[.,][0-9])", r"(\1+\2)"),  # 2 1/2
    (r"\\[dt]?frac\{(-?[0-9.,]+)\}\{(-?[0-9.,]+)\}", r"(\1/\2)"),  # \frac{1}{2}
    (r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"((\1)/(\2))"),  # \frac{3 + 4}{2}
    (r"\\[ ,;:!]|\\(?:q?quad|displaystyle)(?![A-Za-z])|(?<=[0-9{}])~(?=[A-Za-z\\])", " "),
    (r"\^(?:\\circ(?![A-Za-z])|\{\\circ\})", " "),
    (rf"([{_LETTER}]{{2}}\}}?|[ 0-9{{/*][ms]\}}?)(?:\^[23]\b|\^\{{[23]\}}|[²³])", r"\1"),  # km^2
    (r"([a-z 0-9]m|ft)[23]\b", r"\1"),  # cm3
    # Nested up to three and two deep; the sign moves in: -\boxed{\text{12}}, **`12`**
    *[(rf"{_SIGN}\\(?:{_STYLE})\s*\{{([^{{}}]+)\}}", r" \1\2 ")] * 3,
    *[(_SIGN + r"(?:\*\*([^*]+)\*\*|`([^`]+)`)", r" \1\2\3 ")] * 2,
    (_SIGN + r'["“„«「]([^"“”„«»「」]+)["”“»」]', r" \1\2 "),
    (_SIGN + r"(?:\\\((.+?)\\\)|\\\[((?s:.+?))\\\])", r" \1\2\3 "),
]
_WORDS = [
    # Currency: -$5 is -5. But $5m, 5k, 5 k and 5 x are other numbers.
    (r"([-+]?)(?:(?:[$€£¥¢₩₪₫₭₮₱₴₦₹₺₽₿฿]|\bUSD(?=[0-9]))(?! ?[0-9.,]+ ?[mb]\b))+ ?", r" \1"),
    (rf"(?<=[0-9])\s+(?=[^\W\d_aI{_UNIT}]\b(?!['’.]\w))", ""),
    (  # Nor is (5/6)x 5/6, but (3) x 4 is a product.
        rf"(?<=[0-9)]\))(?:(?=[aI]\b)|\s*(?=(?![aI{_UNIT}])[{_LETTER}]\b(?!['’.]\w)))"
        r"(?![xX] *[-(]? *[0-9.])",
        "_",
    ),
    (r"(?:\b(?i:minus|negative)\s+|[负負])(?=[0-9.(])", "-"),
    (rf"(?:(?<![0-9])|(?![{_CJK_DIGIT}]))[{_CJK}]+(?:(?![0-9])|(?<![{_CJK_DIGIT}]))", " w "),
    (rf"(?<![{_LETTER}])[xX](?= *[-(]? *[0-9.])", "*"),  # 6 x 2
    # Units that touch their number, but not 5e, 5th, 5x, 5OO.
    (rf"(?<=[0-9])(?!(?:st|nd|rd|th)\b|[OОЗοΟ])([{_UNIT}]|[{_LETTER}]{{2,}})(?!\w)", r" \1"),
    (rf"(?<=[{_LETTER}])[*/](?=[{_LETTER}])|/ *(?=[{_LETTER}])(?!{_UNKNOWN})", " "),  # km/h
    (rf"(?<![{_LETTER}0-9])(?:{_WORD})(?:['’-](?:{_WORD}))*['’]?(?![{_LETTER}0-9])", "w"),
    (r"\s+", " "),
]
_NUMBER = (
    r"(?<![\w.,])(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3})?(?!\w|[.,:][0-9])"
)
_SHAPE = [
    (_NUMBER, "n"),
    # Punctuation behind words and at the end
    (r"(?<=[w)])(?:[.,;](?!n)| ?:(?!=))|(?<=w)!(?!=)|[.,;](?= w)|(?<=[nw] )—(?= w)|\.(?= ?$)", " "),
    (r"\( ?w[w ]*\)", " w"),  # (in all)
    (r" +", " "),
    (r"(?<=\() | (?=\))", ""),
    (r"w[w ]*w", "w"),
]
_VALUE = re.compile(r"(?:w )?([-+]?(?:\([-+]?n(?: ?/ ?-?n)?\)|\(n\+n/n\)|n(?: ?/ ?n)?)) ?%? ?w?")


def math_format_holds(text: str) -> bool:
    """Whether a text is one think block, white space, and one answer block, neither of them blank.

    Each of the four tags occurs once; white space around the text does not count.
    """
    form = _FORM.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in TAGS) else None
    # White space, control and format characters, and lone accents show nothing.
    blocks = form.groups() if form else [""]
    return all(any(category(c)[0] not in "ZCM" for c in block) for block in blocks)


def located_answers(text: str, *, strict: bool = False, one_line: bool = True) -> set[str]:
    """Find the answers that a text states after its thinking; several must agree.

    These are the answer blocks; without an answer tag, each ``\\boxed{}``; else the line behind the
    last ``####``, "the (final) answer is" or "Answer:" that is not blank, or a last line below a
    heading "Answer"; else the text itself, if it is one line of at most twelve words. ``strict``:
    blocks only; without ``one_line`` it is all that follows a mark.
    """
    tail = text.rpartition("</think>")[2]
    if strict or "<answer>" in tail or "</answer>" in tail:
        # Up to the last closing tag, each opening tag has its own, so that no search is in vain.
        closed = tail[: tail.rfind("</answer>") + len("</answer>")]
        if "<think>" in closed.partition("<answer>")[0]:
            return set()
        return {block.strip(" \n") for block in _BLOCK.findall(closed)}
    if "<think>" in tail:
        return set()
    if boxes := _BOX.findall(tail):
        return {re.sub(r"\A\{([^{}]+)\}\Z", r"\1", box) for box in boxes}
    whole, *marked = map(str.strip, _MARK.split(tail))
    if not marked and ("\n" in whole or len(whole.split()) > _MOST_WORDS):
        return set()
    for part in filter(None, reversed(marked or [whole])):
        if not one_line:
            return {part}
        displayed = _DISPLAYED.match(part)
        line = displayed[1] if displayed else part.partition("\n")[0].strip()
        return {line if line.count("**") % 2 == 0 else line.replace("**", " ").strip()}
    return set()


def stated_value(content: str) -> Fraction | None:
    """Read the one number that an answer holds, or the last side of a true equation, else None.

    It may have a sign, a currency, groups of three digits, decimals, an exponent, ``%`` and a unit,
    be a fraction or a mixed number, and be wrapped in Markdown or LaTeX.
    """
    if len(content) > LONGEST:
        return None
    content = without_overlines(content.translate(_CHARACTERS))
    content = _rewritten(content, _MARKUP + _WORDS)
    try:
        numbers = [Fraction(number.replace(",", "")) for number in re.findall(_NUMBER, content)]
        return _last_side(_rewritten(content, _SHAPE), iter(numbers))
    except (ArithmeticError, LookupError, SyntaxError, ValueError):
        return None


def without_overlines(text: str) -> str:
    """Write repeating decimals as fractions: 0.1\\overline{6} as \\frac{15}{90}."""

    def fraction(match: re.Match[str]) -> str:
        whole, start, period, digit = match.groups(default="")
        nines = f"{'9' * len(period + digit)}{'0' * len(start)}"
        return (
            rf"\frac{{{int(whole + start + period + digit) - int(f'0{whole}{start}')}}}{{{nines}}}"
        )

    return _REPEATING.sub(fraction, text)


def _rewritten(text: str, rules: list[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _last_side(shape: str, numbers: Iterator[Fraction]) -> Fraction | None:
    """Evaluate the last side of an equation if all sides are equal, else return None."""
    *sides, last = (side.strip() for side in shape.split("="))
    stated = _VALUE.fullmatch(last)
    if stated is None or "w(" in shape:  # f(12) is not 12
        return None
    if sides and sides[0] in ("", "w"):  # x = 12
        del sides[0]
    # A word right behind a number is its unit, and one before all numbers says nothing.
    sides = [re.sub(r"(?<=[n)]) ?w|^w (?=-?[n(])", "", side) for side in sides]
    values = [_evaluate(side, numbers) for side in [*sides, stated[1]]]
    return values[-1] if len(set(values)) == 1 else None


def _evaluate(side: str, numbers: Iterator[Fraction]) -> Fraction:
    """Evaluate one side exactly: + - * / and brackets, and nothing else."""
    if len(side) > _LONGEST_SIDE:
        raise SyntaxError
    # Not by ast.parse: in Python 3.11 it may raise SystemError when called in several threads.
    tokens = [*re.sub(r"(?<=[n)])\(", "*(", f"({side})".replace(" ", ""))][::-1]  # 2(3 + 4)

    def operand() -> Fraction:
        match tokens.pop():
            case "n":
                return next(numbers)
            case "+":
                return operand()
            case "-":
                return -operand()
            case "(":
                total = product()
                while tokens[-1] in "+-":  # the sign of the next product
                    total += product()
                if tokens.pop() == ")":
                    return total
        raise SyntaxError

    def product() -> Fraction:
        value = operand()
        while tokens[-1] in "*/":
            value = value * operand() if tokens.pop() == "*" else value / operand()
        return value

    value = operand()
    if tokens:
        raise SyntaxError
    return value


def agreed(
    text: str,
    read: Callable[[str], T | None],
    *,
    strict: bool = False,
    read_bare: Callable[[str], T | None] | None = None,
) -> T | None:
    """Return what all located answers of a text state according to ``read``, else None.

    ``read_bare``, if given, reads the answer where it is the text itself, without a mark.
    """
    answers = located_answers(text, strict=strict)
    if read_bare is not None and answers == {text.rpartition("</think>")[2].strip()}:
        read = read_bare
    if not 0 < len(answers) <= _MOST_ANSWERS or max(map(len, answers)) > LONGEST:
        return None
    values = map(read, answers)  # one after another, until one differs
    first = next(values)
    return first if all(value == first for value in values) else None


def located_value(text: str, *, strict: bool = False) -> Fraction | None:
    """Return the number that all located answers of a text state, else None."""
    return agreed(text, stated_value, strict=strict)


def stated_answer(text: str) -> str | None:
    """Return the located number, spelled the same for equal values, for votes among samples."""
    value = located_value(text)
    return None if value is None else str(value)


def grade_math_answer(text: str, gold: str | int | float, *, strict: bool = False) -> bool:
    """Whether the located answer of a text, prefill included, is the gold."""
    expected = _gold_value(gold)
    return expected is not None and expected == located_value(text, strict=strict)


def _gold_value(gold: object) -> Fraction | None:
    """Return a gold's value, or None if it states none; a float counts as it prints."""
    if isinstance(gold, bool) or not isinstance(gold, (str, int, float)):
        raise ValueError(f"answer={shortened(repr(gold))} is neither text nor a number")
    return stated_value(str(gold))


def math_gold_fault(*, answer: object) -> str | None:
    """Say why no answer can equal a gold, or return None if one can."""
    try:
        if _gold_value(answer) is not None:
            return None
    except ValueError as error:
        return str(error)
    problem = "does not state one number"
    if "#### " in str(answer):
        problem = "is a worked answer; torchtune_grpo.data.gsm8k_dataset takes the gold out of it"
    return f"answer={shortened(repr(answer))} {problem}"


@declares(reads="text", reward_range=(0.0, 1.0))
def math_format_reward(
    prompts: list[str], completions: list[str], **columns: object
) -> list[float]:
    """Score 1.0 for an answer in the right form, whatever it says."""
    return [float(math_format_holds(text)) for text in completions]


@declares(reads="text", decides=True, check_row=math_gold_fault, answer_of=stated_answer)
def math_correctness_reward(
    prompts: list[str],
    completions: list[str],
    *,
    answer: list[str | int | float],
    strict: bool = False,
    **columns: object,
) -> list[float]:
    """Score 1.0 for a right answer; ``strict`` reads answer blocks only."""
    pairs = zip(completions, answer, strict=True)
    return [float(grade_math_answer(text, gold, strict=strict)) for text, gold in pairs]


def _last_number(text: str) -> str:
    """Put the last number into an answer block; a minus after a letter or digit subtracts."""
    *_, last = ["", *_ANY_NUMBER.findall(text)]
    return f"<answer>{last.rstrip(',')}</answer>"


@declares(
    reads="text",
    decides=True,
    check_row=math_gold_fault,
    answer_of=lambda text: stated_answer(_last_number(text)),
)
def last_number_reward(
    prompts: list[str],
    completions: list[str],
    *,
    answer: list[str | int | float],
    **columns: object,
) -> list[float]:
    """Score 1.0 for a text whose last number is the gold: a lenient grader, not one to train on."""
    blocks = [_last_number(text) for text in completions]
    return math_correctness_reward(prompts, blocks, answer=answer)
