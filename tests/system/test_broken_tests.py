"""A unit test that is broken is not a completion's wrong answer: at start, and while training."""

import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_sandboxes import judge
from processes import children, on_two_ranks
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
        ("def solve(n): return 1", "from solution import lost\nassert lost(solve(1))"),
        ("def solve(n): return 1\nlost = None", "from solution import lost\nassert lost(solve(1))"),
        ("def solve(n): print('\\udc80')", "import io, sys\nsys.stdout = io.TextIOWrapper("
         "io.BytesIO(), 'utf-8')\nassert solve(1) == 1"),
    ],
)  # fmt: skip
def test_no_completion_can_make_the_test_the_one_that_failed(sandbox, code, test):
    """Or a policy that cannot solve a problem would have it not count."""
    verdict = judge(sandbox, code, test=test)
    assert not verdict.passed and not verdict.test_failed


# Sound tests of two names and a constant, of which an entry point is the first or named.
SOUND_ROWS = {
    "imports": "from solution import f, g, LIMIT\nassert f(1) == 1 and g(2) == LIMIT + 1",
    "another first": "from solution import f, g\nassert g(2) == 4 and f(1) == 1",
    "helper": "assert g(f(2)) == 4",
    "helper later": "def check(candidate):\n    assert candidate(1) == 1\n    assert g(2) == 4",
    "star": "from solution import *\nassert g(f(2)) == 4",
    "attributes": "import solution\nassert hasattr(solution, 'g') and solution.g(f(2)) == 4",
    "set up": "import unittest\nfrom solution import f, g\nclass T(unittest.TestCase):\n"
    "    def setUp(self): self.four = g(2)\n    def test(self): assert f(4) == self.four",
    "printed": "import io, sys\nsys.stdout = io.StringIO()\nfrom solution import f, g\n"
    "assert g(f(2)) == 4",
}
RIGHT = "def f(x): return x\ndef g(x): return x * x\nLIMIT = 3\n"
# What a completion may have in place of `g`, apart from a function that is right.
_ODD = "class A{}:\n  {}\ng = A({})"
_CLASS = "@property\n  def __class__(self): {}"
_VALUES = ("None", "4", "'g'", "[4]", "{2: 4}", "object()", "int", "ImportError", "SystemExit")
_RAISED = "ValueError KeyError ImportError NameError SyntaxError AssertionError SystemExit".split()
_RAISED.append("MemoryError")
BLAMES = {
    "nothing": "",
    **{f"value {text}": f"g = {text}" for text in _VALUES},
    **{f"class raises {e}": _ODD.format("", _CLASS.format(f"raise {e}"), "") for e in _RAISED},
    **{f"raises {e}": f"def g(x): raise {e}('g')" for e in _RAISED},
    "class lies": _ODD.format("", "__class__ = str", ""),
    "class dies": "import os\n" + _ODD.format("", _CLASS.format("os._exit(0)"), ""),
    "class calls itself": _ODD.format("", _CLASS.format("return self.__class__"), ""),
    "class hangs": "import time\n" + _ODD.format("", _CLASS.format("time.sleep(9)"), ""),
    "type without a name": "class M(type): __name__ = 5\n" + _ODD.format("(metaclass=M)", "0", ""),
    "fields": _ODD.format("(tuple)", "_fields = 5", ""),
    "list": _ODD.format("(list)", "def __iter__(self): raise ImportError", "[1]"),
    "in itself": "g = []; g.append(g)",
    "deep": "g = 1\nfor _ in range(150): g = [g]",
    "huge": "g = 'x' * 2**24",
    "no names": "import sys\nvars(sys.modules['completion']).clear()",
    "module that raises": "def __getattr__(name): raise ImportError(name)",
    "ends": "raise SystemExit",
    "dies": "import os; os._exit(0)",
    "dies later": "import os, threading\nthreading.Timer(0.02, os._exit, [0]).start()",
}
_FORGES = """
import json, os, struct
def forge(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    data = struct.pack('!I', len(data)) + data
    while data: data = data[os.write(3, data):]
"""
MESSAGES = [
    {"value": ["bytearray", 10**12]}, {"value": ["deque", ["range", 0, 10**12, 1], None]},
    {"value": ["object", 0, "x"]}, {"value": ["object", 1, "x"]}, {"value": ["object", [], {}]},
    {"value": ["namedtuple", ["list"], ["tuple", "x"]]}, {"value": ["ndarray", "O", 1]},
    {"value": 1, "changed": [[0, ["list"]]]}, {"value": 1, "changed": [[0, 1, 2]]},
    {"value": 1, "printed": [1]}, {"value": 1, "printed": "\udc80"}, {"ready": True, "value": 1},
    {"error": ["UnicodeDecodeError", "x", ["list", ["bytearray", 10**12]]]}, {"error": ["x"]},
    *({"error": [name, "g", None]} for name in _RAISED), {"error": 5}, {}, None,
    b"[" + b"[]," * 10**6 + b"1]", b"[" * 10**6, b"1" * 10**6, b"{",
]  # fmt: skip


def judged(completions, tests, **settings):
    """Verdicts of completions that stand behind a right `f`, each with its test."""
    reward = CodeReward(workers=2, timeout=1.0, **settings)
    texts = [f"```python\n{RIGHT.replace(' x * x', ' None')}{code}\n```" for code in completions]
    try:
        return reward.judge(texts, test=tests, entry_point=["f"] * len(tests))
    finally:
        reward.close()


@pytest.mark.slow
@pytest.mark.parametrize("row", SOUND_ROWS)
def test_nothing_that_a_completion_defines_raises_or_returns_blames_the_test(row):
    """A right one passes, so that the row is sound."""
    codes = {**BLAMES, "nothing": "del g", "right": "def g(x): return x * x"}
    verdicts = judged(codes.values(), [SOUND_ROWS[row]] * len(codes))
    *wrong, right = zip(codes, verdicts, strict=True)
    assert right[1].passed, right
    assert [each for each in wrong if each[1].passed or each[1].test_failed] == []


@pytest.mark.slow
@pytest.mark.parametrize("memory_mb", [512, 64])
@pytest.mark.parametrize("at", ["load", "look"])
def test_no_forged_message_blames_the_test(at, memory_mb):
    """Sent while the completion is loaded, and while the test looks for a name."""
    where = "{}" if at == "load" else _ODD.format("", _CLASS.format("{}; os._exit(0)"), "")
    codes = [_FORGES + where.replace("{}", f"forge({message!r})") for message in MESSAGES]
    verdicts = judged(codes, [SOUND_ROWS["imports"]] * len(codes), memory_mb=memory_mb)
    pairs = zip(MESSAGES, verdicts, strict=True)
    assert [(str(m)[:99], v) for m, v in pairs if v.passed or v.test_failed] == []


def test_a_test_that_a_completion_leads_around_its_calls_is_not_passed():
    """Nor is that the test's fault."""
    test = "from solution import f, LIMIT\nfor n in range(LIMIT): assert f(n) == n * n"
    limits = "0 None 'x' 1.5 [] 10**30 object() -1".split()
    verdicts = judged([f"LIMIT = {limit}" for limit in limits], [test] * len(limits))
    assert not any(verdict.passed or verdict.test_failed for verdict in verdicts), verdicts
    assert verdicts[0].why == "with these names, the test ends without a call of the function"


def test_rows_without_a_solution_are_kept_whatever_their_tests_import(rewards):
    """A right answer passes all of them; of those that nothing can fail, none is kept."""
    call = rewards.rewards[0].function
    vacuous = "from solution import f, g\ntry: f(1), g(2)\nexcept Exception: pass"
    tests = [*SOUND_ROWS.values(), vacuous]
    *faults, fault = call.check_rows([{"test": t, "entry_point": "f"} for t in tests]).values()
    assert faults == [None] * len(SOUND_ROWS)
    assert "a function that raises in every call passes" in fault


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
    line = "assert solve([[{0}, [2, {0} * 4]]]) == [1, [2, [3, [{0}]]]]\n"
    test = "".join(line.format(n) for n in range(30))
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(16) as threads:
            read = [*threads.map(lambda _: unit_test(test=test), range(160))]
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
    assert {exam.entry_point for exam in read} == {"solve"}
