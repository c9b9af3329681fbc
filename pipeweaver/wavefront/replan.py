"""A plan made from front to back, what is left allocated anew at every step: no barriers between levels.

At a moment some MetaOps are ready, each with layers left and a *tail*: the least time from its end to the end of all
that follows. (1) Find the earliest common end C at which the real counts that let every ready MetaOp finish by C minus
its tail add up to N. (2) In the order of a rule, give each the valid count just below that, or the smallest, while
workers are left; (3) give what is left to those that would end last. (4) The wave ends with the first MetaOp that is
done; the others give the nearest number of layers, and are allocated anew, with what has become ready. Example, N = 4:

    a 8 layers, b 2 layers then c after b     ->    a[2 workers, 4] b[2, 2] | a[1, 4] c[3, ...]
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.wavefront.rng import seeded, uniform
from pipeweaver.wavefront.timeline import Pieces, Tables


def replanned(table: Tables, seed: int, most: int = 1_000) -> Pieces:
    """A sequence of slices that does all work, at most `most`.

    Seed 0 follows the steps as they are; others scale each MetaOp's real count at every step by a factor drawn anew,
    so that many orders and allocations can be tried.
    """
    op, layers, index = (np.zeros(most, np.int64) for _ in range(3))
    size = _replan(table, seed, op, layers, index)
    return Pieces(int(size), op, layers, index)


@numba.njit(cache=True)
def _real_count(table, m, layers, time):  # type: ignore[no-untyped-def]
    """The real number of workers, linear in speed, on which `layers` of MetaOp m take `time`."""
    below, speed_below = 0.0, 0.0
    if time <= 0:
        return float(table.counts[m, table.num_counts[m] - 1])
    speed = 1.0 / time
    for i in range(table.num_counts[m]):
        above = 1.0 / (layers * table.layer_ns[m, i])
        if speed <= above:
            return below + (table.counts[m, i] - below) * (speed - speed_below) / (above - speed_below)
        below, speed_below = float(table.counts[m, i]), above
    return below


@numba.njit(cache=True)
def _replan(table, seed, op, layers, index):  # type: ignore[no-untyped-def]
    num_ops, workers = len(table.num_layers), table.workers
    left = table.num_layers.copy()
    ready = np.zeros(num_ops, np.bool_)
    real = np.zeros(num_ops)
    chosen = np.zeros(num_ops, np.int64)
    rank = np.zeros(num_ops)
    size = 0
    random = seeded(seed)
    spread = 0.2 + uniform(random)
    while True:
        waiting = 0
        for m in range(num_ops):
            ready[m] = left[m] > 0
            for j in range(table.num_sources[m]):
                ready[m] = ready[m] and left[table.sources[m, j]] == 0
            waiting += left[m]
        if waiting == 0:
            return size
        # 1. The earliest common end.
        low, high = 0.0, 0.0
        for m in range(num_ops):
            if ready[m]:
                low = max(low, float(left[m] * table.layer_ns[m, table.num_counts[m] - 1] + table.tail_ns[m]))
                high += float(left[m] * table.layer_ns[m, 0] * table.counts[m, 0] + table.tail_ns[m])
        for _ in range(50):
            middle = low if _ == 0 else (low + high) / 2
            used = 0.0
            for m in range(num_ops):
                if ready[m]:
                    real[m] = _real_count(table, m, left[m], middle - table.tail_ns[m])
                    used += real[m]
            if used > workers:
                low = middle
            else:
                high = middle
                if _ == 0:
                    break
        end = high
        # 2. Counts just below, in the order of the rule.
        for m in range(num_ops):
            chosen[m] = -1
            if ready[m]:
                real[m] = _real_count(table, m, left[m], end - table.tail_ns[m])
                rank[m] = float(left[m] * table.layer_ns[m, 0] + table.tail_ns[m])
                if seed > 0:
                    real[m] *= np.exp(spread * (2.0 * uniform(random) - 1.0))
                    rank[m] *= np.exp(spread * (2.0 * uniform(random) - 1.0))
        spare = workers
        order = np.argsort(-rank)
        for m in order:
            if ready[m] and table.counts[m, 0] <= spare:
                chosen[m] = 0
                while chosen[m] + 1 < table.num_counts[m] and table.counts[m, chosen[m] + 1] <= min(
                    real[m] + 1e-9, float(spare)
                ):
                    chosen[m] += 1
                spare -= table.counts[m, chosen[m]]
        # 3. What is left, to those that would end last.
        while True:
            latest, time_latest = -1, -1.0
            for m in range(num_ops):
                if chosen[m] >= 0 and chosen[m] + 1 < table.num_counts[m]:
                    more = table.counts[m, chosen[m] + 1] - table.counts[m, chosen[m]]
                    time = float(left[m] * table.layer_ns[m, chosen[m]] + table.tail_ns[m])
                    if more <= spare and time > time_latest:
                        latest, time_latest = m, time
            if latest < 0:
                break
            spare -= table.counts[latest, chosen[latest] + 1] - table.counts[latest, chosen[latest]]
            chosen[latest] += 1
        # 4. The wave.
        length = np.inf
        for m in range(num_ops):
            if chosen[m] >= 0:
                length = min(length, float(left[m] * table.layer_ns[m, chosen[m]]))
        for m in range(num_ops):
            if chosen[m] >= 0:
                fitting = min(left[m], max(1, round(length / table.layer_ns[m, chosen[m]])))
                if size == len(op):
                    return size
                op[size], layers[size], index[size] = m, fitting, chosen[m]
                left[m] -= fitting
                size += 1
