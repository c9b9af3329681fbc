"""From allocations of a level to waves: slices side by side, about equally long (spindle.md, section 4).

While layers are left: (1) propose tuples that fill the most workers, one per MetaOp; (2) if workers are left, extend
the MetaOps with most time remaining to a larger valid count; (3) the wave is as long as its shortest tuple, the others
give the layers that fit; (4) subtract, go on. Example, two workers, layers of 10 on one and 6 on two:

    a {[2 workers, 1 layer], [1, 3]}   b {[1, 2]}     ->     a[2, 1] | a[1, 2] b[1, 2] | a[2, 1], extended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeweaver.wavefront.allocate import Allotment
from pipeweaver.wavefront.metagraph import MetaOp

Wave = tuple[Allotment, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the paper leaves open. `nearest`: others give the number of layers nearest to the wave's length, else as
    many as fit, one at least. `extend`: whether workers left over are given away, `by_far`: to as many as possible at
    once instead of the next valid count."""

    nearest: bool = True
    extend: bool = True
    by_far: bool = False


def make_waves(ops: Sequence[MetaOp], shares: Sequence[Allotment], workers: int, rules: Rules) -> list[Wave]:
    """Waves of one level, in order, with all layers of `shares`. `ops` are all MetaOps, by position."""
    left: dict[int, list[Allotment]] = {}
    for share in sorted(shares, key=lambda share: -share.workers):
        left.setdefault(share.op, []).append(share)
    waves: list[Wave] = []
    while left:
        remaining_ns = {op: sum(_ns(ops, share) for share in tuples) for op, tuples in left.items()}
        proposed = _fill([share for tuples in left.values() for share in tuples], workers, remaining_ns)
        counts = {share.op: share.workers for share in proposed}
        if rules.extend:
            _extend(ops, counts, workers, remaining_ns, rules.by_far)
        length = min(share.layers * _layer_ns(ops[share.op], counts[share.op]) for share in proposed)
        wave = []
        for share in proposed:
            fitting = length / _layer_ns(ops[share.op], counts[share.op])
            layers = min(share.layers, max(1, round(fitting) if rules.nearest else int(fitting + 1e-9)))
            wave.append(Allotment(share.op, counts[share.op], layers))
            tuples = left[share.op]
            tuples[tuples.index(share)] = share._replace(layers=share.layers - layers)
            left[share.op] = [share for share in tuples if share.layers]
            if not left[share.op]:
                del left[share.op]
        waves.append(tuple(wave))
    return waves


def _fill(tuples: Sequence[Allotment], workers: int, remaining_ns: dict[int, float]) -> list[Allotment]:
    """One tuple per MetaOp that together use the most workers; among those, the largest counts and longest first."""
    ranked = sorted(tuples, key=lambda share: (-share.workers, -remaining_ns[share.op], share.op))
    options: dict[int, list[Allotment]] = {}
    for share in ranked:
        options.setdefault(share.op, []).append(share)
    # Bit u of reachable[i]: the MetaOps from the i-th on can use exactly u workers.
    reachable = [1]
    for of_op in reversed(options.values()):
        sums = reachable[-1]
        for share in of_op:
            sums |= reachable[-1] << share.workers
        reachable.append(sums & ((1 << workers + 1) - 1))
    reachable.reverse()
    goal = reachable[0].bit_length() - 1
    chosen = []
    for i, of_op in enumerate(options.values()):
        for share in of_op:
            if share.workers <= goal and reachable[i + 1] >> (goal - share.workers) & 1:
                chosen.append(share)
                goal -= share.workers
                break
    return chosen


def _extend(
    ops: Sequence[MetaOp], counts: dict[int, int], workers: int, remaining_ns: dict[int, float], by_far: bool
) -> None:
    """Give workers that are left to MetaOps of the wave, most time remaining first, while a larger count fits."""
    spare = workers - sum(counts.values())
    for op in sorted(counts, key=lambda op: (-remaining_ns[op], op)):
        larger = [count for count in ops[op].counts if counts[op] < count <= counts[op] + spare]
        if larger:
            spare -= larger[-1 if by_far else 0] - counts[op]
            counts[op] = larger[-1 if by_far else 0]


def _layer_ns(op: MetaOp, count: int) -> float:
    return op.whole_ns(count) / op.num_layers


def _ns(ops: Sequence[MetaOp], share: Allotment) -> float:
    return share.layers * _layer_ns(ops[share.op], share.workers)
