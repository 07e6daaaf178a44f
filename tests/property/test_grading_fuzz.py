"""Properties of the maths grader on random texts, numbers and equations.

The oracle is ``fractions.Fraction``, which shares no code with the grader.
"""

from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from torchtune_grpo.rewards import grade_math_answer, math_format_holds

FRAGMENTS = st.sampled_from(
    r"<think> </think> <answer> </answer> \boxed{ } \frac{ #### 12 1,234 - $ ** ` . , = * / ( ) % ²"
    " ^2 x km not or".split(" ")
    + [" ", "\n", "The answer is "]
)
TEXTS = st.one_of(st.text(), st.lists(FRAGMENTS, max_size=30).map("".join))
NUMBERS = st.decimals(
    min_value=-(10**12), max_value=10**12, allow_nan=False, allow_infinity=False, places=3
)
INTEGERS = st.integers(min_value=-(10**9), max_value=10**9)
UNITS = st.sampled_from(
    ["apples", "km/h", "m²", "dollars per hour", "°C", "clips in April and May"]
)


def block(content: str) -> str:
    return f"<think>99</think>\n<answer>{content}</answer>"


def is_correct(content: str, gold: object) -> bool:
    return grade_math_answer(block(content), str(gold))


def written(value: object) -> str:
    return format(value, "f")  # type: ignore[arg-type]


@given(TEXTS, TEXTS)
@settings(max_examples=500, deadline=None)
def test_never_raises_and_returns_a_bool(text, gold):
    for candidate in (text, block(text)):
        assert isinstance(grade_math_answer(candidate, gold), bool)
        assert isinstance(math_format_holds(candidate), bool)


@given(NUMBERS, UNITS)
@settings(deadline=None)
def test_every_accepted_way_to_write_a_number_is_correct(number, unit):
    text, size = written(number), written(number.copy_abs())  # a library may round abs()
    sign = "-" if text.startswith("-") else ""
    assert format(number, ",f").replace(",", "") == text
    ways = [
        f" \n{text}\t",
        f"{text}.",
        f"{sign}${size}",
        f"${text}",
        format(number, ",f"),
        f"{sign}${format(number.copy_abs(), ',f')}",
        f"{text}000",
        f"{text}%",
        text.replace("-", "−"),
        text if sign else f"+{text}",
        f"{text} {unit}.",
        f"x = {text}",
        rf"{text} \text{{ apples}}",
        rf"The final answer is $\boxed{{{text}}}$.",
        f"**Answer:** {text}",
        f"{text}/1",
        f"{text} * 1 = {text}",
    ]
    assert [way for way in ways if not is_correct(way, text)] == []


@given(NUMBERS, NUMBERS)
@settings(deadline=None)
def test_another_number_is_never_correct(number, other):
    assume(number != other)
    text, wrong = written(number), written(other)
    ways = [wrong, f"${wrong}", f"The answer is {wrong}.", rf"\boxed{{{wrong}}}", f"{wrong} apples"]
    ways += [f"{wrong} or {text}", f"{text}, {wrong}", f"{text} - {wrong}", f"{wrong}\n{text}"]
    assert [way for way in ways if is_correct(way, text)] == []


@given(NUMBERS)
@settings(deadline=None)
def test_what_changes_a_number_is_not_correct(number):
    assume(number != 0)
    text = written(number)
    negated = text[1:] if text.startswith("-") else f"-{text}"
    ways = [negated, f"1{negated}", f"- {text}", f"--{text}", f"x{text}"]
    ways += [f"{text}1", f"{text}e1", f"{text}k", f"{text} k", f"{text}²", f"{text}^2", f"{text}!"]
    ways += [f"{text}?", f"#{text}", f"~{text}", f"f({text})", f"{text}, {text}", f"{text}:30"]
    assert [way for way in ways if is_correct(way, text)] == []


WORDS = st.text("abdefgnotyéÀ", min_size=2) | st.sampled_from(["don't", "girls'", "half-eaten"])
PROSE = st.lists(WORDS, max_size=9).map(" ".join)


@given(NUMBERS, PROSE, PROSE)
@settings(deadline=None)
def test_words_around_a_number_do_not_matter(number, before, after):
    """Words of two letters or more: "12 x" and "12 k" are other numbers."""
    assert is_correct(f"{before} {written(number)} {after}", written(number))


@given(INTEGERS, st.integers(1, 10**6), INTEGERS, st.integers(1, 10**6))
@example(1, 3, 2, 6)
@settings(deadline=None)
def test_fractions_are_compared_as_rationals(a, b, c, d):
    expected = Fraction(a, b) == Fraction(c, d)
    assert is_correct(f"{a}/{b}", f"{c}/{d}") is expected
    sign = "-" if a < 0 else ""
    assert is_correct(rf"{sign}\frac{{{abs(a)}}}{{{b}}}", f"{c}/{d}") is expected
    assert is_correct(f"{a}/{b}", f"{a * d}/{b * d}")


OPERANDS = st.integers(0, 30).map(str) | st.tuples(st.integers(0, 9), st.integers(0, 99)).map(
    lambda parts: f"{parts[0]}.{parts[1]:02d}"
)
EXPRESSIONS = st.recursive(
    OPERANDS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join), inner.map("({})".format)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(EXPRESSIONS, st.fractions(max_denominator=50))
@settings(deadline=None, max_examples=300)
def test_an_equation_is_correct_exactly_if_it_holds(expression, error):
    """The left side against Python's own grammar over ``Fraction``."""
    exact = "".join(
        f"Fraction('{part}')" if part[0].isdigit() else part
        for part in expression.replace("(", "( ").replace(")", " )").split()
    )
    try:
        value = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert not is_correct(f"{expression} = 0", "0")
        return
    assert is_correct(f"{expression} = {value}", str(value))
    if error:
        assert not is_correct(f"{expression} = {value + error}", str(value + error))
        assert not is_correct(f"{expression} = {value + error}", str(value))


@given(NUMBERS, TEXTS, TEXTS)
@settings(deadline=None)
def test_only_the_block_counts(number, before, after):
    """Text in the thinking, or behind the block, does not change the verdict."""
    for part in ("<answer>", "</answer>", "<think>", "</think>"):
        before, after = before.replace(part, ""), after.replace(part, "")
    assume("<" not in before + after and not grade_math_answer(after, written(number)))
    text = f"<think>{before}</think>{after}<answer>{written(number)}</answer>{after}"
    assert grade_math_answer(text, written(number))
    assert not grade_math_answer(
        f"<think>{before}{written(number)}</think>{after}", written(number)
    )
