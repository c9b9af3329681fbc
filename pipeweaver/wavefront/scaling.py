"""Scaling curves: the time of a layer on n workers, from measured points (spindle.md, section 2).

Between two measured counts T(n) = a + b / n, the line through both in 1/n: work that shrinks with n and work that
does not. Measured profiles are not monotone; since workers may idle, no count can be slower than a smaller one, and a
count that gains nothing over a smaller one is left out. Example:

    measured  {1: 8.0, 2: 5.0, 4: 5.2, 8: 2.0}   at counts 1, 2, 3, 4, 8   ->   counts 1, 2, 8: 8.0, 5.0, 2.0
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence


def check_points(name: str, points: Mapping[int, float | None]) -> dict[int, float]:
    """Measured times by number (of workers, of items) as they are. Raises ValueError, naming what is nonsense."""
    if not points:
        raise ValueError(f"profile of {name} has no measured times")
    checked: dict[int, float] = {}
    for number, time in points.items():
        if number < 1:
            raise ValueError(f"profile of {name} has a time for {number}; numbers start at 1")
        if time is None or not isinstance(time, int | float) or math.isnan(time):
            raise ValueError(f"profile of {name} lacks the time for {number}: it is {time}")
        if time <= 0 or math.isinf(time):
            raise ValueError(f"profile of {name} says {time} for {number}; a time must be above zero and finite")
        checked[number] = float(time)
    return dict(sorted(checked.items()))


def repaired(counts: Sequence[int], layer_ns: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(counts, times) of those counts alone that are faster than every smaller one. `counts` ascend."""
    kept: list[tuple[int, int]] = []
    for count, time in zip(counts, layer_ns, strict=True):
        if not kept or time < kept[-1][1]:
            kept.append((count, time))
    return tuple(count for count, _ in kept), tuple(time for _, time in kept)


def curve(name: str, points: Mapping[int, float | None], counts: Sequence[int]) -> dict[int, float]:
    """Times at `counts` from the times measured at other counts, monotone.

    Counts above the largest measured one take its time, the rest of the workers idle. Raises ValueError for nonsense
    among the points, and for a count below the smallest measured one, where nothing is known.
    """
    measured = check_points(name, points)
    known = list(measured)
    times: dict[int, float] = {}
    for count in sorted(counts):
        if count < known[0]:
            raise ValueError(f"profile of {name} starts at {known[0]} workers; the time on {count} was not measured")
        i = bisect_left(known, count)
        if i == len(known):
            time = measured[known[-1]]
        elif known[i] == count:
            time = measured[count]
        else:
            low, high = known[i - 1], known[i]
            slope = (measured[low] - measured[high]) / (1 / low - 1 / high)
            time = measured[high] + slope * (1 / count - 1 / high)
        times[count] = min(time, min(times.values(), default=math.inf))
    return times


def local_times(name: str, points: Mapping[int, float | None], batch: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(counts, times) on every count that divides a batch, from times measured by items per worker.

    Between measured numbers of items times are interpolated linearly; counts that leave more items per worker than were
    ever measured are not valid, with a warning. Raises ValueError for nonsense among the points.
    """
    measured = check_points(name, points)
    known = list(measured)
    if batch < 1:
        raise ValueError(f"the batch of {name} is {batch}; it must be at least 1")
    times: dict[int, float] = {}
    beyond: list[int] = []
    for count in range(1, batch + 1):
        items = batch // count
        if batch % count:
            continue
        if items > known[-1]:
            beyond.append(count)
            continue
        if items < known[0]:
            time = measured[known[0]]  # The worker has less to do than was measured: at most that.
        else:
            i = bisect_left(known, items)
            low, high = known[max(0, i - 1)], known[i]
            weight = 0.0 if low == high else (items - low) / (high - low)
            time = measured[low] + weight * (measured[high] - measured[low])
        times[count] = time
    if beyond:
        warnings.warn(
            f"profile of {name} ends at {known[-1]} items per worker; a batch of {batch} is not planned on "
            f"{', '.join(map(str, beyond))}",
            stacklevel=2,
        )
    return tuple(times), tuple(times.values())
