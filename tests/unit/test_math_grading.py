"""The maths rewards against labelled cases, texts of hostile size, and other threads.

``data/math_grading_cases.jsonl`` holds one case per line: a category (a sentence of the design, or
a way to cheat), the content of an answer block or a whole text, the gold, and whether it is
correct. The labels were written by hand.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from torchtune_grpo.rewards import (
    grade_math_answer,
    math_correctness_reward,
    math_format_holds,
    math_format_reward,
)
from torchtune_grpo.rewards.math.equation import MAX_WORK
from torchtune_grpo.rewards.math.grading import MAX_SPELLINGS
from torchtune_grpo.rewards.math.tokens import MAX_TOKENS, tokenize
from torchtune_grpo.rewards.math.value import stated_value

_CASE_FILE = Path(__file__).parent / "data" / "math_grading_cases.jsonl"
CASES = [json.loads(line) for line in _CASE_FILE.read_text(encoding="ascii").splitlines()]
_ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("TORCHTUNE_GRPO_GSM8K", _ROOT / "../shared/gsm8k")) / "train.jsonl"

THOUGHT = "<think>It is 99.</think>\n"


def block(content: str) -> str:
    return f"{THOUGHT}<answer>{content}</answer>"


def case_text(case: dict) -> str:
    return case["text"] if "text" in case else block(case["content"])


@pytest.mark.parametrize("category", sorted({case["category"] for case in CASES}))
def test_labelled_cases(category):
    """Every case of the category gets the verdict that a person gave it."""
    cases = [case for case in CASES if case["category"] == category]
    wrong = [
        (case.get("content", case.get("text")), case["gold"], case["correct"])
        for case in cases
        if grade_math_answer(case_text(case), case["gold"]) is not case["correct"]
    ]
    assert wrong == []


def test_case_file_is_large_and_has_both_verdicts():
    verdicts = [case["correct"] for case in CASES]
    assert len(verdicts) >= 300
    assert min(verdicts.count(True), verdicts.count(False)) >= 100


@pytest.mark.skipif(not GSM8K.exists(), reason="no GSM8K here; set TORCHTUNE_GRPO_GSM8K")
def test_gsm8k_golds_and_last_lines():
    """Every gold is correct for itself; a last line is graded by its one number or equation."""
    graded = {True: 0, False: 0}
    for row in map(json.loads, GSM8K.read_text(encoding="utf-8").splitlines()):
        solution, gold = row["answer"].split("\n#### ")
        for stated in (gold, f"She has ${gold} left.", f"**{gold}** clips", f"Total: ({gold})"):
            assert grade_math_answer(block(stated), gold.replace(",", ""))
        assert not grade_math_answer(block(gold), gold.replace(",", "") + "1")
        last = re.sub("<<.*?>>", "", solution).splitlines()[-1]
        if len(re.findall("[0-9][0-9.,]*", last)) == 1:
            graded[grade_math_answer(block(last), gold)] += 1
    assert graded[True] >= 0.9 * sum(graded.values()), graded


FORMAT_HOLDS = [
    "<think>a</think> <answer>1</answer>",
    "<think>a</think><answer>1</answer>",
    "  \n<think>\na\n</think>\n\n<answer>\nnot a number\n</answer>\n ",
    "<think>a < b > c, <b>, <Think>, <ANSWER></think>\t<answer>x</answer>",
]
FORMAT_FAILS = {
    "text before": "so <think>a</think> <answer>1</answer>",
    "text after": "<think>a</think> <answer>1</answer> done",
    "text between": "<think>a</think> so <answer>1</answer>",
    "blank thought": "<think> \n</think> <answer>1</answer>",
    "empty thought": "<think></think> <answer>1</answer>",
    "blank answer": "<think>a</think> <answer>\t</answer>",
    "invisible thought": "<think>\u200b\ufeff\u2060</think> <answer>1</answer>",
    "invisible answer": "<think>a</think> <answer>\u202e\x00</answer>",
    "two thoughts": "<think>a</think><think>b</think> <answer>1</answer>",
    "two answers": "<think>a</think> <answer>1</answer> <answer>1</answer>",
    "nested thought": "<think><think>a</think></think> <answer>1</answer>",
    "nested answer": "<think>a</think> <answer><answer>1</answer></answer>",
    "tag in thought": "<think>use <answer> then</think> <answer>1</answer>",
    "answer first": "<answer>1</answer> <think>a</think>",
    "answer inside": "<think>a <answer>1</answer></think>",
    "crossed": "<think>a <answer>1</think></answer>",
    "crossed the other way": "<think>a<answer></think> 1</answer>",
    "upper case": "<THINK>a</THINK> <ANSWER>1</ANSWER>",
    "no thought": "<answer>1</answer>",
    "no answer": "<think>a</think>",
    "unclosed answer": "<think>a</think> <answer>1",
    "unopened thought": "a</think> <answer>1</answer>",
    "space in tag": "<think >a</think> <answer>1</answer>",
    "nothing": "",
    "only tags": "<think></think><answer></answer>",
}


def test_format_holds():
    assert [text for text in FORMAT_HOLDS if not math_format_holds(text)] == []
    assert math_format_reward(prompts=["p"] * 2, completions=[FORMAT_HOLDS[0], "x"], k=[1, 2]) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize("kind", FORMAT_FAILS)
def test_format_fails(kind):
    assert math_format_holds(FORMAT_FAILS[kind]) is False


def test_correctness_reward():
    """Golds may be text or numbers; columns that it does not need are ignored."""
    texts = [block("12"), block("0.5"), block("13"), "12", block("1" + "0" * 22), block("0.1")]
    golds = ["12", 0.5, 12, "12", 1e22, 0.1]
    scores = math_correctness_reward(
        prompts=["p"] * 6, completions=texts, answer=golds, solution=["s"] * 6
    )
    assert scores == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("gold", [None, True, ["12"], b"12"])
def test_correctness_reward_refuses_golds_of_other_types(gold):
    with pytest.raises(ValueError, match=r"answer\[1\] is .*must hold the right number"):
        math_correctness_reward(["p"] * 2, [block("12")] * 2, answer=["12", gold])


def test_correctness_reward_refuses_another_number_of_golds():
    with pytest.raises(ValueError, match="1 golds for 2 completions"):
        math_correctness_reward(["p"] * 2, [block("12")] * 2, answer=["12"])


@pytest.mark.parametrize("gold", [float("nan"), float("inf"), float("-inf")])
def test_nothing_equals_a_gold_that_is_no_number(gold):
    assert not any(grade_math_answer(block(c), gold) for c in ("nan", "inf", "-inf", "0", "12"))


def test_numbers_of_any_length():
    """100,000 digits are compared to the last one, also in fractions, groups and equations."""
    digits = "1234567890" * 10_000
    grouped = "123," + ",".join(["456"] * 33_000)
    decimal = "0." + digits
    for number in (digits, decimal, grouped, "-" + digits):
        other = number[:-1] + ("1" if number[-1] != "1" else "2")
        assert grade_math_answer(block(number), number)
        assert not grade_math_answer(block(other), number)
        assert not grade_math_answer(block(number), other)
    assert grade_math_answer(block(digits + "." + "0" * 90_000), digits)
    assert not grade_math_answer(block(digits + "." + "0" * 90_000 + "1"), digits)
    assert grade_math_answer(block(f"{digits[:-1]}0/10"), digits[:-1])
    assert not grade_math_answer(block(f"{digits[:-1]}1/10"), digits[:-1])
    assert grade_math_answer(block(f"{digits} + 1 = {digits[:-1]}1"), digits[:-1] + "1")
    assert not grade_math_answer(block(f"{digits} + 2 = {digits[:-1]}1"), digits[:-1] + "1")


SIZE = 200_000
_VISIBLE = r"""
<think> </think> <answer> </answer> <answer>12</answer> <answer></answer> <think><answer> < > </
( ) [ { } ^ % / ' é - -- $ $$ * ** *** 1 , 1, 1,234, 1. . 0. 1/ =1 1= 9^ 9** 9* 9+ (9* +( (1) 1e9
a a- a' s' x= 1² m²/ \ \\ \boxed{ \frac{ \frac{1}{2} \text{ \, \( \(\) {,} 1{,}234 1,\! $1$ **a**
"""
_INVISIBLE = [" ", "\n", "\t", "\u00a0", "\x00", "\u200b", "\u202e", "\ud800", "e\u0301"]
UNITS = [
    *_VISIBLE.split(),
    *_INVISIBLE,
    "a ",
    "not ",
    "1 ",
    "12 or ",
    "１",
    "<answer>12 </answer> ",
]
SHAPES = {f"{unit!r} again and again": unit * (SIZE // len(unit)) for unit in UNITS} | {
    "two long sides": "9" * 99_000 + "=" + "9" * 99_000,
    "long fraction": "9" * 99_000 + "/" + "7" * 99_000,
    "long \\frac": r"\frac{" + "9" * 99_000 + "}{" + "7" * 99_000 + "}",
    "long decimal": "0." + "0" * 199_000 + "1",
    "many different blocks": "".join(
        f"<answer>{k:013b}</answer>".replace("0", "\t").replace("1", "\u00a0").replace("</", "12</")
        for k in range(2**13)
    )[:SIZE],
    "long blocks": "</answer>".join(f"<answer>{'9' * 3000}.{'0' * k}" for k in range(60)),
}
for _operator in "+-*/":
    SHAPES |= {
        f"two long operands {_operator}": f"{'9' * 66_000}{_operator}{'7' * 66_000}={'9' * 66_000}",
        f"ten operands {_operator}": _operator.join(["9" * 20_000] * 9) + "=1",
        f"hundred operands {_operator}": _operator.join(["97" * 100] * 98) + "=1",
        f"long fractions {_operator}": _operator.join(["9" * 33_000 + "/" + "7" * 33_000] * 2)
        + "="
        + "3" * 66_000,
    }
AROUND = [("", ""), ("<answer>", "</answer>"), (THOUGHT + "<answer>", "</answer>")]
AROUND += [("<think>", "</think> <answer>12</answer>"), ("<answer>12</answer>", "")]


@pytest.mark.parametrize("shape", SHAPES)
def test_hostile_texts_take_little_time(shape):
    """200,000 characters of any shape: a bool, no exception, well under 250 ms."""
    for before, after in AROUND:
        text = before + SHAPES[shape] + after
        long_golds = ("9" * 99_000, "0." + "3" * 50_000) if before == AROUND[1][0] else ()
        for gold in ("12", *long_golds):
            start = time.thread_time()
            assert grade_math_answer(text, gold) in (True, False)
            assert time.thread_time() - start < 0.25
        start = time.thread_time()
        assert math_format_holds(text) in (True, False)
        assert time.thread_time() - start < 0.25


def test_reading_takes_linear_time():
    """Ten times the size stays within ten times the bound; quadratic time would miss it by far."""
    for unit in ("<think>", "<answer></answer>", "(", "1", "1,", " ", "\\, ", "a'", "\u200b"):
        text = block(unit * (10 * SIZE // len(unit)))
        start = time.thread_time()
        grade_math_answer(text, "12")
        math_format_holds(text)
        assert time.thread_time() - start < 2.5


def test_work_behind_the_scanner_is_bounded():
    """More tokens, or more arithmetic than the bound, are refused before they are looked at."""
    assert len(tokenize("1 " * MAX_TOKENS) or []) == MAX_TOKENS
    assert tokenize("1 " * MAX_TOKENS + "1") is None
    ones = MAX_TOKENS // 2 - 1
    assert stated_value("+".join("1" * ones) + f"={ones}") is not None
    long = "1" * (MAX_WORK // 6)
    assert stated_value(f"{long} + 0 = {long}") is not None
    longer = "1" * (MAX_WORK // 3)
    assert stated_value(f"{longer} + 0 = {longer}") is None


def test_number_of_different_blocks_is_bounded():
    blocks = [f"<answer>12.{'0' * zeros}</answer>" for zeros in range(1, MAX_SPELLINGS + 2)]
    assert grade_math_answer("".join(blocks[:-1] * 2), "12")
    assert not grade_math_answer("".join(blocks), "12")


def test_bracket_depth_is_bounded_and_does_not_use_up_the_stack():
    assert grade_math_answer(block("(" * 10 + "12" + ")" * 10 + " = 12"), "12")
    assert not grade_math_answer(block("(" * 90 + "12" + ")" * 90 + " = 12"), "12")


def test_works_in_another_thread():
    """No signal and no state of the main thread; many threads at once agree."""
    verdicts: list[list[bool]] = []
    cases = CASES[::4]

    def grade_all() -> None:
        verdicts.append([grade_math_answer(case_text(case), case["gold"]) for case in cases])

    threads = [threading.Thread(target=grade_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [[case["correct"] for case in cases]] * 4


def test_leaves_the_interpreter_alone():
    """Long numbers are graded without lifting Python's limit on integer texts."""
    limit = sys.get_int_max_str_digits()
    assert grade_math_answer(block("7" * 10_000), "7" * 10_000)
    assert sys.get_int_max_str_digits() == limit


def test_executes_nothing(tmp_path):
    """Neither as Python nor as a shell command."""
    target = tmp_path / "made"
    for code in (f"open({str(target)!r}, 'w')", f"__import__('os').mknod({str(target)!r})"):
        assert not grade_math_answer(block(code), "12")
        assert not grade_math_answer(block("12"), code)
    assert not target.exists()
