"""Given an order, keep what fits: units that save memory give it up where the order leaves room.

A level (`leaning.py`) makes all units alike lean; the order that comes of it holds less than the limit for most of the
time. Here each unit, by how much it gains, goes back to keeping all that it saves, if the memory between its forward
and its backward allows it. A unit whose backward follows soon gains most: its copies to the host and back would be
waited for. Example, limit 10, what is held while each of five stages runs, a unit of 3 bytes over the middle three:

    held 4 6 7 5 2     7 + 3 <= 10: kept          held 4 6 8 5 2     8 + 3 > 10: stays lean
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.planner.listing import Schedule
from pipeweaver.planner.problem import Ints, Problem


def kept_units(
    problem: Problem,
    schedule: Schedule,
    limits: Ints,
    *,
    forward: Ints,
    backward: Ints,
    more_bytes: Ints,
    gain: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """[M] of M lean units, those that can keep everything.

    `forward`, `backward` [M]: their stages; `more_bytes` [M]: what keeping holds in addition from the start of the one
    to the end of the other; `gain` [M]: the largest is tried first.
    """
    chosen = np.zeros(len(forward), np.bool_)
    _keep(problem, schedule.sequence, limits, forward, backward, more_bytes, np.argsort(-gain, kind="stable"), chosen)
    return chosen


def intervals_ns(problem: Problem, schedule: Schedule, forward: Ints, backward: Ints) -> Ints:
    """[M] from the end of each forward to the start of its backward."""
    return schedule.start_ns[backward] - schedule.start_ns[forward] - problem.duration_ns[forward]


@numba.njit(cache=True)
def _keep(problem, sequence, limits, forward, backward, more, order, chosen):  # type: ignore[no-untyped-def]
    """`held[w]` by place: what worker w holds while the stage runs that has its effect number `place` there."""
    workers = problem.num_workers
    count = np.zeros(workers, np.int64)
    place = np.zeros(len(problem.worker), np.int64)
    for s in sequence:
        for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
            w = problem.effect_worker[e]
            if e == problem.effect_start[s]:
                place[s] = count[w]
            count[w] += 1
    held = np.zeros((workers, max(1, count.max())), np.int64)
    count[:] = 0
    now = np.zeros(workers, np.int64)
    for s in sequence:
        for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
            w = problem.effect_worker[e]
            now[w] += problem.effect_takes[e]
            held[w, count[w]] = now[w] + problem.effect_passing[e]
            now[w] -= problem.effect_gives[e]
            count[w] += 1
    for i in order:
        w = problem.worker[forward[i]]
        first, last = place[forward[i]], place[backward[i]]
        fits = True
        for k in range(first, last + 1):
            if held[w, k] + more[i] > limits[w]:
                fits = False
                break
        if fits:
            chosen[i] = True
            for k in range(first, last + 1):
                held[w, k] += more[i]
