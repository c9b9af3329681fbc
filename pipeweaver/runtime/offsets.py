"""How far the clocks of the workers' hosts are from the first rank's.

The first rank asks each rank for its time, several times, and keeps the quickest answer: the answer was given
between question and receipt, so taking the middle errs by half the round trip at most.

    asked at 100, other says 1130, received at 160    ->    offset 1000, wrong by 30 at most
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 20


class ClockOffset(NamedTuple):
    """Nanoseconds that a rank's `time.perf_counter_ns` is ahead of the first rank's, and how wrong that may be."""

    ahead_ns: int
    error_ns: int


def clock_offsets(rounds: int = ROUNDS) -> tuple[ClockOffset, ...]:
    """Offsets of all ranks, on the first rank; () on the others. Called by all ranks of the default group.

    The default group needs a backend for CPU tensors.
    """
    rank, message = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        for _ in range(rounds):
            dist.recv(message, src=0)
            message[0] = time.perf_counter_ns()
            dist.send(message, dst=0)
        return ()
    offsets = [ClockOffset(0, 0)]
    for other in range(1, dist.get_world_size()):
        best = None
        for _ in range(rounds):
            asked_ns = time.perf_counter_ns()
            dist.send(message, dst=other)
            dist.recv(message, src=other)
            half_ns = (time.perf_counter_ns() - asked_ns + 1) // 2
            if best is None or half_ns < best.error_ns:
                best = ClockOffset(int(message) - asked_ns - half_ns, half_ns)
        assert best is not None
        offsets.append(best)
    return tuple(offsets)
