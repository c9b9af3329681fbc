"""When stages run: the timeline of given orders, durations and dependencies, before there are any actions.

Each worker runs its stages in the given order, each as soon as its predecessors are done and their
tensors have had time to travel. Example, two workers, F 2, B 4, lag 1:

    worker 0   0F0 0F1 .   .   .   .   .   0B0 ...
    worker 1       . 1F0 1F0 1B0 ...
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Start and end per stage, ns, and `completed`: all stages in the order in which they end.

    `completed` is a total order that respects every dependency, ties included.
    """

    start_ns: list[int]
    end_ns: list[int]
    completed: list[int]


class OrderError(ValueError):
    """The orders of the workers wait for each other in a circle. `stuck` holds each worker's next stage."""

    def __init__(self, stuck: list[int | None]) -> None:
        super().__init__("the orders of the workers wait for each other in a circle")
        self.stuck = stuck


def time_stages(
    orders: Sequence[Sequence[int]],
    duration_ns: Sequence[int],
    successors: Sequence[Sequence[tuple[int, int]]],
) -> StageTimes:
    """Time the stages 0..n-1. `orders[w]` are stage numbers; `successors[s]` pairs of (stage, lag in ns).

    Raises OrderError if the orders and dependencies have a cycle.
    """
    n = len(duration_ns)
    waiting = [0] * n
    for targets in successors:
        for target, _ in targets:
            waiting[target] += 1
    ready = [0] * n
    start, end, popped = [0] * n, [0] * n, [0] * n
    worker_of, place_of = [0] * n, [0] * n
    for worker, order in enumerate(orders):
        for place, stage in enumerate(order):
            worker_of[stage], place_of[stage] = worker, place
    head = [0] * len(orders)
    free = [0] * len(orders)
    heap: list[tuple[int, int]] = []

    def offer(worker: int) -> None:
        place = head[worker]
        if place < len(orders[worker]):
            stage = orders[worker][place]
            if waiting[stage] == 0:
                heapq.heappush(heap, (max(free[worker], ready[stage]), stage))

    for worker in range(len(orders)):
        offer(worker)
    done = 0
    while heap:
        begin, stage = heapq.heappop(heap)
        worker = worker_of[stage]
        start[stage], end[stage], popped[stage] = begin, begin + duration_ns[stage], done
        done += 1
        free[worker] = end[stage]
        head[worker] += 1
        for target, lag in successors[stage]:
            waiting[target] -= 1
            ready[target] = max(ready[target], end[stage] + lag)
            if waiting[target] == 0 and worker_of[target] != worker and head[worker_of[target]] == place_of[target]:
                offer(worker_of[target])
        offer(worker)
    if done < n:
        raise OrderError([order[head[w]] if head[w] < len(order) else None for w, order in enumerate(orders)])
    return StageTimes(start_ns=start, end_ns=end, completed=sorted(range(n), key=lambda s: (end[s], popped[s])))
