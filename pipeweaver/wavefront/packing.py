"""A lower bound from what can run at the same time, and a sketch of a plan that comes near it.

At any moment a schedule runs some set of (MetaOp, count) that together need at most N workers, and of MetaOps that
depend on each other one at most. How long it runs each such set is a solution of

    minimise  sum of y[s]     such that   sum over the sets s with m on n workers of y[s] / T[m](n) = layers of m

so the optimum is a bound. Sets are made on demand (Gilmore and Gomory 1961): a knapsack finds the one that is worth
most at the present dual prices. The prices divided by that worth bound the optimum in every round (Farley 1990), also
where rounds end early or arithmetic is not exact. "At most one" is kept along chains of dependent MetaOps only, which
makes the sets a few too many and the bound a little weak, never wrong.

Example, N = 2, two MetaOps of one layer, T(1) = 10, T(2) = 9: both on one worker for 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.wavefront.metagraph import MetaGraph

ROUNDS = 2_000
TOLERANCE = 1e-4
"""Rounds end when the bound is within this share of what the sets at hand reach."""
REFRESH = 64
"""Pivots after which the inverse is computed anew."""


class Running(NamedTuple):
    """MetaOps that run at the same time, as (position, count), for `time_ns`."""

    members: tuple[tuple[int, int], ...]
    time_ns: float


class Packing(NamedTuple):
    lower_bound_ns: int
    sketch: tuple[Running, ...]
    """Sets, in no order, that do all work in about the bound's time, data flows and whole layers aside."""


def packing_bound(graph: MetaGraph, workers: int) -> Packing:
    """Bound and sketch. Raises ValueError if a MetaOp needs more than `workers` workers."""
    for op in graph.ops:
        op.fastest(workers)
    works = [
        _Work(number, amount, op.counts, unit_ns)
        for number, op in enumerate(graph.ops)
        for amount, unit_ns in ((op.num_layers, op.layer_ns), (1, op.before_ns), (1, op.after_ns))
        if unit_ns and min(unit_ns) > 0
    ]
    if not works:
        return Packing(0, ())
    chain_of = np.zeros(len(works), np.int64)
    chains = _chains(graph, works)
    for number, chain in enumerate(chains):
        chain_of[chain] = number
    widest = max(len(work.counts) for work in works)
    counts = np.zeros((len(works), widest), np.int64)
    unit = np.ones((len(works), widest))
    scale = max(max(work.unit_ns) for work in works)
    for number, work in enumerate(works):
        counts[number, : len(work.counts)] = work.counts
        unit[number, : len(work.counts)] = np.array(work.unit_ns) / scale
    amount = np.array([work.amount for work in works], np.float64)
    bound, basis, times = _column_generation(amount, counts, unit, chain_of, len(chains), workers, ROUNDS, TOLERANCE)
    sketch = tuple(
        Running(tuple((works[w].op, int(counts[w, i])) for w, i in enumerate(members) if i >= 0), time * scale)
        for members, time in zip(basis.tolist(), times.tolist(), strict=True)
        if time > 1e-9
    )
    return Packing(max(0, int(bound * scale * (1 - 1e-9))), sketch)


class _Work(NamedTuple):
    """Work of one kind: the layers of a MetaOp, or what its first or last layer has beyond that."""

    op: int
    amount: int
    counts: tuple[int, ...]
    unit_ns: tuple[int, ...]


def _chains(graph: MetaGraph, works: Sequence[_Work]) -> list[list[int]]:
    """Works in chains of which any two depend on each other; the longest paths, by least time, first."""
    least = [work.amount * min(work.unit_ns) for work in works]
    left = [number for op in graph.order for number, work in enumerate(works) if work.op == op]
    chains: list[list[int]] = []
    while left:
        length: dict[int, int] = {}
        before: dict[int, int | None] = {}
        for number in left:
            op = works[number].op
            earlier = [other for other in length if works[other].op == op or works[other].op in graph.ancestors[op]]
            before[number] = max(earlier, key=lambda other: length[other], default=None)
            length[number] = least[number] + max((length[other] for other in earlier), default=0)
        chain: list[int] = []
        tip: int | None = max(left, key=lambda number: length[number])
        while tip is not None:
            chain.append(tip)
            tip = before[tip]
        chains.append(chain)
        left = [number for number in left if number not in chain]
    return chains


@numba.njit(cache=True)
def _column_generation(amount, counts, unit, chain_of, num_chains, workers, rounds, tolerance):  # type: ignore[no-untyped-def]
    """(bound, sets of the basis as indices of counts or -1 [W, W], their times [W]), by the revised simplex method."""
    num_works = len(amount)
    basis = np.full((num_works, num_works), -1, np.int64)
    for work in range(num_works):
        for index in range(counts.shape[1]):
            if 0 < counts[work, index] <= workers:
                basis[work, work] = index
    inverse = _inverse(basis, unit)
    times = inverse @ amount
    best = 0.0
    for number in range(rounds):
        prices = inverse.sum(axis=0)
        worth, members = _most_valuable(prices, counts, unit, chain_of, num_chains, workers)
        best = max(best, (np.maximum(prices, 0.0) * amount).sum() / max(worth, 1.0))
        if worth <= 1.0 + 1e-9 or best >= (1.0 - tolerance) * times.sum():
            break
        column = np.zeros(num_works)
        for work in range(num_works):
            if members[work] >= 0:
                column[work] = 1.0 / unit[work, members[work]]
        direction = inverse @ column
        leaving, step = -1, np.inf
        for row in range(num_works):
            if direction[row] > 1e-9 and max(times[row], 0.0) / direction[row] < step:
                leaving, step = row, max(times[row], 0.0) / direction[row]
        basis[leaving] = members
        if number % REFRESH == REFRESH - 1:
            inverse = _inverse(basis, unit)
        else:
            pivot = inverse[leaving] / direction[leaving]
            for row in range(num_works):
                inverse[row] -= direction[row] * pivot
            inverse[leaving] = pivot
        times = inverse @ amount
    return best, basis, times


@numba.njit(cache=True)
def _inverse(basis, unit):  # type: ignore[no-untyped-def]
    num_works = len(basis)
    matrix = np.zeros((num_works, num_works))
    for column in range(num_works):
        for work in range(num_works):
            if basis[column, work] >= 0:
                matrix[work, column] = 1.0 / unit[work, basis[column, work]]
    return np.linalg.inv(matrix)


@numba.njit(cache=True)
def _most_valuable(prices, counts, unit, chain_of, num_chains, workers):  # type: ignore[no-untyped-def]
    """(worth, index of the count of each work or -1) of the set that is worth most, at most one work per chain."""
    num_works, widest = counts.shape
    worth = np.zeros((num_chains + 1, workers + 1))
    taken = np.full((num_chains, workers + 1), -1, np.int64)
    by_count = np.zeros(workers + 1)
    for chain in range(num_chains):
        # Of all works of the chain, the best one for each count.
        by_count[:] = 0.0
        options = 0
        for work in range(num_works):
            if chain_of[work] == chain and prices[work] > 0.0:
                for index in range(widest):
                    count = counts[work, index]
                    if count == 0 or count > workers:
                        break
                    if prices[work] / unit[work, index] > by_count[count]:
                        by_count[count] = prices[work] / unit[work, index]
                        options += 1
        worth[chain + 1] = worth[chain]
        if options == 0:
            continue
        for work in range(num_works):
            if chain_of[work] == chain and prices[work] > 0.0:
                for index in range(widest):
                    count = counts[work, index]
                    if count == 0 or count > workers:
                        break
                    gain = prices[work] / unit[work, index]
                    if gain == by_count[count]:
                        for used in range(count, workers + 1):
                            if worth[chain, used - count] + gain > worth[chain + 1, used]:
                                worth[chain + 1, used] = worth[chain, used - count] + gain
                                taken[chain, used] = work * widest + index
    members = np.full(num_works, -1, np.int64)
    used = workers
    for chain in range(num_chains - 1, -1, -1):
        if taken[chain, used] >= 0:
            work, index = taken[chain, used] // widest, taken[chain, used] % widest
            members[work] = index
            used -= counts[work, index]
    return worth[num_chains, workers], members
