"""How often the math grader and math-verify agree with this project's labelled cases.

    python benchmarks/math_graders.py

The cases are those of ``tests/unit/test_math_grading.py``. Prints a JSON line: for each file and
kind the number of cases, and how many of them each grader decides as labelled:

- ``house``: ``grade_math_answer``, ``strict`` where the case says so; ``strict``: everywhere
- ``math_verify``: math-verify on the text as it is given; it has no ``strict``, and does not expect
  answer tags
- ``math_verify_untagged``: the same on what follows the last ``</think>``, without answer tags

and for each grader the CPU seconds, the right answers it refuses and the wrong ones it accepts.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import math_verify
from common import report

TESTS = Path(__file__).parents[1] / "tests/unit"
sys.path.append(str(TESTS))
from test_math_grading import block  # noqa: E402

from torchtune_grpo.rewards import grade_math_answer  # noqa: E402

FILES = ("math_grading_cases", "math_model_answers")
BYTES = 8 * 2**30  # limit on memory, which math-verify would fill for a tower of powers


def cases_of(name: str) -> list[dict[str, Any]]:
    """Return a file's cases, each as a whole text."""
    lines = (TESTS / f"data/{name}.jsonl").read_text(encoding="ascii").splitlines()
    cases = [json.loads(line) for line in lines]
    for case in cases:
        if "content" in case:
            case["text"] = block(case["content"])
    return cases


def house(case: dict[str, Any]) -> bool:
    return grade_math_answer(case["text"], case["gold"], strict=case.get("strict", False))


def strict(case: dict[str, Any]) -> bool:
    return grade_math_answer(case["text"], case["gold"], strict=True)


def math_verify_says(case: dict[str, Any]) -> bool:
    """Return math-verify's verdict, with its own time limits; what it cannot read is wrong."""
    try:
        return math_verify.verify(math_verify.parse(case["gold"]), math_verify.parse(case["text"]))
    except Exception:
        return False


def math_verify_untagged(case: dict[str, Any]) -> bool:
    text = case["text"].rpartition("</think>")[2]
    text = text.replace("<answer>", " ").replace("</answer>", " ")
    return math_verify_says({**case, "text": text})


GRADERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "house": house,
    "strict": strict,
    "math_verify": math_verify_says,
    "math_verify_untagged": math_verify_untagged,
}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    files = {name: cases_of(name) for name in FILES}
    cases = [case for each in files.values() for case in each]
    agrees, cpu_seconds, refused, accepted = {}, {}, {}, {}
    for name, grade in GRADERS.items():
        grade(cases[0])  # loads what it needs
        start = time.process_time()
        verdicts = [grade(case) for case in cases]
        cpu_seconds[name] = round(time.process_time() - start, 2)
        pairs = [(case["correct"], verdict) for case, verdict in zip(cases, verdicts)]
        refused[name], accepted[name] = pairs.count((True, False)), pairs.count((False, True))
        agrees[name] = {id(case) for case, (a, b) in zip(cases, pairs) if a is b}

    def counts(chosen: list[dict[str, Any]]) -> list[int]:
        return [
            len(chosen),
            *(sum(id(case) in those for case in chosen) for those in agrees.values()),
        ]

    kinds = {
        name: {
            kind: counts([case for case in each if case["category"] == kind])
            for kind in dict.fromkeys(case["category"] for case in each)
        }
        for name, each in files.items()
    }
    report(
        "math_graders",
        math_verify=version("math-verify"),
        columns=["cases", *GRADERS],
        total=counts(cases),
        right_refused=refused,
        wrong_accepted=accepted,
        cpu_seconds=cpu_seconds,
        totals={name: counts(each) for name, each in files.items()},
        kinds=kinds,
    )


if __name__ == "__main__":
    main()
