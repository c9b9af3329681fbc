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

from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.wavefront.metagraph import MetaGraph, MetaOp

ROUNDS = 2_000
TOLERANCE = 3e-4
"""Rounds end when the bound is within this share of what the sets at hand reach."""
NEGLIGIBLE = 1e-4
"""MetaOps with less than this share of all device-time are left out: they would slow the rounds down."""
REFRESH = 64
"""Pivots after which the inverse is computed anew."""


class Running(NamedTuple):
    """MetaOps that run at the same time, as (position, count), for `time_ns`."""

    members: tuple[tuple[int, int], ...]
    time_ns: float


class Packing(NamedTuple):
    lower_bound_ns: int
    sketch: tuple[Running, ...]
    """Sets, in no order, that do all work in about the bound's time, data flows and whole layers aside. MetaOps of
    negligible work are in none."""


def packing_bound(graph: MetaGraph, workers: int) -> Packing:
    """Bound and sketch. Raises ValueError if a MetaOp needs more than `workers` workers."""
    if not graph.ops:
        return Packing(0, ())
    for op in graph.ops:
        op.fastest(workers)
    whole_ns = {m: _whole_ns(op) for m, op in enumerate(graph.ops)}
    area = {m: min(n * ns for n, ns in zip(graph.ops[m].counts, times, strict=True)) for m, times in whole_ns.items()}
    kept = [m for m in whole_ns if area[m] >= NEGLIGIBLE * sum(area.values())]
    chains = _chains(graph, {m: min(whole_ns[m]) for m in kept})
    chain_of = np.array([next(i for i, chain in enumerate(chains) if m in chain) for m in kept], np.int64)
    widest = max(len(graph.ops[m].counts) for m in kept)
    counts = np.zeros((len(kept), widest), np.int64)
    whole = np.ones((len(kept), widest))
    scale = max(max(whole_ns[m]) for m in kept)
    for row, m in enumerate(kept):
        counts[row, : len(graph.ops[m].counts)] = graph.ops[m].counts
        whole[row, : len(graph.ops[m].counts)] = np.array(whole_ns[m]) / scale
    bound, basis, times = _column_generation(counts, whole, chain_of, len(chains), workers, ROUNDS, TOLERANCE)
    sketch = tuple(
        Running(tuple((kept[row], int(counts[row, i])) for row, i in enumerate(members) if i >= 0), time * scale)
        for members, time in zip(basis.tolist(), times.tolist(), strict=True)
        if time > 1e-9
    )
    return Packing(max(0, int(bound * scale * (1 - 1e-9))), sketch)


def _whole_ns(op: MetaOp) -> list[float]:
    """At most the time of a MetaOp on each of its counts, in layers: what its ends take beyond a layer of theirs counts
    as the part of a layer that it is on the count where it is least."""
    layers = float(op.num_layers)
    for ends in (op.before_ns, op.after_ns):
        layers += min((end / layer for end, layer in zip(ends, op.layer_ns, strict=False)), default=0.0)
    return [layers * layer for layer in op.layer_ns]


def _chains(graph: MetaGraph, least: Mapping[int, float]) -> list[list[int]]:
    """MetaOps in chains of which any two depend on each other; the longest paths, by least time, first."""
    left = [op for op in graph.order if op in least]
    chains: list[list[int]] = []
    while left:
        length: dict[int, float] = {}
        before: dict[int, int | None] = {}
        for op in left:
            earlier = [other for other in length if other in graph.ancestors[op]]
            before[op] = max(earlier, key=lambda other: length[other], default=None)
            length[op] = least[op] + max((length[other] for other in earlier), default=0.0)
        chain: list[int] = []
        tip: int | None = max(left, key=lambda op: length[op])
        while tip is not None:
            chain.append(tip)
            tip = before[tip]
        chains.append(chain)
        left = [op for op in left if op not in chain]
    return chains


@numba.njit(cache=True)
def _column_generation(counts, whole, chain_of, num_chains, workers, rounds, tolerance):  # type: ignore[no-untyped-def]
    """(bound, sets of the basis as indices of counts or -1 [M, M], their times [M]), by the revised simplex method.

    A row says that all of a MetaOp is done; a set does 1 / whole of it per time.
    """
    num_ops = len(counts)
    basis = np.full((num_ops, num_ops), -1, np.int64)
    for m in range(num_ops):
        for index in range(counts.shape[1]):
            if 0 < counts[m, index] <= workers:
                basis[m, m] = index
    inverse = _inverse(basis, whole)
    times = inverse.sum(axis=1)
    best = 0.0
    for number in range(rounds):
        prices = inverse.sum(axis=0)
        worth, members = _most_valuable(prices, counts, whole, chain_of, num_chains, workers)
        best = max(best, np.maximum(prices, 0.0).sum() / max(worth, 1.0))
        if worth <= 1.0 + 1e-9 or best >= (1.0 - tolerance) * times.sum():
            break
        column = np.zeros(num_ops)
        for m in range(num_ops):
            if members[m] >= 0:
                column[m] = 1.0 / whole[m, members[m]]
        direction = inverse @ column
        leaving, step = -1, np.inf
        for row in range(num_ops):
            if direction[row] > 1e-9 and max(times[row], 0.0) / direction[row] < step:
                leaving, step = row, max(times[row], 0.0) / direction[row]
        basis[leaving] = members
        if number % REFRESH == REFRESH - 1:
            inverse = _inverse(basis, whole)
        else:
            pivot = inverse[leaving] / direction[leaving]
            for row in range(num_ops):
                inverse[row] -= direction[row] * pivot
            inverse[leaving] = pivot
        times = inverse.sum(axis=1)
    return best, basis, times


@numba.njit(cache=True)
def _inverse(basis, whole):  # type: ignore[no-untyped-def]
    num_ops = len(basis)
    matrix = np.zeros((num_ops, num_ops))
    for column in range(num_ops):
        for m in range(num_ops):
            if basis[column, m] >= 0:
                matrix[m, column] = 1.0 / whole[m, basis[column, m]]
    return np.linalg.inv(matrix)


@numba.njit(cache=True)
def _most_valuable(prices, counts, whole, chain_of, num_chains, workers):  # type: ignore[no-untyped-def]
    """(worth, index of the count of each MetaOp or -1) of the set that is worth most, at most one MetaOp per chain."""
    num_ops, widest = counts.shape
    worth = np.zeros((num_chains + 1, workers + 1))
    taken = np.full((num_chains, workers + 1), -1, np.int64)
    by_count = np.zeros(workers + 1)
    for chain in range(num_chains):
        # Of all MetaOps of the chain, the best one for each count.
        by_count[:] = 0.0
        options = 0
        for m in range(num_ops):
            if chain_of[m] == chain and prices[m] > 0.0:
                for index in range(widest):
                    count = counts[m, index]
                    if count == 0 or count > workers:
                        break
                    if prices[m] / whole[m, index] > by_count[count]:
                        by_count[count] = prices[m] / whole[m, index]
                        options += 1
        worth[chain + 1] = worth[chain]
        if options == 0:
            continue
        for m in range(num_ops):
            if chain_of[m] == chain and prices[m] > 0.0:
                for index in range(widest):
                    count = counts[m, index]
                    if count == 0 or count > workers:
                        break
                    gain = prices[m] / whole[m, index]
                    if gain == by_count[count]:
                        for used in range(count, workers + 1):
                            if worth[chain, used - count] + gain > worth[chain + 1, used]:
                                worth[chain + 1, used] = worth[chain, used - count] + gain
                                taken[chain, used] = m * widest + index
    members = np.full(num_ops, -1, np.int64)
    used = workers
    for chain in range(num_chains - 1, -1, -1):
        if taken[chain, used] >= 0:
            m, index = taken[chain, used] // widest, taken[chain, used] % widest
            members[m] = index
            used -= counts[m, index]
    return worth[num_chains, workers], members
