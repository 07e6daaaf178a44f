"""Code rewards: what a test sees of a program, and what a program is; in real sandboxes."""

import json
import struct

import pytest
from code_sandboxes import judge
from hostile_code import HONEST, QUICK, TEST, WRONG
from processes import children

from torchtune_grpo.rewards import CodeReward, Reward, RewardSet, TrainerState, code_format_reward
from torchtune_grpo.rewards.extraction import MAX_BLOCKS, code_blocks, extract_program


@pytest.mark.parametrize("name", [*HONEST, *WRONG])
def test_honest_programs_pass_and_wrong_ones_fail(sandbox, name):
    verdict = judge(sandbox, HONEST.get(name) or WRONG[name])
    assert verdict.passed == (name in HONEST)


def test_values_cross_as_what_they_are(sandbox):
    test = """
def check(candidate):
    for value in [None, True, False, 0, -1, 2 ** 200, -0.0, 1e300, float('inf'), b'x',
                  'ä\\ud800\\x00', 1j, [], (), {}, set(), frozenset([1]),
                  [(1, [2.5, {'a': (None,)}])],
                  {1: {2}, (1, 2): 'x', None: b''}]:
        got = candidate(value, key=[value])
        assert repr(got) == repr((value, [value])) and type(got[0]) is type(value), (got, value)
    nan = candidate(float('nan'), key=1)[0]
    assert nan != nan
"""
    assert judge(sandbox, "def solve(x, *, key): return (x, key)", test=test).passed
    ordered = "import collections\ndef solve(): return collections.OrderedDict(a=2)"
    test = "assert solve() == {'a': 2} and type(solve()) is dict"
    assert judge(sandbox, ordered, test=test).passed


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = []; x.append(x); return x", "NotPlain: nested too deep"),
        ("return 'x' * 2 ** 24", "process sent 16777259 bytes at once, more than 16777216"),
    ],
)
def test_why_an_answer_does_not_cross(sandbox, code, why):
    assert judge(sandbox, f"def solve(n):\n  {code}", seconds=5).why.endswith(why)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("yield from range(n)", "assert list(solve(3)) == [0, 1, 2]"),
        ("return map(str, range(n))", "assert [*solve(2)] == ['0', '1'] and next(solve(1)) == '0'"),
        ("return zip('ab', range(n))", "assert dict(solve(2)) == {'a': 0, 'b': 1}"),
    ],
)
def test_iterators_cross_as_iterators_of_their_items(sandbox, code, test):
    assert judge(sandbox, f"def solve(n):\n  {code}", test=test).why == ""
    wrong = f"{test}\nassert next(solve(1)) is None"
    assert "AssertionError" in judge(sandbox, f"def solve(n):\n  {code}", test=wrong).why
    listed = "assert solve(1) == list(solve(1))"
    assert judge(sandbox, f"def solve(n):\n  {code}", test=listed).why.startswith("refused: eq")


ALWAYS = """
class Always:
    def __getattr__(self, name): return Always()
for name in ('eq ne lt le gt ge hash contains bool len int float index abs neg round call getitem '
             'add radd sub rsub mul truediv mod pow and or xor format array').split():
    setattr(Always, f'__{name}__', lambda *_, **__: Always())
Always.__hash__ = Always.__index__ = Always.__len__ = lambda self: 1
Always.__bool__ = Always.__eq__ = Always.__contains__ = lambda *_: True
Always.__float__ = lambda self: 0.0
solve = Always()
solve = lambda *_: Always()
"""


@pytest.mark.parametrize(
    "test",
    ["== 2", "!= 1", "in [2, 3]", ">= 2", "in {2: 1}", "- 2 == 0", ".real == 2", "()() == 2",
     ".startswith('x')", ".issubset({2})", ".count(2)", ".is_integer()", "[0] == 2", ".x.y == 2"],
)  # fmt: skip
def test_no_object_pretends_to_be_the_value_expected(sandbox, test):
    for written in (f"assert solve(1) {test}", f"assert 2 == solve(1) {test}"):
        assert judge(sandbox, ALWAYS, test=written).why.startswith("refused: "), written


def test_no_object_pretends_to_be_a_number_or_a_text(sandbox):
    other = "import math\nx = solve(1)\nassert {}"
    for use in ("abs(x - 2) < 1e-6", "math.isclose(x, 2)", "2 in x", "sorted([x, 2]) == [2, 2]",
                "max(x, 2) == 2", "f'{x:.2f}' == '2.00'", "{x: 1}[x]", "divmod(x, 2)"):  # fmt: skip
        verdict = judge(sandbox, ALWAYS, test=other.format(use))
        assert not verdict.passed and not verdict.test_failed, use


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("x.sort(); x.append(9)", "x = y = [3, 1, 2]\nsolve(x)\nassert y == [1, 2, 3, 9]"),
        ("x.pop('a'); x['b'].add(1)", "x = {'a': 1, 'b': set()}\nsolve(x)\nassert x == {'b': {1}}"),
        ("x.add(2)", "x = {1}\nsolve(x=x)\nassert x == {1, 2}"),
        ("x.append(1); raise ValueError", "x = []\ntry: solve(x)\nexcept ValueError: pass\n"
         "assert x == [1]"),
        ("print('a', x); print(2)", "import contextlib, io\ncaught = io.StringIO()\n"
         "with contextlib.redirect_stdout(caught): solve([1])\n"
         "assert caught.getvalue() == 'a [1]\\n2\\n'"),
        ("print('no')", "import sys, io\nsolve(1)\nsys.stdout = io.StringIO()\nsolve(2)\n"
         "assert sys.stdout.getvalue() == 'no\\n'"),
    ],
)  # fmt: skip
def test_what_a_function_does_to_arguments_and_prints_is_seen(sandbox, code, test):
    assert judge(sandbox, f"def solve(x):\n    {code}", test=test).why == ""
    assert judge(sandbox, "def solve(x): pass", test=test).why.startswith("AssertionError")


def forges(data, *, length=None, then="os._exit(0)"):
    """A program whose function writes an answer of its own, and does something else."""
    message = struct.pack("!I", length or len(data)) + data
    return f"import os\ndef solve(n):\n    os.write(3, {message})\n    {then}\n"


@pytest.mark.parametrize(
    "changed",
    [1, [1], [[0, 1]], [[9, ["list"]]], [[[], 0]], [[0, ["set", "x"]]],
     [[0, ["list", ["same", -1]]]]],
)  # fmt: skip
def test_forged_changes_are_refused(sandbox, changed):
    data = json.dumps({"value": 1, "changed": changed}).encode()
    verdict = judge(sandbox, forges(data), test="assert solve([1]) == 1")
    assert not verdict.passed and not verdict.test_failed and verdict.questions == 1, verdict
    assert verdict.why.startswith(("NotPlain", "TypeError", "ValueError", "IndexError"))


@pytest.mark.parametrize("number", range(3))
def test_a_forged_object_is_not_the_function(sandbox, number):
    """Of which a test may ask for anything, also for what text has."""
    data = json.dumps({"value": ["object", number, "x"]}).encode()
    verdict = judge(sandbox, forges(data), test="assert solve(1).startswith('x')")
    assert verdict.why.startswith("refused: startswith"), verdict


def test_what_is_no_message_is_refused(sandbox):
    for code, why in (
        (forges(b"{"), "sent something that is not a message"),
        (forges(b"\xff"), "sent something that is not a message"),
        (forges(b"half", length=8), "ended"),
    ):
        verdict = judge(sandbox, code)
        assert verdict.why.startswith(f"the completion's process {why}") and not verdict.test_failed


def test_a_right_answer_of_a_process_that_has_ended_is_none(sandbox):
    """Its resources could no longer be read."""
    data, test = b'{"value": 1}', "import time\nassert solve(1) == 1\ntime.sleep(0.05)"
    why = judge(sandbox, forges(data), test=test).why
    assert why == "the completion's process ended before its test did"
    assert judge(sandbox, forges(data, then="while True: pass"), test=test).passed


def test_exceptions_carry_their_message_and_arguments(sandbox):
    code = """
class Mine(ValueError):
    def __init__(self, code): super().__init__(f'code {code}')
class Odd(LookupError):
    def __str__(self): return 'odd'
def solve(n):
    if n == 0: raise Mine(7)
    if n == 1: raise KeyError('k', 2)
    if n == 2: b'\\xff'.decode()
    raise Odd(object())
"""
    test = """
def check(candidate):
    caught = []
    for n in range(4):
        try: candidate(n)
        except Exception as error: caught.append(error)
    mine, key, decode, odd = caught
    assert type(mine) is ValueError and str(mine) == 'code 7'
    assert type(key) is KeyError and key.args == ('k', 2)
    assert type(decode) is UnicodeDecodeError and decode.start == 0 and decode.object == b'\\xff'
    assert type(odd) is LookupError and str(odd) == 'odd'
"""
    assert judge(sandbox, code, test=test).why == ""
    exits = "import sys\ndef solve(n): sys.exit()"  # which ends the test, as in plain Python
    test = "try: solve(1)\nexcept: pass"
    assert judge(sandbox, exits, test=test).why.startswith("SystemExit")


@pytest.mark.parametrize("catch", ["except Exception: pass", "except: pass", "finally: return"])
def test_a_test_that_catches_everything_does_not_pass_a_dead_program(sandbox, catch):
    """Whether it had answered before or not."""
    test = f"def check(f):\n    try: assert f(1) == 1\n    {catch}\n"
    later = f"def check(f):\n    assert f(1) == 1\n    try: f(2)\n    {catch}\n"
    dead = "import os\ndef solve(n): os._exit(0)"
    assert not judge(sandbox, dead, test=test).passed
    code = "import os\ndef solve(n): return n if n == 1 else os._exit(0)"
    assert not judge(sandbox, code, test=later).passed
    compared = "def check(f):\n    try: assert f(1) == 1\n    finally: return\n"
    assert not judge(sandbox, "def solve(n): return object()", test=compared).passed
    assert judge(sandbox, "def solve(n): return 1", test=test).passed
    assert judge(sandbox, "def solve(n): return n // (2 - n)", test=later).passed


def test_answers_as_arguments_are_never_the_tests_fault(sandbox):
    """However deep a completion nests them: a wrong answer, and not a failure of the sandbox."""
    nested = "def solve(x):\n    for _ in range(DEPTH): x = [x]\n    return x"
    for depth in (10, 47, 48, 49, 50, 60):
        for test in (
            "assert solve(solve(1)) == 1",
            "x = 1\nfor _ in range(20): x = [[[solve(x)]]]\nassert x == 1",
            "x = solve(1)\nfor _ in range(120): x = [x]\nassert solve(x) == 1",
        ):
            verdict = judge(sandbox, nested.replace("DEPTH", str(depth)), test=test)
            assert not verdict.passed and not verdict.test_failed
    test = "assert solve(solve(1)) == " + "[" * 40 + "1" + "]" * 40
    assert judge(sandbox, nested.replace("DEPTH", "20"), test=test).passed


@pytest.mark.parametrize("name", ["StopIteration", "StopAsyncIteration", "GeneratorExit"])
@pytest.mark.parametrize(
    "test",
    [
        "for got, x in zip(map(solve, [1, 2]), [1, 2]): assert got == x",
        "assert all(map(solve, [1, 2]))",
        "for got in iter(lambda: solve(1), None): assert got == 1",
        "def results():\n    yield solve(1)\nassert not any(results())",
    ],
)
def test_an_exception_does_not_end_the_tests_loops(sandbox, name, test):
    assert not judge(sandbox, f"def solve(n): raise {name}", test=test).passed


def test_helpers_of_the_prompt_are_the_checkers_own(sandbox):
    """As in HumanEval/32 and /38; the completion cannot replace what the test uses."""
    setup = "def double(n):\n    return 2 * n\n\n"
    test = "def check(candidate):\n    assert candidate(double(21)) == 21\n"
    good = setup + "def solve(n):\n    return n // 2\n"
    bad = "def double(n):\n    return 1\n\ndef solve(n):\n    return 21 if n == 1 else 0\n"
    assert judge(sandbox, good, setup=setup, test=test).passed
    assert not judge(sandbox, bad, setup=setup, test=test).passed


def test_a_test_that_trusts_its_argument_after_the_call_can_be_cheated(sandbox):
    """And one that passes a copy cannot."""
    setup = "def expected(xs): return sum(xs)\n"
    cheats = "def solve(xs): xs.clear(); return 0"
    test = "x = [1, 2]\nassert solve({}) == expected(x)"
    assert judge(sandbox, cheats, setup=setup, test=test.format("x")).passed
    assert not judge(sandbox, cheats, setup=setup, test=test.format("[*x]")).passed


def score(rewards, texts, tests, **more):
    columns = {"test": tests, "entry_point": ["solve"] * len(texts)}
    return rewards(prompts=[""] * len(texts), completions=texts, columns=columns, **more)


@pytest.mark.slow
def test_hostile_and_honest_ones_at_once():
    """Many in parallel, in any order; a set that was closed starts anew."""
    before = set(children())
    good = f"```python\n{HONEST['plain']}```"
    quick = ["exit now", "daemon", "patches builtins", "forges a verdict", "kills everything"]
    texts = [good] * 3
    for name in quick:
        texts += [f"```python\n{QUICK[name]}```", f"# {name}\n{good}"]
    rewards = RewardSet([Reward("code", CodeReward(workers=4, timeout=5))])
    scores = score(rewards, texts, [TEST] * len(texts))
    assert scores.total.tolist() == [1, 1, 1] + [0, 1] * len(quick)
    rewards.close()
    assert set(children()) == before
    assert score(rewards, [good], [TEST]).total.tolist() == [1]
    rewards.close()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```bash\ndef f(): 1\n```", "S\n\ndef f(): 1\n"),
        ("    return 1", "S    return 1\n"),
        ("```python\ndef ff(): 1\n```", "S```python\ndef ff(): 1\n```\n"),
        ("```def f(): 1```\ndef f(): 2", "S\n\ndef f(): 2\n"),
        ("~~~python\ndef f(): 1\n```\n~~~", "S\n\ndef f(): 1\n```\n\n"),
        ("```\nf: F = lambda x: 1\n```", "S\n\nf: F = lambda x: 1\n\n"),
        ("```\ndef f(): 1\n```\n```\nimport pytest\ndef test(): f()\n```", "S\n\ndef f(): 1\n\n"),
        ("```\nf == 1\n```", "S```\nf == 1\n```\n"),
        ("```\nA = 1\n```\n```\ndef f(): g()\n```\n```\nx = f()\n```\n```\ndef g(): 1\n```",
         "S\n\nA = 1\n\n\ndef f(): g()\n\n\ndef g(): 1\n\n"),
    ],
)  # fmt: skip
def test_the_program_of_a_completion(text, program):
    """The setup comes first, and blocks that only define something are kept."""
    assert extract_program(text, setup="S", entry_point="f") == program


def test_the_number_of_blocks_is_bounded():
    """Each is an object; the last of 1,000 counts, and nothing of a text with more."""
    text = "```\nprint()\n```\n" * (MAX_BLOCKS - 1) + "```\ndef f(): 1\n```\n"
    assert extract_program(text, setup="", entry_point="f").strip() == "def f(): 1"
    assert code_blocks(text + "```\nprint()\n```") == []


def test_code_format_reward():
    block = "```python\ndef f(x):\n    return 1\n```"
    think = f"<think>{block}</think>"
    texts = [block, think + block, "~~~\nf = lambda: 1\n~~~"]
    texts += [f"{block}\n{block}", "def f(x): 1", think, "", block[:-3]]
    scores = code_format_reward([""] * 8, texts, entry_point=["f"] * 8)
    assert scores == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.slow
def test_what_a_reward_tells_of_its_verdicts():
    """Why each completion failed, the share of each kind, and a failure that is the test's own."""
    bodies = ["return 1", "return 2", "1 / 0", "(", "while True: 0", "os._exit(0)", "return 1"]
    texts = [f"import os\ndef solve():\n    {body}" for body in bodies]
    texts[3:3] = ["def g(): 1", "x" * 100_001]
    tests = ["assert solve() == 1"] * 8 + ["if 0:\n solve()"]
    rewards = RewardSet([Reward("code", CodeReward(workers=2, timeout=0.7))], max_failure_share=0.5)
    scores = score(rewards, texts, tests, trainer_state=TrainerState(global_step=0, max_steps=1))
    rewards.close()
    assert scores.scores[:8, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert scores.failed[:, 0].tolist() == [False] * 8 + [True]
    starts = ["", "AssertionError", "ZeroDivisionError: ", "NameError: ", "longer than"]
    starts += ["SyntaxError: ", "no verdict within", "the completion's process ended"]
    starts += ["the test itself failed"]
    assert all(map(str.startswith, scores.extra["why"], starts))
    kinds = {"wrong": 1, "exception": 2, "syntax": 1, "timeout": 1, "crash": 2, "refused": 0}
    assert dict(scores.metrics) == {f"code/{kind}": n / 8 for kind, n in kinds.items()}


TESTS = {
    "HumanEval": "def check(candidate):\n    assert candidate(2) == 4",
    "MBPP": ["assert double(2) == 4", "assert set([double(0)]) == {0}"],
    "MBPP, two functions": "assert double(2) == 4 and half(2) == 1",
    "MBPP, nested": ["import math", "assert math.isclose(double(0.5), 1)"],
    "KodCode": "from solution import double\ndef test_two():\n    assert double(2) == 4\n"
    "def test_none():\n    n = int()\n    assert double(n) == 0",
    "KodCode, another": "from solution import double, HALF\ndef test_half():\n"
    "    assert double(HALF) == 1 and isinstance(double(1), int)",
    "unittest": "import unittest\nclass TestCases(unittest.TestCase):\n"
    "    def setUp(self): self.two = 2\n"
    "    def test_it(self): self.assertEqual(double(self.two), 4)\n"
    "if __name__ == '__main__': unittest.main()",
    "LeetCode": "def check(candidate):\n    assert candidate(x = 2) == 4",
}


@pytest.fixture
def code():
    """A reward whose server ends with its test: ``sandbox`` counts what is left of its own."""
    reward = CodeReward(workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize("form", TESTS)
def test_forms_of_tests(code, form):
    """The function's name is the column's, or the one that the test calls."""
    right = "def double(x): return 2 * x"
    named = {"HumanEval": "double", "LeetCode": "Solution().double"}.get(form)
    if form == "LeetCode":
        right = "class Solution:\n    def double(self, x: int) -> int: return 2 * x"
    right = f"HALF = 0.5\ndef half(x): return x * HALF\n{right}"
    programs = [right, right.replace("2 *", "3 *"), right.replace("return", "raise"), "1"]
    columns = {"test": [TESTS[form]] * 4} | ({"entry_point": [named] * 4} if named else {})
    assert code([""] * 4, programs, **columns) == [1, 0, 0, 0]
    row = {name: values[0] for name, values in columns.items()}
    assert code.check_row(**row) is None
    assert code.check_rows([{**row, "solution": right}]) == {0: None}


def test_tests_that_name_no_function(code):
    for test in ("assert 1", "def check(candidate): candidate(int())", "def f(x", ["print(1)"]):
        assert "calls no function; name it by entry_point" in CodeReward.check_row(test=test)
    for test, why in (
        ("import asyncio\nassert asyncio.run(f(1)) == 2", "awaits f(), which stays in another"),
        ("async def test_it():\n    assert await f(1) == 2", "awaits f(), which stays in another"),
        ("with patch('builtins.input', lambda: '1'): assert f() == 1", "replaces input(), which"),
    ):
        assert f": {why}" in CodeReward.check_row(test=test)
    alone = "async def test_it(): assert f(1) == 2\nimport asyncio\nasyncio.run(test_it())"
    assert CodeReward.check_row(test="check(1)") is CodeReward.check_row(test=alone) is None
    check = "def check(n): return n > 1"
    assert code([""], [check], test=["assert check(2) and not check(1)"]) == [1.0]


def test_bad_settings():
    with pytest.raises(ValueError, match="timeout is 0; give a number above 0"):
        CodeReward(timeout=0)


def test_what_a_test_draws_is_new_each_time_and_not_known_to_the_completion(sandbox):
    """Though all of them are forked from one process that has imported random."""
    code = "import random\ndef solve(n): return random.random()"
    test = "import random\nx = random.random()\nassert solve(0) == x\n"
    assert not judge(sandbox, code, test=test).passed
    test = "import random\nsolve(0)\nraise ValueError(random.random())"
    assert judge(sandbox, code, test=test).why != judge(sandbox, code, test=test).why
