"""Shapes in which models answer with code, and texts that hold no program."""

import pytest

from torchtune_grpo.rewards import extraction
from torchtune_grpo.rewards.extraction import extract_program

ADD = "def add(a, b):\n    return a + b\n"
FENCED = f"```python\n{ADD}```"
WRONG = "def add(a, b):\n    return a - b\n"


def indented(text, by):
    return "\n".join(by + line for line in text.split("\n"))


SHAPES = {
    "alone": FENCED,
    "prose around": f"Here it is:\n\n{FENCED}\n\nThis adds two numbers.",
    "behind thinking": f"<think>{FENCED.replace('+', '-')}</think>\n{FENCED}",
    "two thoughts": f"<think>a</think> Hm. <think>{WRONG}</think>\n{FENCED}",
    "in an answer": f"<think>x</think><answer>\n{FENCED}\n</answer>",
    "tag before the fence": f"<think>x</think><answer>{FENCED}</answer>",
    "tag and spaces": f"<answer> {FENCED} </answer>",
    "plain in an answer": f"<think>x</think>\n<answer>\n{ADD}</answer>",
    "answer behind a draft": f"```python\n{WRONG}```\nNo:\n<answer>{FENCED}</answer>",
    "end of turn": f"{FENCED}<|im_end|>",
    "end of turn, Llama": f"{FENCED}<|eot_id|>",
    "end of text": f"{FENCED}</s>",
    "text behind the fence": f"{FENCED} This adds.",
    "text before the fence": f"The code: {FENCED}",
    "no language": FENCED.replace("python", ""),
    "Python": FENCED.replace("python", "Python"),
    "py": FENCED.replace("python", "py"),
    "py3": FENCED.replace("python", "py3"),
    "ipython3": FENCED.replace("python", "ipython3"),
    "braces": FENCED.replace("python", "{.python .numberLines}"),
    "a title": FENCED.replace("python", 'python title="add.py"'),
    "tildes": FENCED.replace("```", "~~~"),
    "four backticks": FENCED.replace("```", "````"),
    "Code Llama": f"[PYTHON]\n{ADD}[/PYTHON]\nThis adds.",
    "MBPP": f"[BEGIN]\n{ADD}[DONE]",
    "quoted": indented(FENCED, "> "),
    "in a list": "1. Add:\n" + indented(FENCED, "   "),
    "behind a bullet": "- " + indented(FENCED, "  ")[2:],
    "windows": FENCED.replace("\n", "\r\n"),
    "no-break spaces": FENCED.replace("    ", "\u00a0" * 4),
    "tabs": FENCED.replace("    ", "\t"),
    "cut off": FENCED.removesuffix("```"),
    "no fence": ADD,
    "no fence, prose around": f"Here is the code:\n\n{ADD}\nIt adds its arguments.",
    "example behind": f"{FENCED}\nUsage:\n```python\nassert add(1, 1) == 3\n```",
    "helper before": "```python\ndef plus(x, y):\n    return x + y\n```\nThen:\n"
    "```python\ndef add(a, b):\n    return plus(a, b)\n```",
    "draft and correction": f"```python\n{WRONG}```\nWait.\n{FENCED}",
    "quotes in a string": '```python\nQ = "\'\'\'"  # and """ too\n' + ADD + "```\nIt's done.",
    "fence in a docstring": '```python\ndef add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n'
    '    ```\n    """\n    return a + b\n```\nBye.',
    "from the future": "```python\nfrom __future__ import annotations\n" + ADD + "```",
    "a constant function": "```python\nadd = lambda a, b: a + b\n```",
    "output block behind": f"{FENCED}\nOutput:\n```\n3\n```",
    "unnamed draft behind": f"{FENCED}\nIt was:\n```\n{WRONG}```",
    "shell block before": f"```bash\npip install x\n```\n{FENCED}",
    "an open quote in a block before": '```python\nprint(""" a\n```\nNo.\n' + FENCED,
    "glued to the code": FENCED.replace("\n```", "```"),
    "tag instead of a fence": f"<python>\n{ADD}</python>",
    "steps with code": f"1. Now:\n{indented(FENCED, '   ')}\n2. Call:\n   ```\n   add(1)\n   ```",
    "a class": "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n\n"
    "def add(a, b):\n    return Solution().add(a, b)\n```",
    "quotes in a docstring": "```\ndef add(a, b):\n    '''It's \"easy\".'''\n    return a + b\n```",
    "imports apart": "```python\nfrom functools import cache\n```\nand\n```python\n@cache\n"
    "def add(a, b):\n    return a + b\n```",
    "tests of a module": f"{FENCED}\n```py\nfrom my import add\n\ndef test():\n    add(1, 1)\n```",
    "heading and bold": f"### Solution\n\n**Code:**\n\n{FENCED}\n\n### Notes\n- fast",
}
NOTHING = {
    "only thought": f"<think>{FENCED}",
    "thought behind an answer": f"<think>a</think> no idea <think>{FENCED}",
    "another function": FENCED.replace("add", "sub"),
    "only called": "```python\nprint(add(1, 2))\n```",
    "only prose": "One should add both.",
}


def run(text, name="add"):
    program = extract_program(text, setup="import math", entry_point=name)
    module = {}
    try:
        exec(compile(program, "<program>", "exec"), module)
    except Exception as error:
        return error
    return module.get(name)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_program_is_found(shape):
    function = run(SHAPES[shape])
    assert callable(function), function
    assert function(3, 4) == 7


@pytest.mark.parametrize("shape", NOTHING)
def test_there_is_no_program(shape):
    assert not callable(run(NOTHING[shape]))


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(int(input()) + 1)\n```",
        "First:\n```\nprint(0)\n```\nBetter:\n```python\nprint(int(input()) + 1)\n```\nDone.",
        "```python\nprint(int(input()) + 1)\n```\nSample output:\n```\n7\n```",
        "```python\nprint(int(input()) + 1)\n```\nOr:\n```python\nprint(solve(6))  # input\n```",
        "```\nprint(int(input()) + 1)\n```\nSample output:\n```\n7\n```",
        "<think>```\nprint(0)\n```</think><answer>```py\nprint(int(input()) + 1)\n```</answer>",
        "<answer>print(int(input()) + 1)</answer>",
        "print(int(input()) + 1)<|im_end|>",
        "Here you are.\n\nimport sys\nprint(int(input()) + 1)\n\nThis reads a number.",
    ],
)
def test_a_program_is_the_last_block_of_python_that_reads_input(text, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda: "6")
    exec(extract_program(text, setup="", entry_point=None), {})
    assert capsys.readouterr().out == "7\n"


@pytest.mark.parametrize("unit", ['```"""\n"""#\n', '"""\'\'\'\n```"""\n', "```\nx\n", "x\n\n"])
def test_the_search_for_fences_is_linear(unit, monkeypatch):
    """No line is read more than a dozen times, whatever fences and strings 25,000 lines have."""
    read, count = extraction._open_string, []
    monkeypatch.setattr(extraction, "_open_string", lambda *line: count.append(1) or read(*line))
    text = '"""#\n' + unit * 12_500
    for name in ("add", None):
        extract_program(f"{text}{FENCED}", setup="", entry_point=name)
        extract_program(text, setup="", entry_point=name)
    assert len(count) < 4 * 12 * 25_000
