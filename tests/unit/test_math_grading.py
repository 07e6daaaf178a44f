"""The maths rewards against labelled cases, and the limits of their work.

``data/math_grading_cases.jsonl`` holds one case per line: a category (a sentence of the design, or
a way to cheat), the content of an answer block or a whole text, the gold, and whether it is
correct. ``data/math_model_answers.jsonl`` has texts as models write them, of each form in the
design; some are to be graded with ``strict``. The labels were written by hand.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchtune_grpo.rewards import grade_math_answer, math_correctness_reward, math_format_holds
from torchtune_grpo.rewards.math import stated_value

_DATA = Path(__file__).parent / "data"
CASES = [
    json.loads(line)
    for name in ("math_grading_cases", "math_model_answers")
    for line in (_DATA / f"{name}.jsonl").read_text(encoding="ascii").splitlines()
]
THOUGHT = "<think>It is 99.</think>\n"


def block(content: str) -> str:
    return f"{THOUGHT}<answer>{content}</answer>"


def verdict(case: dict) -> bool:
    text = case["text"] if "text" in case else block(case["content"])
    return grade_math_answer(text, case["gold"], strict=case.get("strict", False))


@pytest.mark.parametrize("category", sorted({case["category"] for case in CASES}))
def test_labelled_cases(category):
    """Every case of the category gets the verdict that a person gave it, in whichever thread."""
    cases = [case for case in CASES if case["category"] == category]
    with ThreadPoolExecutor(4) as threads:
        verdicts = threads.map(verdict, cases)
    wrong = [case for case, got in zip(cases, verdicts) if got is not case["correct"]]
    assert wrong == []


FORMAT_HOLDS = [
    "<think>a</think> <answer>1</answer>",
    "<think>a</think><answer>1</answer>",
    "  \n<think>\na\n</think>\n\n<answer>\nnot a number\n</answer>\n ",
    "<think>a < b > c, <b>, <Think>, <ANSWER></think>\t<answer>x</answer>",
]
FORMAT_FAILS = {
    "text after": "<think>a</think> <answer>1</answer> done",
    "text between": "<think>a</think> so <answer>1</answer>",
    "blank thought": "<think> \n</think> <answer>1</answer>",
    "invisible thought": "<think>\u200b\ufeff\u2060</think> <answer>1</answer>",
    "invisible answer": "<think>a</think> <answer>\u202e\x00</answer>",
    "two answers": "<think>a</think> <answer>1</answer> <answer>1</answer>",
    "tag in thought": "<think>use <answer> then</think> <answer>1</answer>",
    "answer first": "<answer>1</answer> <think>a</think>",
    "crossed": "<think>a <answer>1</think></answer>",
    "upper case": "<THINK>a</THINK> <ANSWER>1</ANSWER>",
    "no thought": "<answer>1</answer>",
    "unclosed answer": "<think>a</think> <answer>1",
    "space in tag": "<think >a</think> <answer>1</answer>",
}


def test_format():
    assert [text for text in FORMAT_HOLDS if not math_format_holds(text)] == []
    assert [kind for kind, text in FORMAT_FAILS.items() if math_format_holds(text)] == []


def test_correctness_reward():
    """Golds may be text or numbers, which nothing equals if they are not finite."""
    texts = [block("12"), block("0.5"), block("13"), "12", block("1" + "0" * 22), block("0.1")]
    texts += [block("nan"), block("inf"), block("0")]
    golds = ["12", 0.5, 12, "12", 1e22, 0.1, math.nan, math.inf, -math.inf]
    scores = math_correctness_reward(prompts=["p"] * 9, completions=texts, answer=golds)
    assert scores == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_strict_reads_answer_blocks_alone():
    texts = [block("12"), r"\boxed{12}", "#### 12", "The answer is 12."]
    given = {"prompts": ["p"] * 4, "completions": texts, "answer": ["12"] * 4}
    assert math_correctness_reward(**given) == [1.0] * 4
    assert math_correctness_reward(**given, strict=True) == [1.0, 0.0, 0.0, 0.0]


def test_long_numbers():
    """Up to 1,000 characters they are compared to the last digit; more of them are not read."""
    digits = "1234567890" * 30
    for number in (digits, "0." + digits, "123," + ",".join(["456"] * 70), "-" + digits):
        other = number[:-1] + ("1" if number[-1] != "1" else "2")
        assert grade_math_answer(block(number), number)
        assert not grade_math_answer(block(other), number)
    assert grade_math_answer(block(digits + "." + "0" * 300), digits)
    assert not grade_math_answer(block(digits + "." + "0" * 300 + "1"), digits)
    assert grade_math_answer(block(f"{digits}/10"), digits[:-1])
    assert grade_math_answer(block(f"{digits} + 1 = {digits[:-1]}1"), int(digits[:-1] + "1"))
    assert not grade_math_answer(block(f"{digits} + 2 = {digits[:-1]}1"), digits[:-1] + "1")
    assert stated_value("1" * 1000) == int("1" * 1000) and stated_value("1" * 1001) is None


def test_work_is_bounded():
    """Length of a side, depth of brackets and the number of different blocks have a limit."""
    assert stated_value("+".join("1" * 50) + "=50") == 50
    assert stated_value("+".join("1" * 51) + "=51") is None
    assert stated_value("(" * 40 + "12" + ")" * 40 + " = 12") == 12
    assert stated_value("(" * 200 + "12" + ")" * 200 + " = 12") is None
    blocks = [f"<answer>12.{'0' * zeros}</answer>" for zeros in range(1, 22)]
    assert grade_math_answer("".join(blocks[:-1] * 2), "12")
    assert not grade_math_answer("".join(blocks), "12")


def test_executes_nothing(tmp_path):
    """Neither as Python nor as a shell command."""
    target = tmp_path / "made"
    for code in (f"open({str(target)!r}, 'w')", f"__import__('os').mknod({str(target)!r})"):
        assert not grade_math_answer(block(code), "12")
        assert not grade_math_answer(block("12"), code)
    assert not target.exists()
