"""No text takes more than 400 ms of the trainer, whatever shipped reward is configured."""

import gc
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from processes import least_seconds

from torchtune_grpo import rewards as shipped
from torchtune_grpo.rewards import RewardSet, grade_math_answer
from torchtune_grpo.rewards.extraction import extract_program

SIZE = 200_000
BOUND = 0.4  # seconds of this process; none takes 40% of it on an idle core
UNITS = r"""
<think> </think> <answer> </answer> <answer>7</answer> <think><answer> ` ``` ~~~ ```python ( ) [ {
\frac{ \frac12 \boxed{ \( $ ** - 7 7, 7. 7e 7e1 1/ 7+ a a- n't ' " ''' # \ = def f= @ é ~a 7~a | ^
""".split()
UNITS += [" ", "\n", "\r\n", "\t", "\u200b", "\x00", "a ", "not ", "minus ", "of ", "7 ", "f :"]
UNITS += ["```\n", "```\nf=1\n```\n", "```\nx = 1\n```\n", '"""\n', "def f\n", "(\n", " \n```\n"]
SHAPES = [unit * (SIZE // len(unit)) for unit in UNITS]
SHAPES += [f"```{' ' * SIZE}!", f"```{'{' * SIZE}", f"```python\n{'x' * SIZE}", f"f{' ' * SIZE}:"]
SHAPES += ["9" * 99_000 + "=" + "9" * 99_000, " ".join(map(str, range(30_000)))]
# Further ones for what reads numbers and blocks.
MATH_UNITS = r"""
<answer></answer> < > </ \boxed{1} \boxed{{} {} #### answer_is `a` “a USD1 $5m 5th ° 1=1 1e-9* 1/7+
\[ \text{a} } % / -- $$ * *** 1 , 1, 1,234, 1. . 0. =1 1= 9^ 9** 9* 9+ (9* +( (1) 1e9 a' s' x= 1²
m²/ \\ \frac{1}{2} \text{ \, \(\) {,} 1{,}234 1,\! $1$ **a** １
答 1一 μ' ж- .\overline{1} 0.\bar1 « 「1 负1 answer: **answer:** 1ж
""".split()
MATH_UNITS += ["\u00a0", "\u202e", "\ud800", "e\u0301", "1 ", "12 or ", "<answer>12 </answer> "]
# And for what reads letters and words.
MATH_UNITS += ["B. ", "(B) ", "A ", "not ( ", "or C. ", "\nAnswer:", "# ", "\ufdfa", "\u0301\u0327"]
MATH_UNITS += ["B", "(B", "(B)", "B ", "I ", "not ", "or B. ", "option ", "answer: ", " because"]
MATH_UNITS += [
    "．",
    "**B**",
    "{}",
    "<answer>B</answer>",
    "\\boxed{B}",
    "\u3000",
    "the ",
    "a an the ",
]
MATH_UNITS += ["the answer is ", "the correct answer is "]
MATH_SHAPES = [unit * (SIZE // len(unit)) for unit in MATH_UNITS]
MATH_SHAPES += [(unit * 1000)[:990] for unit in UNITS + MATH_UNITS]  # short enough to be read
MATH_SHAPES += [
    "9" * 99_000 + "/" + "7" * 99_000,
    r"\frac{" + "9" * 99_000 + "}{" + "7" * 99_000 + "}",
    "0." + "0" * 199_000 + "1",
    "".join(f"<answer>12.{'0' * k}</answer>" for k in range(550)),
    "</answer>".join(f"<answer>{'9' * 3000}.{'0' * k}" for k in range(60)),
    "".join(f"<answer>{'1=' * 495}{k}</answer>" for k in range(20)),
    "".join(rf"\boxed{{{'[' * 990}{k}}}" for k in range(200)),
]
for operator in "+-*/":
    MATH_SHAPES.append("<answer>" + operator.join(["7e-99"] * 50) + "=1</answer>")
    MATH_SHAPES.append(operator.join(f"(1/{k})" for k in range(1001, 1017)) + "=1")
    MATH_SHAPES.append(operator.join(["9" * 90] * 10) + "=1")
CODE_UNITS = ['```python\n"""\n```\n', "<answer>", "> ", "1. ", "<a> ", "[BEGIN]", "a b ", "\\'"]
CODE_UNITS += ["from __future__ import a\n", "'''\n\"\"\"\n", "def f():\n", "```a```\n", "'\""]
CODE_UNITS += ["<think></think>"]
CODE_SHAPES = [unit * (99_000 // len(unit)) for unit in CODE_UNITS]
CODE_SHAPES += [before * 49_000 + "```" + "\n" * 49_900 for before in (" ", ">")]
ANSWER = ("<think>7</think>\n<answer>", "</answer>")
FENCE = ("```python\ndef f():\n", "\n```")
AROUND_MATH = [ANSWER, ("<answer>", "</answer>"), ("<think>", "</think> <answer>7</answer>")]
AROUND_MATH += [("<answer>7</answer>", ""), (r"\boxed{", ""), ("#### ", ""), ("The answer is ", "")]

COLUMNS = {"answer": ["7"], "entry_point": ["f"], "test": ["assert f() == 1"]}
COLUMNS |= {"tests": [{"inputs": ["1"], "outputs": ["1"]}]}
NAMES = """
math_correctness_reward last_number_reward math_format_reward math_number_reward
code_format_reward CodeReward ProgramReward SymbolicMathReward choice_reward
short_text_reward
""".split()
# Of each shipped reward, its arguments.
REWARDS = dict.fromkeys(NAMES, {}) | {"OverlongPenalty": {"max_length": 9, "cache": 3}}


def test_every_shipped_reward_is_here() -> None:
    """But for a judge, which reads no text itself."""
    others = ("Reward", "JudgeReward")
    public = {name: getattr(shipped, name) for name in shipped.__all__ if name not in others}
    marked = {n for n, v in public.items() if hasattr(v, "decides") or hasattr(v, "reward_range")}
    assert marked == REWARDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", REWARDS)
def test_no_text_takes_long(name: str) -> None:
    """Each shape by itself, and in an answer block or in a fence, through a set of rewards."""
    columns, shapes, around = COLUMNS, SHAPES, [ANSWER]
    is_short = name in ("choice_reward", "short_text_reward")  # for which a gold is a text, too
    if name == "SymbolicMathReward":
        pytest.importorskip("math_verify")
        columns = {"answer": [r"\sqrt{7}"]}
    elif name in ("code_format_reward", "CodeReward"):
        around = [FENCE]
    elif name in ("math_correctness_reward", "math_format_reward") or is_short:
        shapes, around = SHAPES + MATH_SHAPES, AROUND_MATH
    node = {"_component_": f"torchtune_grpo.rewards.{name}", **REWARDS[name]}
    rewards = RewardSet.from_config([node])

    def score(text: str) -> None:
        given = {"answer": [text]} if is_short else columns
        rewards(prompts=[""], completions=[text], columns=given, completion_ids=[[7] * 100])

    assert slowest(score, around=around, shapes=shapes) < BOUND
    rewards.close()


@pytest.mark.parametrize("gold", ["9" * 99_000, "0." + "3" * 50_000], ids=["whole", "decimal"])
def test_long_golds_take_no_longer(gold: str) -> None:
    def grade(text: str) -> None:
        assert grade_math_answer(text, gold) in (True, False)

    assert slowest(grade, around=AROUND_MATH[1:2], shapes=SHAPES + MATH_SHAPES) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["f", None])
def test_the_program_of_no_text_takes_long(entry_point: str | None) -> None:
    """CodeReward refuses long completions before it looks for their programs."""

    def extract(text: str) -> None:
        extract_program(text, setup="", entry_point=entry_point)

    assert slowest(extract, around=[FENCE], shapes=[*SHAPES, *CODE_SHAPES]) < BOUND


def slowest(
    score: Callable[[str], object],
    *,
    around: Sequence[tuple[str, str]],
    shapes: Sequence[str] = SHAPES,
) -> float:
    """Seconds for the slowest shape, bare or with texts before and behind it."""
    gc.collect()
    gc.disable()  # a collection of all that the test process holds is not the reward's time
    took = []
    for shape in shapes:
        for before, after in (("", ""), *around):
            text = before + shape + after
            took.append(least_seconds(partial(score, text), enough=BOUND))
    gc.enable()
    return max(took)
