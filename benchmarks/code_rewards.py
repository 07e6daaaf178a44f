"""Code rewards: whether verdicts are right, what is left over, and how long a verdict takes.

    python benchmarks/code_rewards.py [HumanEval.jsonl.gz --mutants 4] [--without-namespaces]

Judges 1,000 completions with two workers, a tenth of them hostile, and looks for processes and
files that are left over; then 512 with the default settings, of which every tenth never ends. Then
judges HumanEval's solutions and mutants of them: solutions with one character changed that are
still Python. A plain Python process also runs each of these with its test, with the same limits on
time and memory. Prints a JSON line, and each verdict that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from common import report
from hostile_code import HONEST, HOSTILE, TEST, WRONG

from torchtune_grpo.rewards import CodeReward, code
from torchtune_grpo.sandbox.code import CodeSandbox

COUNT, SECONDS, MEGABYTES = 1000, 3, 512
ASLEEP = "import time\ndef solve(n):\n    time.sleep(99)"
CHARACTERS = "0123456789+-*/%<>=![]():.,' abcdefgijlnrstxy_"


def judge(reward: CodeReward, rows: list[dict[str, str]]) -> tuple[list[bool], float]:
    """Return whether each row's program passes its test, and the milliseconds per program."""
    columns = {name: [row[name] for row in rows] for name in ("test", "entry_point", "setup")}
    start = time.perf_counter()
    verdicts = reward.judge([f"```python\n{row['program']}```" for row in rows], **columns)
    milliseconds = (time.perf_counter() - start) / len(rows) * 1000
    return [v.passed for v in verdicts], round(milliseconds, 1)


def rows_of(programs: list[str], count: int) -> list[dict[str, str]]:
    """Return ``count`` rows of these programs, each different from all others."""
    columns = {"test": TEST, "entry_point": "solve", "setup": ""}
    repeated = enumerate(islice(cycle(programs), count))
    return [{**columns, "program": f"# {i}\n{text.replace('PORT', '80')}"} for i, text in repeated]


def seconds_of_a_step(program: str) -> float:
    """Return the seconds that 512 completions take, of which every tenth is this program."""
    rows, others = rows_of([*HONEST.values()], 512), rows_of([program], 512)
    rows[::10] = others[::10]
    reward = CodeReward()
    judge(reward, rows[1:9])  # starts the processes
    _, milliseconds = judge(reward, rows)
    reward.close()
    return round(milliseconds * 512 / 1000, 1)


def left_over() -> dict[str, int]:
    """Count this process's children and the temporary files."""
    parents = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents.append(int(path.read_text("latin-1").rpartition(")")[2].split()[1]))
    files = os.listdir(tempfile.gettempdir())
    return {"processes": parents.count(os.getpid()), "files": len(files)}


def mutant(problem: dict[str, str], number: int) -> str:
    """Change one character of the solution's code, so that it is still Python."""
    chance = random.Random(f"{problem['task_id']} {number}")
    solution = problem["canonical_solution"]
    places = [place for place, character in enumerate(solution) if not character.isspace()]
    while True:
        place, character = chance.choice(places), chance.choice(CHARACTERS)
        changed = solution[:place] + character + solution[place + 1 :]
        with contextlib.suppress(SyntaxError):
            compile(problem["prompt"] + changed, "", "exec")
            if changed != solution:
                return changed


def passes_in_python(row: dict[str, str]) -> bool:
    """Whether a fresh Python runs the program and its test without an error."""
    limits = f"ulimit -v {MEGABYTES * 2**10} -t {SECONDS}; exec {sys.executable} -I -S -"
    source = f"{row['program']}\n{row['test']}\ncheck({row['entry_point']})\n".encode()
    try:
        run = partial(subprocess.run, ["bash", "-c", limits], capture_output=True)
        return run(input=source, timeout=4 * SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def judge_humaneval(reward: CodeReward, path: str, mutants: int) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        problems = [json.loads(line) for line in file]
    programs = [(p, p["canonical_solution"]) for p in problems]
    programs += [(p, mutant(p, number)) for number in range(mutants) for p in problems]
    rows = [{**p, "setup": p["prompt"], "program": p["prompt"] + text} for p, text in programs]
    found, _ = judge(reward, rows)
    with ThreadPoolExecutor(2) as threads:
        expected = list(threads.map(passes_in_python, rows))
    for row, passes, plain in zip(rows, found, expected):
        if passes != plain:
            print(row["task_id"], "plain Python:", plain, row["program"], sep="\n")
    return {
        "solutions": len(problems),
        "solutions_passed": sum(found[: len(problems)]),
        "mutants": len(rows) - len(problems),
        "verdicts_other_than_plain_python": sum(a != b for a, b in zip(found, expected)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("humaneval", nargs="?")
    parser.add_argument("--mutants", type=int, default=4, help="of each solution")
    parser.add_argument("--without-namespaces", action="store_true")
    args = parser.parse_args()
    if args.without_namespaces:
        code.CodeSandbox = partial(CodeSandbox, namespaces=False)
    tempfile.tempdir = tempfile.mkdtemp()  # nothing else writes there
    reward = CodeReward(workers=2, timeout=SECONDS, memory_mb=MEGABYTES)
    honest, _ = judge(reward, rows_of([*HONEST.values()], COUNT // 2))
    wrong, milliseconds = judge(reward, rows_of([*WRONG.values()], COUNT * 2 // 5))
    hostile, _ = judge(reward, rows_of([*HOSTILE.values()], COUNT // 10))
    humaneval = judge_humaneval(reward, args.humaneval, args.mutants) if args.humaneval else {}
    reward.close()
    result = {
        "completions": COUNT,
        "wrong_verdicts": honest.count(False) + sum(wrong) + sum(hostile),
        "left_over": left_over(),
        "ms_each": milliseconds,
        "s_of_512_a_tenth_of_them_busy": seconds_of_a_step("def solve(n):\n    while True: n"),
        "s_of_512_a_tenth_of_them_asleep": seconds_of_a_step(ASLEEP),
    }
    report("code_rewards", args, **result, **humaneval)


if __name__ == "__main__":
    main()
