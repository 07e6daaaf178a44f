"""Honest programs of many kinds: they pass, or are refused as such, and are never called wrong."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from code_sandboxes import run_without

from torchtune_grpo.rewards import CodeReward

LIST_NODES = """class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

def linked(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def values_of(node):
    values = []
    while node:
        values.append(node.val)
        node = node.next
    return values
"""

# Name: the program, and the test that calls it. `f` is the function, unless the test names a class.
FUNCTIONS = {
    "big numbers": ("def f(n):\n  return 7 ** n", "assert f(300) == 7 ** 300"),
    "floats": ("def f(x):\n  return x / 3", "assert abs(f(1.0) - 0.333333) < 1e-4"),
    "not a number": ("def f():\n  return float('nan')", "x = f()\nassert x != x"),
    "its name": ("def f(): return 1", "assert f.__name__ == 'f'"),
    "state of its own": ("def f():\n  f.count += 1\nf.count = 0", "f()\nassert f.count == 1"),
    "type": ("def f(x, kind): return kind(x), type(x)", "assert f('2', int) == (2, str)"),
    "processes": ("from multiprocessing import Pool\ndef f(xs):\n  with Pool(2) as p:\n"
                  "    return p.map(str, xs)", "assert f([1]) == ['1']"),
    "commands": ("import subprocess\ndef f(): return subprocess.check_output('ls')", "assert f()"),
    "bytes": ("def f(b):\n  return b.hex().encode()", "assert f(b'\\x01z') == b'017a'"),
    "keyword": ("def f(a, *, b=2, **c):\n  return a, b, c", "assert f(1, b=3, d=4) == "
                "(1, 3, {'d': 4})"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(20_000)\ndef f(n):\n"
                       "  return n and 1 + f(n - 1)", "assert f(5000) == 5000"),
    "in place, nested": ("def f(m):\n  m[0][0] = 9", "x = [[1]]\nf(x)\nassert x == [[9]]"),
    "printed text is tested": ("def f():\n  print(1, 2, sep='-')", "import io, contextlib\n"
                               "o = io.StringIO()\nwith contextlib.redirect_stdout(o): f()\n"
                               "assert o.getvalue() == '1-2\\n'"),
    "raises": ("def f(x):\n  raise ValueError(f'bad {x}')", "try: f(1)\nexcept ValueError as e:\n"
               "  assert str(e) == 'bad 1'\nelse: assert 0"),
    "generator": ("def f(n):\n  yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "closure": ("def f(n):\n  return lambda x: x + n", "assert f(2)(3) == 5"),
    "namedtuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f():\n"
                   "  return P(1, 2)", "p = f()\nassert p == (1, 2) and p.y == 2"),
    "dataclass": ("from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f():\n"
                  "  return P(4)", "assert f().x == 4 and 'x=4' in repr(f())"),
    "Counter": ("from collections import Counter\ndef f(s): return Counter(s)",
                "c = f('aab')\nassert c == {'a': 2, 'b': 1} and c.most_common(1) == [('a', 2)]"),
    "Fraction": ("from fractions import Fraction\ndef f(): return Fraction(1, 3)",
                 "from fractions import Fraction\nassert f() == Fraction(2, 6)"),
    "date": ("from datetime import date, timedelta\ndef f(d): return d + timedelta(days=1)",
             "from datetime import date\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)"),
    "match object": ("import re\ndef f(s): return re.match('(a+)', s)",
                     "assert f('aab').group(1) == 'aa' and f('b') is None"),
    "files": ("import os, tempfile\ndef f(s):\n  with tempfile.NamedTemporaryFile('w+') as t:\n"
              "    t.write(s); t.seek(0); return t.read()", "assert f('x') == 'x'"),
    "threads": ("from concurrent.futures import ThreadPoolExecutor\ndef f(xs):\n"
                "  with ThreadPoolExecutor(2) as p: return [*p.map(str, xs)]",
                "assert f([1, 2]) == ['1', '2']"),
    "async inside": ("import asyncio\nasync def g(x): return x + 1\ndef f(x):\n"
                     "  loop = asyncio.new_event_loop()\n  return loop.run_until_complete(g(x))",
                     "assert f(1) == 2"),
    "async": ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "numpy": ("import numpy as np\ndef f(xs): return np.cumsum(xs)",
              "assert list(f([1, 2])) == [1, 3]"),
    "function as argument": ("def f(g, x): return g(x)", "assert f(lambda x: x + 1, 1) == 2"),
    "class": ("class Stack:\n  def __init__(self): self.xs = []\n  def push(self, x): "
              "self.xs.append(x)\n  def pop(self): return self.xs.pop()",
              "s = Stack()\ns.push(1)\ns.push([2])\nassert s.pop() == [2] and s.xs == [1]"),
    "class methods": ("class Temp:\n  def __init__(self, c): self.c = c\n  @classmethod\n"
                      "  def zero(cls): return cls(0)\n  @staticmethod\n  def k(c): return c + 273"
                      "\n  @property\n  def f(self): return self.c * 9 / 5 + 32",
                      "assert Temp.zero().f == 32.0 and Temp.k(1) == 274"),
    "class with len and items": ("class Grid:\n  def __init__(self): self.d = {}\n"
                                 "  def __len__(self): return len(self.d)\n"
                                 "  def __getitem__(self, k): return self.d[k]\n"
                                 "  def __setitem__(self, k, v): self.d[k] = v\n"
                                 "  def __iter__(self): return iter(self.d)\n"
                                 "  def __str__(self): return 'grid'",
                                 "g = Grid()\ng[1, 2] = 3\nassert len(g) == 1 and g[1, 2] == 3 and "
                                 "[*g] == [(1, 2)] and f'{g}' == 'grid'"),
    "class, equality": ("class Point:\n  def __init__(self, x): self.x = x\n"
                        "  def __eq__(self, o): return self.x == o.x",
                        "assert Point(1) == Point(1)"),
    "class, arithmetic": ("class Vec:\n  def __init__(self, x): self.x = x\n"
                          "  def __add__(self, o): return Vec(self.x + o.x)",
                          "assert (Vec(1) + Vec(2)).x == 3"),
    "class, context": ("class Timer:\n  def __enter__(self): return self\n"
                       "  def __exit__(self, *_): self.done = True",
                       "with Timer() as t: pass\nassert t.done"),
    "class, with its own": ("class Node:\n  def __init__(self, v, next=None): self.v, self.next = "
                            "v, next", "a = Node(1)\nb = Node(2, a)\nassert b.next.v == 1 and "
                            "b.next is a"),
    "tree that it builds": ("class Node:\n  def __init__(self, v): self.v, self.left = v, None\n"
                            "def f(xs):\n  root = Node(xs[0])\n  root.left = Node(xs[1])\n"
                            "  return root", "t = f([1, 2])\nassert (t.v, t.left.v) == (1, 2) and "
                            "t.left.left is None"),
    "linked list": ("def f(head):\n  last = None\n  while head:\n"
                    "    head.next, last, head = last, head, head.next\n  return last",
                    "assert values_of(f(linked([1, 2, 3]))) == [3, 2, 1]"),
    "method": ("class Solution:\n  def add(self, a, b): return a + b",
               "def check(candidate): assert candidate(a=1, b=2) == 3"),
}  # fmt: skip
REFUSED = {
    "async": "refused: ValueError: a coroutine was expected",
    "processes": "FileNotFoundError: ",
    "commands": "PermissionError: ",
    "numpy": "ModuleNotFoundError: No module named 'numpy'",
    "function as argument": "refused: the test passes what cannot be sent: a function is",
    "class, equality": "refused: eq of an object that is not plain data",
    "class, arithmetic": "refused: TypeError: unsupported operand type",
    "class, context": "refused: TypeError: '_StandIn' object does not support the context manager",
}


@pytest.fixture(scope="module")
def verdicts():
    codes, tests = zip(*FUNCTIONS.values(), strict=True)
    names = [(re.findall(r"^class (\w+)", code, re.MULTILINE) or "f")[-1] for code in codes]
    names = [name if name in test else "f" for name, test in zip(names, tests, strict=True)]
    names[-1] = "Solution().add"
    reward = CodeReward(workers=2)
    found = reward.judge(codes, test=tests, entry_point=names, setup=[LIST_NODES] * len(codes))
    reward.close()
    return dict(zip(FUNCTIONS, found, strict=True))


@pytest.mark.slow
def test_packages_that_are_allowed():
    """With namespaces and without, and no others."""
    test = """import numpy as np
def check(f):
    assert np.allclose(f(np.arange(3)), [0, 2, 4]) and f(np.arange(3)).dtype == np.int64
    assert f(np.float32(2)) == 4 and f(np.array(["a", "b"])[:1])[0] == "aa"
"""
    double = "import numpy as np, numpy.polynomial\ndef f(x): return np.char.multiply(x, 2) if "
    double += "x.dtype.kind == 'U' else np.multiply(x, 2)"
    programs = [double, "def f(x): return x", "import torch\ndef f(x): return x * 2"]
    starts = ["", "AssertionError", "ModuleNotFoundError: No module named 'torch'"]
    reward = CodeReward(packages=["numpy"], workers=1)
    for namespaces in (True, False):
        for sandbox in reward._sandboxes:
            sandbox.close()
            sandbox.namespaces = namespaces
        found = reward.judge(programs, test=[test] * 3, entry_point=["f"] * 3, setup=[""] * 3)
        assert [v.why[: len(start)] for v, start in zip(found, starts, strict=True)] == starts
        assert found[0].passed
    reward.close()
    with pytest.raises(ValueError, match="packages has 'nunpy', which is no installed package"):
        CodeReward(packages=["nunpy"])


# The files of a package that imports another when asked to, and starts a thread when imported.
PACKAGE = {
    "threaded/__init__.py": "import threading, neighbour\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "def two():\n  from threaded import later\n  return later.two",
    "threaded/later.py": "two = 2",
    "neighbour.py": "",
}
JUDGE = """
import sys
from torchtune_grpo.sandbox.code import CodeSandbox, Limits
from torchtune_grpo.sandbox.exam import Exam
code = "import threaded, tempfile\\ndef f():\\n  tempfile.TemporaryFile()\\n  return threaded.two()"
for namespaces in (True, False):
    sandbox = CodeSandbox(Limits(seconds=5), [f"{sys.argv[1]}/threaded"], namespaces)
    print(sandbox.judge(code, Exam("f", test="assert f() == 2")).passed, sandbox.confinement())
    sandbox.close()
"""


def test_a_package_below_tmp_that_starts_a_thread():
    """As pandas does; from then on the kernel refuses an ordinary user namespaces."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for name, text in PACKAGE.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text)
        ran = run_without([21], JUDGE, folder)  # SYS_ADMIN, as an ordinary user
    assert ran.returncode == 0, ran.stderr
    namespaces, landlock = ran.stdout.splitlines()
    assert namespaces.startswith("True ") and landlock.startswith("True "), ran.stdout
    assert "Invalid argument" not in namespaces  # from unshare, if there is a thread


def test_the_page_says_how_many_are_refused():
    page = (Path(__file__).parents[2] / "docs/reward_hacking.md").read_text()
    assert f"Of {len(FUNCTIONS)} honest programs, {len(REFUSED)} are refused" in page


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_classes(verdicts, name):
    why = REFUSED.get(name, "")
    assert verdicts[name].why[: len(why) or None] == why
    kind = "passed" if not why else "broken_test" if "the test passes what" in why else "refused"
    assert verdicts[name].kind == kind
