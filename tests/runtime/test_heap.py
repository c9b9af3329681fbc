"""A process that has reserved memory takes none from the system while it uses it, again and again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeweaver.runtime.heap import _glibc

SCRIPT = """
import resource, sys
import torch
from pipeweaver.runtime.heap import keep_memory, reserve_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(24)]  # 4 MiB each
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(4).sum()
keep_memory()
if int(sys.argv[1]):
    reserve_memory(int(sys.argv[1]))
print(faults(), faults())
"""
PAGES = 24 * 1024
"""Of 4 KiB, that are used at a time."""


@pytest.mark.skipif(_glibc() is None, reason="needs glibc")
@pytest.mark.parametrize("reserved", [0, 128 << 20])
def test_reserved_memory_is_there_before_it_is_used(reserved: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(reserved)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = map(int, done.stdout.split())
    if reserved:
        assert first < PAGES / 20 and second < PAGES / 20, "all pages are there"
    else:
        assert first > PAGES / 2 and second < first / 2, "new pages, most of them used again"


@pytest.mark.skipif(_glibc() is None, reason="needs glibc")
def test_no_more_is_reserved_than_there_is() -> None:
    script = "from pipeweaver.runtime.heap import reserve_memory; reserve_memory(1 << 50)"
    environment = os.environ | {"LOCAL_WORLD_SIZE": "64"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
