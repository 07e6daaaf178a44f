"""Lets the CPU allocator keep freed memory, so that decoding does not map it anew per token."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_LIMIT = 32 * 2**20  # the most that glibc accepts


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed blocks instead of returning each to the system.

    By default every tensor of more than 128 KiB to 32 MiB is mapped anew and zeroed page by page
    by the kernel; decoding allocates many such tensors per token. Where there is no glibc, nothing
    happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_LIMIT)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        return
