"""A unit test that is broken is not a completion's wrong answer: at start, and while training."""

import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_sandboxes import judge
from processes import children
from ranks import on_two_ranks
from rows import rows_of

from torchtune_grpo.data.code_tests import unit_test
from torchtune_grpo.rewards import CodeReward, Reward, RewardSet
from torchtune_grpo.rewards import code as _code

TEST = "assert solve(1) == 1"


def rows(*tests, setup=""):
    return rows_of(*({"test": test, "entry_point": "solve", "setup": setup} for test in tests))


@pytest.fixture
def rewards():
    rewards = RewardSet([Reward("code", CodeReward(workers=2, timeout=0.7))])
    yield rewards
    rewards.close()


BEFORE = "before it called the function: "
BROKEN = {
    "assert lost == 1": BEFORE + "NameError: name 'lost' is not defined",
    "import numpy\nassert solve(1) == 1": BEFORE + "ModuleNotFoundError: No module named 'numpy'",
    "def check(candidate:": BEFORE + "SyntaxError: ",
    "assert eval('(') == solve(1)": BEFORE + "SyntaxError: ",
    "import sys\nsys.exit()\nsolve(1)": BEFORE + "SystemExit: ",
    "assert solve.__module__ == 'x' and solve(1) == 1": BEFORE + "AssertionError: ",
    "from solution import *\nassert isclose(solve(1), 1)": BEFORE + "NameError: ",
    "from solution import lost\nassert lost(solve(1))": BEFORE + "ImportError: ",
    "for _ in (): solve(1)": BEFORE + "it never did",
    "def check(candidate):\n    def inner(): assert candidate(1) == 1": BEFORE + "it never did",
    "assert solve(lambda: 1) == 1": "the test passes what cannot be sent: a function is not plain",
}


@pytest.mark.parametrize("test", BROKEN)
def test_what_a_test_does_wrong_by_itself_is_not_the_completions(sandbox, test):
    verdict = judge(sandbox, "def solve(n): return 1", test=test)
    assert verdict.test_failed and BROKEN[test] in verdict.why


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("lost", TEST),
        ("def solve(n: return 1", TEST),
        ("import os; os._exit(0)", TEST),
        ("def solve(n): raise ImportError", "try: solve(1)\nexcept ImportError as e: raise e"),
        ("def solve(n): import os; os._exit(0)", TEST),
        ("def solve(n): return open", TEST),
        ("def solve(n): 0", "assert solve(1)[0] == 1"),
        ("def solve(n): return '('", "assert eval(solve(1)) == 1"),
        ("def solve(n): return '1\\nimport lost'", "exec(solve(1))"),
        ("def solve(n): return 0", "def check(f):\n    if f(1): x = 1\n    assert x == 1"),
        ("def solve(n): 1 / 0", "try: x = solve(1)\nexcept Exception: pass\nassert x == 1"),
        ("def solve(n): print('\\udc80')", "import io, sys\nsys.stdout = io.TextIOWrapper("
         "io.BytesIO(), 'utf-8')\nassert solve(1) == 1"),
    ],
)  # fmt: skip
def test_no_completion_can_make_the_test_the_one_that_failed(sandbox, code, test):
    """Or a policy that cannot solve a problem would have it not count."""
    verdict = judge(sandbox, code, test=test)
    assert not verdict.passed and not verdict.test_failed


TRIED = {
    **BROKEN,
    "try: solve(1)\nexcept Exception: pass": "a function that raises in every call passes",
    "def check(f):\n    try: assert f(1)\n    finally: return": "a function that raises in every",
    "while True:\n    try: assert solve(1); break\n    except: pass": "no verdict within 0.7 s",
    "import time\ntime.sleep(9)\nsolve(1)": "no verdict within 0.7 s",
}
SOUND = [
    TEST,
    "def check(candidate):\n    assert candidate(1) == 1",
    "try: x = solve(1)\nexcept Exception: x = None\nassert x[0] == 1",
    "try: solve(1)\nexcept ValueError: pass\nelse: assert 0",
    "import json\nassert json.loads(solve('[1]')) == [1]",
]


@pytest.mark.slow
def test_at_start_every_test_is_tried_on_a_function_that_raises(rewards):
    call, count = rewards.rewards[0].function, len(TRIED)
    found = call.check_rows([{"test": test, "entry_point": "solve"} for test in TRIED])
    assert list(found) == list(range(count))
    for (test, message), said in zip(TRIED.items(), found.values(), strict=True):
        assert message in said and said.startswith("test="), test
    data = rows("assert True", *TRIED, *SOUND * 4)
    total = len(data)
    rewards.check_data(data, key="dataset")
    assert [*data.row_numbers] == list(range(1 + count, total))
    forbidden = "import socket\nsocket.socket()\n"  # to a completion, not to a test
    for setup, error in ("one = 1 / 0\n", "ZeroDivisionError"), (forbidden, "PermissionError"):
        with pytest.raises(ValueError, match=f"1 of 1 rows .*: {error}.*Correct or"):
            rewards.check_data(rows(TEST, setup=setup), key="dataset")


# Broken behind the first call, where a function that raises in every call does not get.
LATER = {
    "assert solve(1) == 1 == lost": "NameError: name 'lost' is not defined",
    "solve(1)\nimport numpy": "ModuleNotFoundError: No module named 'numpy'",
    "assert solve(1) == 1\nassert solve(lambda: 1)": "refused: the test passes what cannot be sent",
    "assert solve(1) == 2": "AssertionError: ",
}


def test_at_start_every_test_is_tried_on_the_rows_own_solution(rewards):
    call, tests = rewards.rewards[0].function, [*LATER, TEST, "try: solve(1)\nexcept: pass"]
    setup = 'def solve(n):\n    """Returns n."""\n'
    own = ["    return n"] * (len(tests) - 1) + ["```\ndef solve(n): return n\n```"]
    rows = [
        {"test": test, "entry_point": "solve", "setup": setup, "solution": solution}
        for test, solution in zip(tests, own, strict=True)
    ]
    *broken, sound, vacuous = call.check_rows(rows).values()
    for message, said in zip(LATER.values(), broken, strict=True):
        assert f"the row's own solution fails: {message}" in said
    assert sound is None and "a function that raises in every call passes" in vacuous


def test_of_many_rows_some_are_tried(rewards, monkeypatch, caplog):
    """The same each time, and the log says how many. More than half of these is too many."""
    monkeypatch.setattr(_code, "_MAX_TRIED", 5)
    broken = "for _ in (): solve({})"
    tests = [f"assert solve({n}) == 1" for n in range(40)]
    columns = [{"test": test, "entry_point": "solve"} for test in tests]
    tried = rewards.rewards[0].function.check_rows(columns)
    assert len(tried) == 5 and not any(tried.values())
    missed = min(set(range(40)) - tried.keys())
    for n in (missed, max(tried)):
        tests[n] = broken.format(n)
    data = rows(*tests)
    with caplog.at_level(logging.INFO):
        rewards.check_data(data, key="dataset")
    assert [*data.row_numbers] == [n for n in range(40) if n != max(tried)]
    assert "Code rewards: trying the tests of 5 of 40 rows." in caplog.messages
    with pytest.raises(ValueError, match="5 of 5 rows"):
        rewards.check_data(rows(*map(broken.format, range(40))), key="dataset")


def test_the_first_rank_tries_for_all(tmp_path):
    """Each leaves the same rows out, raises the same error; the second starts no process."""

    def check(rank):
        rewards = RewardSet([Reward("code", CodeReward(workers=1))])
        data = rows("for _ in (): solve(1)", TEST, TEST)
        rewards.check_data(data, key="dataset")
        with pytest.raises(ValueError) as raised:
            rewards.check_data(rows("for _ in (): solve(1)"), key="dataset")
        processes = len(children())
        rewards.close()
        return [*data.row_numbers], str(raised.value), processes

    (kept, said, processes), second = on_two_ranks(check, folder=tmp_path)
    assert kept == [1, 2] and processes > 0
    assert "answer: test='for _ in (): solve(1)': the test itself failed" in said
    assert second == (kept, said, 0)


def test_tests_are_read_in_many_threads_at_once():
    """Python 3.11 fails if a garbage collection lets one thread parse while another does."""

    def give_way(*_):
        time.sleep(1e-4)

    thresholds = gc.get_threshold()
    test = "".join(
        f"assert solve([[{n}, [2, {n} * 4]]]) == [1, [2, [3, [{n}]]]]\n" for n in range(30)
    )
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(16) as threads:
            read = [*threads.map(lambda _: unit_test(test=test), range(160))]
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
    assert {exam.entry_point for exam in read} == {"solve"}
