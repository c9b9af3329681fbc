"""Interpolation of measured costs: a sum of non-negative shares, one per size that costs can depend on.

A layer on a part of n items takes

    a + b*items + c*rows + d*squares + e*mixed + f*units + g*linked + h*cross

with all coefficients at or above zero, so that more work never costs less, far outside what was measured
too. `squares` is the sum of squared lengths (attention within items), `cross` the sum of length times
linked rows (cross-attention), `units` what a loss is counted in; `mixed` is the rows where items differ in
length, 0 where one batched call can take them all. Relative errors are minimised: a small
part's cost matters as much as a large one's, there are more of them.

Example: times 12, 22, 42 for rows 10, 20, 40 give a = 2, c = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

UNIT = 10**6
"""Coefficients are integers in millionths, so that equal tables give equal answers on every machine."""


class Sizes(NamedTuple):
    """What the cost of a part can depend on."""

    one: int = 1
    items: int = 0
    rows: int = 0
    squares: int = 0
    mixed: int = 0
    units: int = 0
    linked: int = 0
    cross: int = 0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted cost: `coefficients` in millionths (of a nanosecond or byte) per unit of each of `Sizes`."""

    coefficients: tuple[int, ...] = (0,) * len(Sizes._fields)

    def at(self, sizes: Sizes) -> int:
        return evaluate(self.coefficients, sizes)


def evaluate(coefficients: Sequence[int], sizes: Sizes) -> int:
    """Nanoseconds or bytes, rounded to the nearest."""
    return (sum(c * s for c, s in zip(coefficients, sizes, strict=True)) + UNIT // 2) // UNIT


def fit(sizes: Sequence[Sizes], values: Sequence[float]) -> Fit:
    """The non-negative coefficients with the least squared relative error. Values must be above zero."""
    matrix = np.array(sizes, dtype=np.float64)
    target = np.array(values, dtype=np.float64)
    assert len(matrix) == len(target) > 0 and (target > 0).all(), "nothing to fit, or a value that is not above zero"
    solution = _non_negative(matrix / target[:, None], np.ones(len(target)))
    return Fit(coefficients=tuple(round(float(c) * UNIT) for c in solution))


def fit_or_zero(sizes: Sequence[Sizes], values: Sequence[float]) -> Fit:
    """`fit` of what is above zero; zero if nothing is."""
    some = [(s, v) for s, v in zip(sizes, values, strict=True) if v > 0]
    return fit([s for s, _ in some], [v for _, v in some]) if some else Fit()


def cover(sizes: Sequence[Sizes], values: Sequence[float]) -> Fit:
    """`fit_or_zero`, raised until no value lies above it: for memory, where too little is worse than too much."""
    found = fit_or_zero(sizes, values)
    short = max((value / at for s, value in zip(sizes, values, strict=True) if (at := found.at(s)) > 0), default=1.0)
    return Fit(coefficients=tuple(round(c * max(1.0, short)) for c in found.coefficients))


def errors(sizes: Sequence[Sizes], values: Sequence[float]) -> list[float]:
    """Relative error at each size of the fit to all others: what to expect at sizes that were not measured."""
    if len(values) < 2:
        return []
    found = []
    for i, (size, value) in enumerate(zip(sizes, values, strict=True)):
        others = fit([*sizes[:i], *sizes[i + 1 :]], [*values[:i], *values[i + 1 :]])
        found.append(abs(others.at(size) / value - 1))
    return found


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares, exactly: the best of all subsets of columns whose solution is not negative.

    At most 2^8 subsets of a few rows. Of equal solutions the one with fewer columns wins.
    """
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    scaled = matrix / scale
    useful = [column for column in range(matrix.shape[1]) if scaled[:, column].any()]
    best, best_residual = np.zeros(matrix.shape[1]), float(target @ target)
    for count in range(1, min(len(useful), len(target)) + 1):
        for columns in combinations(useful, count):
            chosen = scaled[:, columns]
            solution, _, rank, _ = np.linalg.lstsq(chosen, target, rcond=1e-9)
            if rank < count or (solution < 0).any():
                continue
            residual = float(((chosen @ solution - target) ** 2).sum())
            if residual < best_residual * (1 - 1e-9) - 1e-18:
                best, best_residual = np.zeros(matrix.shape[1]), residual
                best[list(columns)] = solution
    return best / scale
