"""Judging programs in a sandbox, for the tests of code rewards."""

import ctypes
import subprocess
import sys

from hostile_code import HONEST, TEST

from torchtune_grpo.sandbox.code import Limits
from torchtune_grpo.sandbox.exam import Exam

LIMITS = Limits(seconds=0.7)


def judge(sandbox, code, *, test=TEST, setup="", entry_point="solve", seconds=None):
    """Return a sandbox's verdict, under its own limit of time or another."""
    limits = sandbox.limits
    sandbox.limits = Limits(seconds=seconds) if seconds else limits
    verdict = sandbox.judge(code, Exam(entry_point, setup, test))
    sandbox.limits = limits
    assert bool(verdict.why) != verdict.passed
    return verdict


def passes_again(sandbox) -> bool:
    return judge(sandbox, HONEST["plain"]).passed


def run_without(capabilities, script, *arguments) -> subprocess.CompletedProcess:
    """Run a Python script as a root that lacks some capabilities, by number, as in containers."""

    def drop():
        for number in capabilities:
            ctypes.CDLL(None).prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP: none after an exec

    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, preexec_fn=drop, capture_output=True, text=True)
