"""1F1B (PipeDream-Flush, Narayanan et al., 2006.09503): after a warm-up each worker alternates forward and backward.

Four microbatches on three workers, backward twice as long as forward:

    worker 0  0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3
    worker 1  . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .      (m + P - 1) * (f + b), at most P - w in memory
    worker 2  . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . .
"""

from __future__ import annotations

from pipeweaver.policies.pieces import Unit, Units, place_contiguous, plan_in_units
from pipeweaver.policies.policy import Policy


def unit_order(workers: int, pieces: int, microbatches: int) -> Units:
    assert pieces == workers, (pieces, workers)
    order: list[list[Unit]] = []
    for w in range(workers):
        warm_up = min(microbatches, workers - 1 - w)
        units = [Unit(w, m, "F") for m in range(warm_up)]
        for m in range(microbatches - warm_up):
            units += [Unit(w, warm_up + m, "F"), Unit(w, m, "B")]
        order.append(units + [Unit(w, m, "B") for m in range(microbatches - warm_up, microbatches)])
    return tuple(map(tuple, order))


POLICY = Policy(place=place_contiguous, plan=plan_in_units("1f1b", unit_order))
