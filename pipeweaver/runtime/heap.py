"""The C library's heap on a CPU worker: what a step frees stays for the next, and what steps will need is there before the first.

    keep_memory()
    reserve_memory(700 << 20)

Left alone, glibc gives the memory of a step's activations back to the system and takes it again page by page in a later
step: up to half of the step's time, and only in some steps. And as long as the heap still grows, in the first steps of
a run, new pages cost a fifth of the step. Neither changes anything where the C library is not glibc.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP = 32 << 20
"""The largest threshold that glibc takes: what is larger never comes from the heap."""
_BLOCK = 16 << 20


def keep_memory() -> None:
    """Keep what this process frees for what it allocates next."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP)


def reserve_memory(num_bytes: int) -> None:
    """Let the heap grow by so much now, in whole blocks of 16 MiB, after `keep_memory`; by less where that would be more
    than this worker's share of half the free memory, since what is predicted may never be needed."""
    libc = _glibc()
    if libc is None:
        return
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_bytes = min(num_bytes, free // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    blocks: list[int] = []
    for _ in range(num_bytes // _BLOCK):
        block = libc.malloc(_BLOCK)
        if not block:
            break
        ctypes.memset(block, 0, _BLOCK)  # a page is only there once it is written
        blocks.append(block)
    for block in reversed(blocks):
        libc.free(block)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None
