"""Is the machine quiet enough to measure on: a fixed kernel, timed on each core, alone and together.

    before = probe(cores)
    ...
    exit_if_busy(before, probe(cores))

Cores are shared with others on many machines, so every benchmark prints this and says "machine busy" (exit
code 3) if the kernel's time moved by more than 5 % between its start and its end.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

BUSY_EXIT = 3
MOST_DEVIATION = 0.05
_SIZE = 384
_SECONDS = 0.8


def cores(count: int) -> list[int]:
    """The first `count` cores that this process may use. Raises ValueError if there are fewer."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < count:
        raise ValueError(f"{count} cores are needed, {len(available)} are available")
    return available[:count]


def probe(cores: Sequence[int]) -> dict[str, float]:
    """Median milliseconds of the kernel: "alone/CORE" for each core, then "together/CORE" for all at once."""
    found = {f"alone/{core}": _timed([core])[0] for core in cores}
    if len(cores) > 1:
        found |= {f"together/{core}": ms for core, ms in zip(cores, _timed(cores), strict=True)}
    return found


def deviation(before: dict[str, float], after: dict[str, float]) -> float:
    """Largest relative change of any of the kernel's times."""
    return max(abs(after[name] / before[name] - 1) for name in before)


def report(title: str, found: dict[str, float]) -> None:
    print(f"machine, {title}: " + ", ".join(f"core {name} {ms:.2f} ms" for name, ms in found.items()))


def exit_if_busy(before: dict[str, float], after: dict[str, float]) -> None:
    """Say how far the kernel's times moved; leave with exit code 3 if that is too far to trust what was measured."""
    moved = deviation(before, after)
    if moved > MOST_DEVIATION:
        print(
            f"machine busy: the fixed kernel moved by {moved:.1%} between start and end, more than {MOST_DEVIATION:.0%}"
        )
        sys.exit(BUSY_EXIT)
    print(f"machine quiet: the fixed kernel moved by {moved:.1%}")


def _timed(cores: Sequence[int]) -> list[float]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(cores)) as pool:
        start = time.time() + 1.5  # all begin together, whoever has started first
        return pool.starmap(_kernel, [(core, start) for core in cores], chunksize=1)


def _kernel(core: int, start: float) -> float:
    os.sched_setaffinity(0, {core})
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    times = []
    time.sleep(max(0.0, start - time.time()))
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
