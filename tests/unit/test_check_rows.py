"""Every row that no answer can score with is found when the data is read, and named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import children
from rows import rows_of

from torchtune_grpo.data import RLDataset, code_tests
from torchtune_grpo.rewards import RewardSet

SHIPPED = "torchtune_grpo.rewards."
MATH = SHIPPED + "math_correctness_reward"
MATH_NODE = {"_component_": MATH}
SYMBOLIC = {"_component_": SHIPPED + "SymbolicMathReward"}
CODE = {"_component_": SHIPPED + "CodeReward"}
CODE_ROW = {
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    "entry_point": "add",
    "setup": 'def add(x):\n    """Adds one."""\n',
}


@pytest.fixture(autouse=True)
def no_process_is_started() -> Iterator[None]:
    before = children()
    yield
    assert children().keys() == before.keys()


def fault(node: Any, *rows: dict[str, Any], key: str = "dataset") -> str | None:
    """Return what a reward says of a data set with these rows."""
    node = {"_component_": node} if isinstance(node, str) else node
    rewards = RewardSet.from_config([node])
    try:
        rewards.check_data(rows_of(*rows), key=key)
    except ValueError as error:
        return str(error)
    finally:
        rewards.close()
    return None


GOOD = ["24", "-1,234.5", "24 apples", "$5", r"\boxed{3}", "1/2", 24, 0.5, -3, 10**30, 1e300, " 7 "]
BAD = ["yes", "24 or 25", "", " ", None, True, [24], {"a": 1}, float("nan"), float("inf"), "3x"]
BAD += ["48/2 = 24 clips.\n#### 24", r"\sqrt{2}", "24, 25"]


def test_golds_that_state_no_number() -> None:
    """Just those: the good ones are right as an answer to themselves."""
    assert fault(MATH, *({"answer": gold} for gold in GOOD)) is None
    for gold in BAD:
        assert "1 of 1 rows" in str(fault(MATH, {"answer": gold})), gold


def test_golds_that_are_no_expression() -> None:
    """A verdict without math-verify: what it has to be asked for passes here."""
    pytest.importorskip("math_verify")
    good = [r"\frac{\sqrt2}{2}", r"4210_7", "[0, 1)", r"$\pi$", r"\text{(C)}", r"\infty", "sin x"]
    good += ["24 or 25", r"\begin{pmatrix}1\\2\end{pmatrix}", "ab+cd", r"x \text{ and } y"]
    good.append(r"5\pi \text{ cm}")
    assert fault(SYMBOLIC, *({"answer": gold} for gold in [*GOOD, *good])) is None
    bad = ["yes", " \n", None, True, [24], r"\text{even}", "north-east", "10_2 + 1", "$$"]
    bad.append("x = 24\n#### 24")
    for gold in bad:
        assert "1 of 1 rows" in str(fault(SYMBOLIC, {"answer": gold})), gold


def test_one_error_names_the_first_rows_and_the_remedy() -> None:
    """With isolation: process, too, where the reward is in other processes."""
    golds = ["24", "yes", "3", "x" * 500, None, "no", ""]
    rows = [{"answer": gold, "level": 1} for gold in golds]
    node = {"_component_": MATH, "name": "right"}
    expected = (
        "eval_dataset: 5 of 7 rows (counted from 0) are left out: the reward 'right' can score no "
        "answer: answer='yes' does not state one number (4 rows, first 1); the reward 'right' can "
        "score no answer: answer=None is neither text nor a number (row 4)"
    )
    said = fault(node, *rows, key="eval_dataset")
    assert said is not None and said.startswith(expected) and len(said) < 900 and "\n" not in said
    assert "eval_dataset.columns" in said
    assert said == fault({**node, "isolation": "process"}, *rows, key="eval_dataset")


def test_a_worked_answer_or_a_missing_column_names_the_data_set() -> None:
    said = fault(MATH, {"answer": "48/2 = <<48/2=24>>24\n#### 24"})
    assert "torchtune_grpo.data.gsm8k_dataset takes the gold out of it" in str(said)
    said = fault(MATH, {"gold": "24"}, key="eval_dataset")
    assert "needs the column 'answer', but eval_dataset has ['gold']" in str(said)
    assert "eval_dataset.columns={answer: ...}" in str(said)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("test", "", "test='': the test itself failed before it called the function: it never did"),
        ("test", None, "test=None is not text"),
        ("test", "assert add(1) == 2\0", "source code string cannot contain null bytes"),
        ("test", "(" * 10_000, "SyntaxError: too many nested parentheses"),
        ("entry_point", "add(x)", "entry_point='add(x)' is not the name"),
        ("setup", "def add(x):", "IndentationError"),
    ],
)
def test_tests_that_no_program_passes(column: str, value: Any, message: str) -> None:
    """More of them are in tests/system/test_broken_tests.py."""
    assert message in str(fault(CODE, {**CODE_ROW, column: value}))


def test_a_setup_may_be_null_or_a_list_of_lines() -> None:
    lines, tests = ["import math", "pi = math.pi"], [{"input": "1", "output": "2"}]
    for setup, read in ((None, ""), (lines, "\n".join(lines))):
        assert code_tests.unit_test(test="assert f(1)", setup=setup).setup == read
        assert code_tests.output_test(tests=tests, setup=setup).setup == read
    with pytest.raises(ValueError, match="setup=3 is not text"):
        code_tests.output_test(tests=tests, setup=3)


@pytest.mark.slow
# What other tests have left to the garbage collector is not theirs.
@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_tests_that_a_program_can_pass() -> None:
    """Without setup, with one that the config fixes, called by name; warnings are no errors."""
    plain = {name: CODE_ROW[name] for name in ("test", "entry_point")}
    tried = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert add(1) == 2"
    good = [r"assert add('\d') == 2", "def check(*given):\n    assert given[0](1) == 2", tried]
    assert fault(CODE, plain, *({**plain, "test": test} for test in good)) is None
    assert fault(CODE, {**CODE_ROW, "setup": ""}) is None
    fenced = SHIPPED + "code_format_reward"
    assert fault(fenced, plain) is None
    assert "entry_point=3 is not the name" in str(fault(fenced, {"entry_point": 3}))


OWN = """
import json

def graded(prompts, completions, *, keys, strict=False, **columns):
    return [0.0] * len(completions)

def check_row(*, keys, strict):
    if strict and not json.loads(keys):
        return f"keys={keys} is empty"

graded.check_row = check_row

class Closest:
    def __init__(self, largest):
        self.largest = largest

    def __call__(self, prompts, completions, **columns):
        return [0.0] * len(completions)

    def check_row(self, **columns):
        return None if columns["level"] <= self.largest else f"level={columns['level']}"
"""


def test_rewards_of_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config arguments are given, what it raises is a fault, and a class has its object."""
    (tmp_path / "own_checked_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    graded = {"_component_": "own_checked_rewards.graded", "strict": True}
    rows = [{"keys": text, "level": n} for n, text in enumerate(['["a"]', "[]", "{"])]
    said = str(fault(graded, *rows))
    assert "2 of 3 rows" in said and "keys=[] is empty (row 1); the reward" in said
    assert "JSONDecodeError" in said
    assert "missing 1 required keyword-only argument: 'strict'" in str(
        fault({"_component_": "own_checked_rewards.graded"}, *rows)
    )
    closest = {"_component_": "own_checked_rewards.Closest", "largest": 0}
    said = str(fault(closest, *rows))
    assert "2 of 3 rows" in said and "level=1 (row 1)" in said and "level=2 (row 2)" in said
    isolated = {**closest, "isolation": "process"}
    assert "missing 1 required positional argument: 'self'" in str(fault(isolated, *rows))


def test_rows_without_a_gold_are_left_out_unless_they_are_the_most(
    llama3_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted as they stand in the data, whatever was left out before."""
    golds = {"a very long prompt": "1", "b": "2", "c": "none", "d": None, "e": "3"}
    rows = [{"prompt": prompt, "answer": gold} for prompt, gold in golds.items()]
    data = RLDataset(llama3_tokenizer, rows=rows, chat=False, max_prompt_tokens=8)
    with caplog.at_level(logging.INFO):
        RewardSet.from_config([MATH_NODE]).check_data(data, key="dataset")
    assert [*data.row_numbers] == [1, 4]
    assert [(item["index"], item["prompt"].text) for item in data] == [(0, "b"), (1, "e")]
    assert caplog.messages[1:] == [
        "dataset: 2 of 4 rows (counted from 0) are left out: the reward 'math_correctness_reward' "
        "can score no answer: answer='none' does not state one number (row 2); the reward "
        "'math_correctness_reward' can score no answer: answer=None is neither text nor a number "
        "(row 3)."
    ]
    most = RLDataset(llama3_tokenizer, rows=rows[1:4], chat=False)
    with pytest.raises(ValueError, match="2 of 3 rows .*: answer='none'.*Correct or remove"):
        RewardSet.from_config([MATH_NODE]).check_data(most, key="dataset")
