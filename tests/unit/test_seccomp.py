"""The table of system calls: the numbers are the kernel's, on both architectures."""

import re
from pathlib import Path

import pytest

from torchtune_grpo.sandbox import seccomp

HEADERS = (
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h /usr/include/asm/unistd_64.h",
    "/usr/include/asm-generic/unistd.h",
)


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_those_of_the_kernels_headers(column):
    headers = [path for path in map(Path, HEADERS[column].split()) if path.exists()]
    if not headers:
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", headers[0].read_text())
    known = {"newfstatat": dict(found)["fstatat"]} if column else {}
    known = {**dict(found), **known, "fchmodat2": "452"}  # which older headers lack
    tables = (seccomp._CALLS, seccomp._WITHOUT_EFFECT, *seccomp._CONDITIONS)
    calls = ",".join(tables).split(",")
    assert len(calls) > 150
    for name, *numbers in map(str.split, calls):
        assert numbers[column] == known.get(name, "-"), name


@pytest.mark.parametrize("column", [0, 1])
def test_no_jump_leaves_the_program(column):
    """Which the kernel would refuse, and cannot be tried for another architecture."""
    program = seccomp._program(column, 0)
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    for place, (operation, _, if_true, if_false, *_) in enumerate(steps):
        if operation & 7 == 5:  # a jump
            assert place + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1][0] == seccomp._RETURN
