"""glibc's use of freed memory, in a process of its own: its settings cannot be undone."""

import platform

import pytest
from runs import run

COUNT = """
import ctypes
from torchtune_grpo.machine.device import HEAP_BYTES, MAPPED_BYTES, keep_freed_memory

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.mallinfo2.restype = Info
libc.free.argtypes = [ctypes.c_void_p]
def show():
    info = libc.mallinfo2()
    print(info.arena, info.hblkhd)

keep_freed_memory(WEIGHTS)
weights = libc.malloc(WEIGHTS)
show()
fit = [libc.malloc(MAPPED_BYTES) for _ in range(HEAP_BYTES // MAPPED_BYTES - 1)]
show()
more = [libc.malloc(MAPPED_BYTES) for _ in range(200)]
show()
for block in fit + more:
    libc.free(block)
show()
"""


@pytest.mark.parametrize("weights", [0, 300 * 2**20])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc for its own figures")
def test_the_heap_stays_and_large_blocks_beyond_it_are_returned(tmp_path, weights):
    """Beside the weights, which lie in it."""
    (tmp_path / "count.py").write_text(COUNT.replace("WEIGHTS", str(weights)))
    lines = run("count.py", cwd=tmp_path).out.splitlines()
    arena, mapped = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert arena[0] >= 448 * 2**20 + weights
    assert set(arena) == {arena[0]}  # neither grown nor given back
    assert mapped[1] == mapped[0]  # what fits is not mapped
    assert mapped[2] - mapped[1] >= 100 * 2**19  # some of the 200 fit into the room that was left
    assert mapped[3] == mapped[0]
