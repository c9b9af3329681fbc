"""GPipe (Huang et al., 1811.06965): all forwards, then all backwards, on a contiguous split.

Four microbatches on three workers, backward twice as long as forward:

    worker 0  0 1 2 3 . . . . . . 0 0 1 1 2 2 3 3
    worker 1  . 0 1 2 3 . . . 0 0 1 1 2 2 3 3 . .      (m + P - 1) * (f + b), m microbatches in memory
    worker 2  . . 0 1 2 3 0 0 1 1 2 2 3 3 . . . .
"""

from __future__ import annotations

from pipeweaver.policies.pieces import Unit, Units, place_contiguous, plan_in_units
from pipeweaver.policies.policy import Policy


def unit_order(workers: int, pieces: int, microbatches: int) -> Units:
    assert pieces == workers, (pieces, workers)
    return tuple(
        tuple(Unit(w, m, "F") for m in range(microbatches)) + tuple(Unit(w, m, "B") for m in range(microbatches))
        for w in range(workers)
    )


POLICY = Policy(place=place_contiguous, plan=plan_in_units("gpipe", unit_order))
