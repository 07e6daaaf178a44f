"""Programs that read and print, and methods, judged by the inputs and outputs of their rows."""

import base64
import json
import pickle
import zlib
from textwrap import indent

import pytest

from torchtune_grpo.rewards import ProgramReward, Reward, RewardSet

DOUBLE = "n = int(input())\nfor _ in range(n):\n    print(2 * int(input()))"
MAIN = "def main():\n" + indent(DOUBLE, "    ") + "\n"
TESTS = {"inputs": ["2\n3\n4\n", "1\n-5"], "outputs": ["6\n8\n", "-10"]}
PROGRAMS = {
    "input": DOUBLE,
    "sys.stdin": "import sys\nfor x in sys.stdin.read().split()[1:]:\n    print(int(x) * 2)",
    "lines": "import sys\nnext(sys.stdin)\n"
    "for line in sys.stdin: sys.stdout.write(f'{2*int(line)} \\n')",
    "bytes": "import sys\n_, *xs = sys.stdin.buffer.read().split()\n"
    "sys.stdout.buffer.write(b'\\n'.join(b'%d' % (2 * int(x)) for x in xs))",
    "open(0)": "_, *xs = map(int, open(0).read().split())\nprint(*[2 * x for x in xs], sep='\\n')",
    "os.read": "import os\n_, *xs = map(int, os.read(0, 99).split())\nfor x in xs: print(2 * x)",
    "main": f"{MAIN}if __name__ == '__main__':\n    main()",
    "thread": f"import sys, threading\nsys.setrecursionlimit(10**6)\n{MAIN}"
    "threading.Thread(target=main).start()",
    "exit": f"{DOUBLE}\nexit()",
    "return code": f"import sys\n{DOUBLE}\nsys.exit(0)",
    "a global": "count = 0\ndef read():\n    global count\n    count += 1\n"
    "    return int(input())\n"
    "n = read()\nwhile count <= n: print(2 * read())",
    "floats": DOUBLE.replace("2 *", "2.0 *"),
    "blank lines": DOUBLE.replace("print(", "print();print("),
    "class": "class Reader:\n    def __iter__(self):\n"
    "        for _ in range(int(input())): yield int(input())\n"
    "for x in Reader(): print(x * 2)",
    "future": f"from __future__ import annotations\n{DOUBLE}",
}
WRONG = {
    "another number": DOUBLE.replace("2 *", "3 *"),
    "one line": DOUBLE.replace("))", "), end=' ')", 1),
    "nothing": "pass",
    "raises": "1 / 0",
    "fails behind": f"{DOUBLE}\nraise SystemExit(1)",
    "asks for more": f"{DOUBLE}\ninput()",
    "state": "try: n\nexcept NameError: n = 0\nprint(6)\nprint(8)",
    "sleeps": "import time\ntime.sleep(99)",
    "knows the name": "import sys\nsys.modules['__main__'].share = share = 1.0",
    "forges": "class X(BaseException): pass\nX.__name__ = 'AssertionError'\n"
    "raise X('2 of 2 tests pass')",
}
METHOD = """class Solution:
    def add(self, xs: List[int], k: int) -> List[int]:
        return [x + k for x in xs]"""
FORMS = {
    "APPS": TESTS,
    "APPS, as JSON": json.dumps(TESTS),
    "APPS, lines": {"inputs": [["2", "3", "4"]], "outputs": [["6", "8"]]},
    "CodeContests": {"input": TESTS["inputs"], "output": TESTS["outputs"]},
    "pairs": [*zip(TESTS["inputs"], TESTS["outputs"], strict=True)],
    "LiveCodeBench": [
        {"input": i, "output": o, "testtype": "stdin"}
        for i, o in zip(TESTS["inputs"], TESTS["outputs"], strict=True)
    ],
}
PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(FORMS["LiveCodeBench"])))).decode()
FORMS["LiveCodeBench, compressed"] = PRIVATE
CLASS = "class Stack:\n    def __init__(self, *xs): self.xs = [*xs]\n    def push(self, x): "
CLASS += "self.xs.append(x)\n    def pop(self): return self.xs.pop()"
CALLS = [[["Stack", "push", "pop", "pop"], [[1], [2], [], []]]]
METHODS = {
    "APPS": {"fn_name": "add", "inputs": [[[1, 2], 3]], "outputs": [[4, 5]]},
    "APPS, wrapped": {"fn_name": "add", "inputs": [[[1, 2], 3]], "outputs": [[[4, 5]]]},
    "LiveCodeBench": [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}],
    "by name": [{"input": {"xs": [1, 2], "k": 3}, "output": [4, 5]}],
    "decimals": [([[1, 0.1], 0.2], [1.2, 0.3])],
}
NAMED = {
    "SYNTHETIC-1": {"test_cases": [{"input": [[1], 3], "output": [4], "fn_name": "add"}]},
    "DeepCoder": [{"input": "[1]\n3", "output": "[4]", "metadata": {"func_name": "add"}}],
}


@pytest.fixture(scope="module")
def score():
    rewards = {p: ProgramReward(timeout=1.5, partial=p) for p in (False, True)}

    def run(programs, tests=TESTS, *, partial=False, **columns):
        columns["tests"] = tests
        given = {name: [value] * len(programs) for name, value in columns.items()}
        texts = [f"```python\n{program}\n```" for program in programs]
        return rewards[partial]([""] * len(programs), texts, **given)

    yield run
    for reward in rewards.values():
        reward.close()


@pytest.mark.slow
def test_programs_of_many_kinds_pass(score):
    scores = dict(zip(PROGRAMS, score([*PROGRAMS.values()]), strict=True))
    assert scores == dict.fromkeys(PROGRAMS, 1.0)


def test_wrong_ones_do_not(score):
    scores = dict(zip(WRONG, score([*WRONG.values()]), strict=True))
    assert scores == dict.fromkeys(WRONG, 0.0)


@pytest.mark.slow
def test_a_share_of_the_tests(score):
    """None of those that did not come to their end counts; the share does not decide."""
    half = "n = int(input())\nprint(6)\nprint(8)"
    programs = [DOUBLE, half, "1 / 0", WRONG["sleeps"], WRONG["forges"], WRONG["knows the name"]]
    assert score(programs, partial=True) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert ProgramReward().decides and not ProgramReward(partial=True).decides


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tests(score, form):
    assert score([DOUBLE, WRONG["another number"]], FORMS[form]) == [1.0, 0.0]


@pytest.mark.parametrize("form", METHODS)
def test_methods_and_functions(score, form):
    """With the imports that their sites provide."""
    function = "def add(xs, k):\n    return tuple(x + k for x in xs)"
    programs = [METHOD, function, METHOD.replace("+ k", "- k"), DOUBLE]
    assert score(programs, METHODS[form], fn_name="add") == [1.0, 1.0, 0.0, 0.0]


def test_a_function_is_not_sought_in_a_class_that_is_only_spoken_of(score):
    function = "def add(xs, k):\n    return [x + k for x in xs]"
    programs = [
        f"# No class Solution is needed.\n{function}",
        f"pass\n```\n<think>\nclass Solution: ...\n</think>\n```python\n{function}",
        f"pass\n```\n<think>\n{function}\n</think>\n```python\n{METHOD}",
        f"pass\n```\n> ```python\n{indent(METHOD, '> ')}\n> ```\n",
    ]
    assert score(programs, METHODS["APPS"]) == [1.0] * 4


@pytest.mark.parametrize("form", NAMED)
def test_tests_that_name_their_function(score, form):
    assert score([METHOD, METHOD.replace("+ k", "- k")], NAMED[form]) == [1.0, 0.0]
    metadata = json.dumps({"func_name": "add"})
    assert score([METHOD], METHODS["LiveCodeBench"], fn_name=metadata) == [1.0]


def test_how_outputs_are_compared(score):
    for printed, wanted, same in (
        ("0.33333333", "0.3333333", True), ("0.33", "0.3333333", False), ("1e3", "1000", True),
        ("2", "2.0", True), ("3.0000001", "3", False), (f"{10**20 + 1}", f"{10**20}", False),
        ("nan", "nan", True), ("nan", "1.0", False), ("sNaN", "1.0", False), ("Yes", "YES", False),
        (" a  b \n\n", "a b", True), ("a\nb", "a b", False), ("", "a", False),
    ):  # fmt: skip
        tests = {"inputs": [""], "outputs": [wanted]}
        assert score([f"print({printed!r})"], tests) == [float(same)], (printed, wanted)


def test_methods_called_in_sequence(score):
    tests = {"inputs": CALLS, "outputs": [[None, None, 2, 1]]}
    wrong = CLASS.replace("pop()", "pop(0)")
    assert score([CLASS, wrong], tests, fn_name="Stack") == [1.0, 0.0]


def hostile_pickle(module, name):
    data = f"c{module}\n{name}\n(S'true'\ntR.".encode()
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("[no", "JSONDecodeError"),
        ("no", "Error: Incorrect padding"),
        (hostile_pickle("os", "system"), "a pickle of text has no os.system"),
        ({"inputs": [], "outputs": []}, "there is no test"),
        ({"inputs": ["1"], "outputs": []}, "ValueError"),
        ({"inputs": ["1"]}, "KeyError: 'outputs'"),
        (None, "TypeError"),
        ([{"input": "1"}], "KeyError: 'output'"),
    ],
)
def test_rows_that_cannot_be_judged(tests, why):
    assert why in ProgramReward.check_row(tests=tests)


@pytest.mark.slow
def test_a_row_is_tried_by_its_own_solution():
    reward = ProgramReward(timeout=1.5)
    right = "import sys\nx = 1\n" + DOUBLE
    solution = [right, WRONG["another number"], json.dumps([right, ""]), ["1 / 0"], "[]", None]
    solution.append(["print 2", "import sys\nsys.stdout.fileno()", right])  # Python 2, no file
    for column in ("solution", "solutions", "canonical_solution"):
        faults = reward.check_rows([{"tests": TESTS, column: own} for own in solution])
        assert faults[0] is None and "solution fails: AssertionError: test 1 of 2" in faults[1]
        assert "ZeroDivision" in faults[3]
        assert faults[2] is faults[4] is faults[5] is faults[6] is None
    empty = {"inputs": ["1"], "outputs": [""]}
    assert reward.check_rows([{"tests": TESTS}, {"tests": empty}]) == {0: None, 1: None}
    rewards = RewardSet([Reward("programs", reward)])
    assert rewards.rewards[0].decides
    rewards.close()
