"""Shares of the peak as compiled code: what a machine file says of matmuls, attention and memory, as flat arrays.

    factors = flat_factors(machine)
    matmul_share(factors, "FIW".index("F"), m, k, n)      # 0.71
    attention_share(factors, 0, flops)

A matmul has the factor of its very shape if that was measured; else it follows the curve through measurements with the
same weight at other numbers of rows, beyond whose ends, as for all other weights, e / (1 + a/m + b/n + c/k) says how
the share changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.semu.machine import Curve, Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class FlatFactors(NamedTuple):
    """Tables of a machine. Phases count F 0, I 1, W 2; attention has forward 0 and backward 1.

    `best` [3], `half` [3] for m, n, k. `shapes` [measured, 4] are (phase, m, k, n) with `shape_share` [measured].
    `weights` [curves, 3] are (phase, and the two fixed dimensions). Curves lie one after the other in `size` (natural
    logarithms) and `share`; `weight_start` [curves + 1], `attention_start` [3] and `memory_start` [names + 1] say where.
    """

    best: Floats
    half: Floats
    shapes: Ints
    shape_share: Floats
    weights: Ints
    weight_start: Ints
    attention_start: Ints
    memory_start: Ints
    size: Floats
    share: Floats


@lru_cache(maxsize=64)
def flat_factors(machine: Machine) -> FlatFactors:
    """Tables of a machine as arrays."""
    matmul = machine.matmul
    measured = [
        (phase, m, k, n, share)
        for phase, rows in enumerate((matmul.measured_forward, matmul.measured_input, matmul.measured_weight))
        for m, k, n, share in rows
    ]
    curves: list[Curve] = [curve.factors for curve in matmul.curves]
    attention = [machine.attention.forward, machine.attention.backward]
    memory = list(machine.memory.curves.values())
    rows = [row for curve in (*curves, *attention, *memory) for row in curve]
    bounds = np.concatenate([[0], np.cumsum([len(curve) for curve in (*curves, *attention, *memory)])]).astype(np.int64)
    return FlatFactors(
        best=np.array([matmul.forward, matmul.input, matmul.weight]),
        half=np.array([matmul.half_m, matmul.half_n, matmul.half_k]),
        shapes=np.array([row[:4] for row in measured], np.int64).reshape(-1, 4),
        shape_share=np.array([row[4] for row in measured], np.float64),
        weights=np.array([("FIW".index(c.phase), *c.fixed) for c in matmul.curves], np.int64).reshape(-1, 3),
        weight_start=bounds[: len(curves) + 1],
        attention_start=bounds[len(curves) : len(curves) + 3],
        memory_start=bounds[len(curves) + 2 :],
        size=np.log(np.array([row[0] for row in rows], np.float64)),
        share=np.array([row[1] for row in rows], np.float64),
    )


def memory_curve(machine: Machine, names: Sequence[str]) -> Ints:
    """Number of each operator's curve among the machine's; -1 where it has none."""
    numbers = {name: number for number, name in enumerate(machine.memory.curves)}
    return np.array([numbers.get(name, -1) for name in names], np.int64)


@numba.njit(cache=True)
def matmul_share(factors, phase, m, k, n):  # type: ignore[no-untyped-def]
    """Share of the peak of one matmul C[m, n] = A[m, k] B[k, n].

    A shape measured above what the curve says of the largest ran alone at a clock that no training step sustains;
    it counts as the largest do.
    """
    m, k, n = max(m, 1e-9), max(k, 1e-9), max(n, 1e-9)
    best = factors.best[phase]
    whole = (round(m), round(k), round(n))
    for i in range(len(factors.shapes)):
        row = factors.shapes[i]
        if row[0] == phase and row[1] == whole[0] and row[2] == whole[1] and row[3] == whole[2]:
            return min(factors.shape_share[i], best)
    rows, first, second = (k, whole[0], whole[2]) if phase == 2 else (m, whole[1], whole[2])
    for i in range(len(factors.weights)):
        if factors.weights[i, 0] == phase and factors.weights[i, 1] == first and factors.weights[i, 2] == second:
            start, stop = factors.weight_start[i], factors.weight_start[i + 1]
            inside = min(max(np.log(rows), factors.size[start]), factors.size[stop - 1])
            half = factors.half[2] if phase == 2 else factors.half[0]
            change = (1 + half / np.exp(inside)) / (1 + half / rows)
            return np.interp(inside, factors.size[start:stop], factors.share[start:stop]) * change
    return best / (1 + factors.half[0] / m + factors.half[1] / n + factors.half[2] / k)


@numba.njit(cache=True)
def attention_share(factors, backward, flops):  # type: ignore[no-untyped-def]
    """Share of the peak of one attention launch of so many FLOPs: one smaller than the smallest measured takes as long."""
    return curve_share(factors, factors.attention_start[backward], factors.attention_start[backward + 1], flops)


@numba.njit(cache=True)
def curve_share(factors, start, stop, size):  # type: ignore[no-untyped-def]
    """Share at a size above zero: by the logarithm between measurements, below the first as long as the first."""
    at = np.log(size)
    if at < factors.size[start]:
        return factors.share[start] * np.exp(at - factors.size[start])
    return np.interp(at, factors.size[start:stop], factors.share[start:stop])
