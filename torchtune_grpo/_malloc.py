"""How the CPU allocator treats freed memory: decoding wants it kept, training without holes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_LIMIT = 32 * 2**20  # the highest M_MMAP_THRESHOLD that glibc accepts
_DEFAULT_PAD = 128 * 2**10
HEAP_BYTES = 448 * 2**20
MAPPED_BYTES = 2**20


def keep_freed_memory() -> None:
    """Gives glibc a heap of 448 MiB that stays, and maps what is large and does not fit by itself.

    By default glibc returns freed memory to the system again and again, to be mapped and zeroed
    page by page when decoding goes on to the next token. A heap that only grows has another fault:
    in training, short-lived tensors lie in it between those that autograd keeps, and leave holes
    into which the next tensor of the same size does not fit, because torch asks for aligned memory;
    it becomes about twice as large as what lives in it. So tensors of 1 MiB and more do not make
    the heap grow (a lower limit costs page faults, a higher one leaves holes); a small model's
    step fits into it as it is. Pages that were never written take no memory. Where there is no
    glibc, nothing happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt, malloc, free = libc.mallopt, libc.malloc, libc.free
    except (OSError, AttributeError):
        return
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, HEAP_BYTES)  # by which the next block makes the heap grow
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_LIMIT)
    free(malloc(_LARGEST_LIMIT - 2**16))
    mallopt(_M_TOP_PAD, _DEFAULT_PAD)
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
