"""Lower bounds for the makespan of any schedule of the same stages.

Each worker is a machine with heads and tails: a stage can start no earlier than the longest path into it
and leaves the longest path out of it to be done. Scheduling one machine preemptively by largest tail
(Jackson 1955, Carlier 1982) is optimal for the relaxed problem and bounds the real one.

Example: one worker, stages of 4 and 3 that may start at 0 and 2, with 0 and 5 to follow: 2 + 3 + 5 = 10.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from pipeweaver.schedule.ir import Stage


def lower_bound_ns(
    order: Sequence[Sequence[Stage]],
    duration_ns: Sequence[int],
    successors: Sequence[Sequence[tuple[int, int]]],
    number: Mapping[Stage, int],
) -> int:
    """Bound in ns for stages with fixed workers, durations and (stage, lag) successors, in whatever order they run.

    Only the assignment of stages to workers is taken from `order`.
    """
    heads, tails = heads_and_tails(duration_ns, successors)
    bounds = [head + duration + tail for head, duration, tail in zip(heads, duration_ns, tails, strict=True)]
    for stages in order:
        numbers = [number[stage] for stage in stages]
        bounds.append(jackson([(heads[s], duration_ns[s], tails[s]) for s in numbers]))
    return max(bounds, default=0)


def heads_and_tails(
    duration_ns: Sequence[int], successors: Sequence[Sequence[tuple[int, int]]]
) -> tuple[list[int], list[int]]:
    """Longest path to the start of each stage, and from its end, ns."""
    sorter: TopologicalSorter[int] = TopologicalSorter({s: () for s in range(len(duration_ns))})
    for stage, targets in enumerate(successors):
        for target, _ in targets:
            sorter.add(target, stage)
    order = list(sorter.static_order())
    heads, tails = [0] * len(order), [0] * len(order)
    for stage in order:
        for target, lag in successors[stage]:
            heads[target] = max(heads[target], heads[stage] + duration_ns[stage] + lag)
    for stage in reversed(order):
        tails[stage] = max((lag + duration_ns[t] + tails[t] for t, lag in successors[stage]), default=0)
    return heads, tails


def jackson(jobs: Sequence[tuple[int, int, int]]) -> int:
    """Optimal preemptive makespan of one machine, jobs as (head, duration, tail): always run the largest tail."""
    waiting: list[tuple[int, int]] = []
    clock, bound = 0, 0
    pending = sorted(jobs)
    i = 0
    while i < len(pending) or waiting:
        if not waiting:
            clock = max(clock, pending[i][0])
        while i < len(pending) and pending[i][0] <= clock:
            heapq.heappush(waiting, (-pending[i][2], pending[i][1]))
            i += 1
        negative_tail, left = heapq.heappop(waiting)
        until = pending[i][0] if i < len(pending) else clock + left
        ran = min(left, until - clock)
        clock += ran
        if ran < left:
            heapq.heappush(waiting, (negative_tail, left - ran))
        else:
            bound = max(bound, clock - negative_tail)
    return bound
