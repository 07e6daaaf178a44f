"""Code rewards: whether HumanEval's solutions and mutants of them get the verdicts of plain Python.

    python benchmarks/code_verdicts.py HumanEval.jsonl.gz [--mutants 4]

A mutant is a solution with one character changed, and still Python. Each is judged in the sandbox
and run with its test by a Python of its own, with the same limits on time and memory. Prints one
JSON line, and before it each verdict that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtune_grpo.rewards import CodeReward
from torchtune_grpo.sandbox import Verdict

SECONDS, MEGABYTES = 5, 512
CHARACTERS = "0123456789+-*/%<>=![]():.,' abcdefgijlnrstxy_"


def mutant(prompt: str, solution: str, seed: str) -> str:
    """The solution with one character of its code changed, so that it is still Python."""
    chance = random.Random(seed)
    places = [place for place, character in enumerate(solution) if not character.isspace()]
    while True:
        place, character = chance.choice(places), chance.choice(CHARACTERS)
        changed = solution[:place] + character + solution[place + 1 :]
        with contextlib.suppress(SyntaxError):
            compile(prompt + changed, "", "exec")
            if changed != solution:
                return changed


def passes_in_python(problem: dict[str, Any], program: str) -> bool:
    """Whether a fresh Python runs the program and its test without an error."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))

    source = f"{program}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-"],
            input=source.encode(),
            capture_output=True,
            timeout=4 * SECONDS,
            preexec_fn=limit,
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems")
    parser.add_argument("--mutants", type=int, default=4, help="of each solution")
    args = parser.parse_args()
    with gzip.open(args.problems, "rt") as file:
        problems = [json.loads(line) for line in file]
    solutions = [problem["canonical_solution"] for problem in problems]
    pairs = [*zip(problems, solutions)] + [
        (problem, mutant(problem["prompt"], solution, f"{problem['task_id']} {number}"))
        for number in range(args.mutants)
        for problem, solution in zip(problems, solutions)
    ]
    reward = CodeReward(workers=2, timeout=SECONDS, memory_mb=MEGABYTES)
    start = time.perf_counter()
    verdicts = reward.judge(
        [f"```python\n{problem['prompt']}{body}```" for problem, body in pairs],
        test=[problem["test"] for problem, _ in pairs],
        entry_point=[problem["entry_point"] for problem, _ in pairs],
        setup=[problem["prompt"] for problem, _ in pairs],
    )
    seconds = time.perf_counter() - start
    reward.close()
    with ThreadPoolExecutor(2) as threads:
        expected = list(
            threads.map(lambda pair: passes_in_python(pair[0], pair[0]["prompt"] + pair[1]), pairs)
        )
    found = [isinstance(verdict, Verdict) and verdict.passed for verdict in verdicts]
    for (problem, body), verdict, passes, plain in zip(pairs, verdicts, found, expected):
        if passes != plain:
            print(problem["task_id"], "plain Python:", plain, verdict, body, sep="\n")
    count = len(problems)
    result = {
        "solutions": count,
        "solutions_passed": sum(found[:count]),
        "mutants": len(pairs) - count,
        "mutants_passed": sum(found[count:]),
        "verdicts_other_than_plain_python": sum(a != b for a, b in zip(found, expected)),
        "ms_each": round(seconds / len(pairs) * 1000, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
