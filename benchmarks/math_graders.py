"""Compares the math grader and math-verify on this project's labelled cases.

    python benchmarks/math_graders.py

The cases are those of ``tests/unit/test_math_grading.py``. Prints a JSON line with the number of
cases, and for each grader the right answers that it refuses and the wrong ones that it accepts:

- ``house``: ``grade_math_answer``, ``strict`` where the case says so
- ``math_verify``: math-verify on the text as it is given; it has no ``strict``, and does not expect
  answer tags
- ``math_verify_untagged``: the same on what follows the last ``</think>``, without answer tags
"""

from __future__ import annotations

import json
import logging
import resource
import sys
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
    "math_verify": math_verify_says,
    "math_verify_untagged": math_verify_untagged,
}


def main() -> None:
    """Grade all cases with each grader."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    cases = [case for name in FILES for case in cases_of(name)]
    results = {}
    for name, grade in GRADERS.items():
        pairs = [(case["correct"], grade(case)) for case in cases]
        results[name] = {
            "right_refused": pairs.count((True, False)),
            "wrong_accepted": pairs.count((False, True)),
        }
    report("math_graders", version=version("math-verify"), cases=len(cases), **results)


if __name__ == "__main__":
    main()
