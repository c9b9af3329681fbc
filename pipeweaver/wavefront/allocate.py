"""How many workers each MetaOp of a level gets (spindle.md, section 3; Spindle's appendix).

Relaxed to real numbers, the best is that all MetaOps of a level start and end together, at C, with sum of n = N: found
by bisection. n is interpolated linearly in *speed* 1/T(n), with speed 0 at n = 0: only then is the device-time of the
level N * C, and n < 1 means a share of a worker's time. Then each MetaOp gets at most two valid counts around its n:

    8 layers, T(1) = 22, T(2) = 12, C = 100  ->  n = 1.9: 7.6 layers on 2 and 0.4 on 1  ->  8 on 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeweaver.wavefront.metagraph import MetaOp


class Allotment(NamedTuple):
    """`layers` of MetaOp `op` (a position) on `workers` workers."""

    op: int
    workers: int
    layers: int


def relaxed(ops: Sequence[MetaOp], workers: int) -> tuple[float, tuple[float, ...]]:
    """(C in ns, n of each MetaOp): the optimum of the relaxation of one level, n capped at the largest useful count.

    Raises ValueError if a MetaOp runs on no count that small.
    """
    low = max(float(op.whole_ns(op.fastest(workers))) for op in ops)
    high = sum(float(op.whole_ns(op.counts[0])) * op.counts[0] for op in ops)
    if _used(ops, low, workers) <= workers:
        return low, tuple(count_for(op, low, workers) for op in ops)
    for _ in range(200):
        middle = (low + high) / 2
        if _used(ops, middle, workers) > workers:
            low = middle
        else:
            high = middle
        if high - low <= 1e-13 * high:
            break
    return high, tuple(count_for(op, high, workers) for op in ops)


def count_for(op: MetaOp, time_ns: float, workers: int) -> float:
    """The real number of workers on which a MetaOp takes `time_ns`; the largest useful count where that is too little."""
    speed = 1.0 / time_ns
    below, speed_below = 0, 0.0
    for count in op.counts:
        if count > workers:
            break
        above = 1.0 / op.whole_ns(count)
        if speed <= above:
            return below + (count - below) * (speed - speed_below) / (above - speed_below)
        below, speed_below = count, above
    return float(below)


def two_counts(op: MetaOp, number: int, time_ns: float, workers: int) -> list[Allotment]:
    """The layers of MetaOp `number` on the valid counts next to its n, whole layers, none empty; the larger count first.

    l_hi + l_lo = L and T(n_hi) l_hi + T(n_lo) l_lo = C; n_lo = 0 is a dummy that takes time but no layers.
    """
    valid = [count for count in op.counts if count <= workers]
    high = next((count for count in valid if op.whole_ns(count) <= time_ns), valid[-1])
    low = valid[valid.index(high) - 1] if high != valid[0] else 0
    if low == 0 or op.whole_ns(high) >= time_ns:
        return [Allotment(number, high, op.num_layers)]
    layer_high, layer_low = op.whole_ns(high) / op.num_layers, op.whole_ns(low) / op.num_layers
    on_high = round((op.num_layers * layer_low - time_ns) / (layer_low - layer_high))
    shares = [Allotment(number, high, on_high), Allotment(number, low, op.num_layers - on_high)]
    return [share for share in shares if share.layers]


def _used(ops: Sequence[MetaOp], time_ns: float, workers: int) -> float:
    return sum(count_for(op, time_ns, workers) for op in ops)
