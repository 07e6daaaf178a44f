"""Answers beyond one number, by math-verify in processes of its own."""

import os
import signal
import threading
import time

import pytest
from processes import children, wait_until

from torchtune_grpo.rewards import SymbolicMathReward

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def reward():
    reward = SymbolicMathReward(timeout=2, workers=2)
    yield reward
    reward.close()
    assert not children()


def grade(reward, pairs):
    """Pairs of answer and gold."""
    texts = [f"<think>a</think><answer>{given}</answer>" for given, _ in pairs]
    return reward([""] * len(pairs), texts, answer=[gold for _, gold in pairs])


RIGHT = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 4/2 \end{pmatrix}"),
    (r"\(x^2 + 2x + 1\)", "(x+1)^2"),
    ("[0, 1)", "[0,1)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("12 apples", "12"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"\sqrt{2} + \frac{1}{3}", r"\sqrt{2} + 0.\overline{3}"),
    ("n = 4210_{7}", "4210_7"),
    (r"x = \sqrt{2}", r"\sqrt{2}"),
    (r"n = \sqrt{2} + \sum_{i=1}^{2} 0", r"\sqrt{2}"),
    (r"x_1 = \sqrt{8} = 2\sqrt{2}", r"2\sqrt{2}"),
    ("(x, y) = (2, 3)", "(2,3)"),
    ("y = 2x + 1", "y=2x+1"),
    ("x" + "+1" * 199, "x + 199"),
    (r"1 + \frac{2}{\mathrm{e}}", r"1 +\frac{2}{\mathrm{e}}"),  # as it is written
    (r"1, 3, \ldots, 2n-1", r"1, 3, \ldots, 2n-1"),
    ("x'", "x'"),
    # A unit at the end may be missing on either side.
    (r"18\pi \text{ cm}^2", r"18\pi"),
    (r"A = 18\pi\,\mathrm{cm}^{2}.", r"18\pi\text{ cm}^2"),
    (r"18\pi", r"18\pi \mbox{ square inches}"),
    (r"10\sqrt{3}\text{ units}", r"\sqrt{300}"),
    (r"18\pi\mathrm{e}", r"18 e\pi"),
]
WRONG = [
    # math-verify reads a part of these.
    (r"1 + \frac{2}{\mathrm{e}}", r"1 - \frac{2}{\mathrm{e}}"),
    (r"y = 1 + \frac{2}{\mathrm{e}}", r"\frac{x}{x}"),
    (r"1, 3, 5, \ldots, 2n-1", r"1, 2, \ldots, n"),
    ("x'", "x"),
    (r"18\pi\mathrm{e}", r"18\pi"),
    (r"18\pi \text{ m}^2", r"18\pi \text{ cm}^2"),
    (r"18\pi \text{ cm}", r"18\pi \text{ cm}^2"),
    (r"18\pi \text{ million}", r"18\pi"),
    (r"17\pi \text{ cm}", r"18\pi"),
    (r"18\pi \text{ cm} + 1", r"18\pi"),
    ("3x +", r"3\cos 0"),
    (r"\frac{\sqrt{2}}{3}", r"\frac{1}{\sqrt{2}}"),
    ("(0, 1)", "[0,1)"),
    ("(x, y) = (3, 2)", "(2,3)"),
    ("(1, 2) = (2, 3)", "(2,3)"),
    ("0.33", r"0.\overline{3}"),
    ("4210_5", "4210_7"),
    ("4210_{7} + 1", "4210_7"),
    ("x^2 + 1 or x^2 + 2", "x^2 + 1"),
    ("", "x"),
    (r"3 = \sqrt{2}", r"\sqrt{2}"),
    (r"3 \equiv \sqrt{2}", r"\sqrt{2}"),
    (r"x \approx \sqrt{2}", r"\sqrt{2}"),
    ("z = 2x + 1", "y=2x+1"),
    (r"\frac{", "x"),
    ("maybe x", "x"),
    ("x" + "+1" * 200, "x + 200"),  # there to keep sympy busy
    ("$x$ $y$", "x"),
    ("__import__('os')._exit(0)", "x"),
]


@pytest.mark.slow
def test_right_and_wrong_answers(reward):
    scores = grade(reward, RIGHT + WRONG)
    expected = dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(WRONG, 0.0)
    assert dict(zip(RIGHT + WRONG, scores)) == expected


# Powers, factorials and binomials that can be evaluated, and their golds.
HONEST = [
    ("2^{10}", "4^5"),
    ("3^{n^2}", "3^{n^2}"),
    ("2^{(n+1)!}", "2^{(n+1)!}"),
    ("7^{2^{5}}", "7^{32}"),
    ("(5!)!", "120!"),
    (r"\left(2^{3}\right)^{4}", "2^{12}"),
    ("e^{10^{-6}}", "e^{0.000001}"),
    (r"1.5 \times 10^{8}", r"15 \cdot 10^{7}"),
    (r"e^{-\frac{x^2}{20000}}", "e^{-x^2/20000}"),
    ("5!", r"2^3 \cdot 15"),
    (r"\binom{10}{3}", r"\binom{10}{7}"),
    (r"\frac{2024!}{1012! \cdot 1012!}", r"\binom{2024}{1012}"),
    (r"\sum_{i=1}^{100} i x^i", r"\sum_{i=1}^{100} i x^i"),
    ("x^{100}", "(x^{50})^2"),
    ("x = 2^{10} = 4^{5}", "2^{10}"),
    # The gold has numbers of that size itself.
    ("x^{10000}", "x^{10000}"),
    ("4^{5000}", "2^{10000}"),
    ("9^{9^9}", "9^{9^{9}}"),
]
TOWERS = [
    "9^{9^{9^{9^{9}}}}",
    r"\left(9^{9}\right)^{9^{9}}",
    "2^{10^{10}}",
    r"10^{10^{10}} \mod 7",
    r"1.1^{10^9}",
    r"(x+1)^{99999999}",
    "100000!",
    "10^{9}!",
    "9!!!",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{i=1}^{10^{9}} i",
    r"\{9^{9^9}, 1\}",
    r"\sqrt{2} = 9^{9^9}",
]


def test_sensible_powers_are_right(reward):
    assert dict(zip(HONEST, grade(reward, HONEST))) == dict.fromkeys(HONEST, 1.0)


def test_towers_cost_nothing(reward):
    """Neither this process nor one of its own, which would count once it has ended, reads them."""
    reward.close()
    before = os.times()
    scores = grade(reward, [(tower, r"\sqrt{2}") for tower in TOWERS])
    reward.close()
    after = os.times()
    assert dict(zip(TOWERS, scores)) == dict.fromkeys(TOWERS, 0.0)
    assert sum(after[:4]) - sum(before[:4]) < 0.5  # seconds of CPU, in all


@pytest.mark.slow
def test_what_keeps_sympy_busy_is_wrong_in_time(reward):
    """Expansions of large powers; the answers beside them are graded as ever.

    Each is compared once, however often it is given: two seconds for each would be 80.
    """
    pairs = [(r"\sqrt{8}", r"2\sqrt{2}"), ("(x+1)^{3000}", "(1+x)^2"), ("(x+y+z)^{300}", "(1+x)^2")]
    start = time.monotonic()
    assert grade(reward, pairs * 20) == [1.0, 0.0, 0.0] * 20
    assert time.monotonic() - start < 25


def test_a_chain_is_compared_up_to_its_first_wrong_side(reward):
    """The sides behind it would cost a process, by their time limit."""
    assert wait_until(lambda: grade(reward, RIGHT[:2]) == [1.0, 1.0] and len(workers()) == 2)
    before = workers()
    chains = [(f"3 = (x+1)^{{300{digit}}}", "(1+x)^2") for digit in range(4)]
    assert grade(reward, chains) == [0.0] * 4
    assert workers() == before


def workers() -> list[int]:
    return [worker for server in children() for worker in children(of=server)]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_a_failure(reward):
    """Nobody knows whether the answer is right; other answers are graded as ever."""
    assert wait_until(lambda: grade(reward, RIGHT[:2]) == [1.0, 1.0] and len(workers()) == 2)
    killers = [threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)) for worker in workers()]
    for killer in killers:
        killer.start()
    lost = grade(reward, [(f"(x+1)^{{300{digit}}}", "(1+x)^2") for digit in "12"])
    assert [str(score).startswith("its process ended") for score in lost] == [True, True]
    assert grade(reward, RIGHT[:2]) == [1.0, 1.0]


def test_an_unreadable_gold_is_a_failure(reward):
    (score,) = grade(reward, [("x", "")])
    assert isinstance(score, ValueError)


def test_the_answer_must_be_located(reward):
    golds = [r"\sqrt{2}"] * 4
    texts = [
        "It is this:\n" + r"\sqrt{2}",
        r"<think><answer>\sqrt{2}</answer>",
        r"</think><answer>\sqrt{2}</answer><answer>\sqrt{3}</answer>",
        r"</think><answer>\sqrt{2}</answer>",
    ]
    assert reward([""] * 4, texts, answer=golds) == [0.0, 0.0, 0.0, 1.0]


def test_without_math_verify_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'math-verify<0.10'"):
        SymbolicMathReward()
