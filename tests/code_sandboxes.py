"""Judging programs in a sandbox, for the tests of code rewards."""

from hostile_code import HONEST, TEST

from torchtune_grpo.sandbox import Limits

LIMITS = Limits(seconds=0.7)


def judge(sandbox, code, *, test=TEST, setup="", entry_point="solve", seconds=None):
    """A sandbox's verdict, or what it would be with another limit of time."""
    limits = sandbox.limits
    sandbox.limits = Limits(seconds=seconds) if seconds else limits
    verdict = sandbox.judge(code=code, setup=setup, test=test, entry_point=entry_point)
    sandbox.limits = limits
    assert bool(verdict.why) != verdict.passed
    return verdict


def passes_again(sandbox) -> bool:
    return judge(sandbox, HONEST["plain"]).passed
