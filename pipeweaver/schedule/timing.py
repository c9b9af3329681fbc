"""When stages run: the timeline of given orders, durations and dependencies, before there are any actions.

Each worker runs its stages in the given order, each as soon as its predecessors are done and their
tensors have had time to travel. Example, two workers, F 2, B 4, lag 1:

    worker 0   0F0 0F1 .   .   .   .   .   0B0 ...
    worker 1       . 1F0 1F0 1B0 ...
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.stages import Orders, StageGraph


class StageTimes(NamedTuple):
    """Start and end per stage, ns, and `completed`: all stages that run in the order in which they end.

    `completed` is a total order that respects every dependency, ties included.
    """

    start_ns: Ints
    end_ns: Ints
    completed: Ints


class OrderError(ValueError):
    """The orders of the workers wait for each other in a circle. `stuck` holds each worker's next stage."""

    def __init__(self, stuck: list[int | None]) -> None:
        super().__init__("the orders of the workers wait for each other in a circle")
        self.stuck = stuck


def time_stages(graph: StageGraph, orders: Orders) -> StageTimes:
    """Time the stages. Raises OrderError if the orders and dependencies have a cycle."""
    start, end, completed, head = _run(
        orders.start, orders.stage, graph.duration_ns, graph.start, graph.successor, graph.lag_ns
    )
    if len(completed) < len(orders.stage):
        ends = zip(head.tolist(), orders.start[1:].tolist(), strict=True)
        raise OrderError([int(orders.stage[at]) if at < stop else None for at, stop in ends])
    return StageTimes(start, end, completed)


_BLOCKED = np.int64(1) << 62
"""When a worker goes on whose next stage waits for others, or that has none."""


@numba.njit(cache=True)
def _run(order_start, order, duration, successor_start, successor, lag):  # type: ignore[no-untyped-def]
    """(start, end; per stage), stages by their ends as far as they run, (place of the next stage; per worker)."""
    num_workers, size = len(order_start) - 1, len(duration)
    waiting, ready = np.zeros(size, np.int64), np.zeros(size, np.int64)
    start, end, popped = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    worker = np.full(size, -1, np.int64)
    for i in range(len(successor)):
        waiting[successor[i]] += 1
    head, free = order_start[:-1].copy(), np.zeros(num_workers, np.int64)
    begin = np.full(num_workers, _BLOCKED, np.int64)  # of the next stage of each worker
    for w in range(num_workers):
        for at in range(order_start[w], order_start[w + 1]):
            worker[order[at]] = w
        if head[w] < order_start[w + 1] and waiting[order[head[w]]] == 0:
            begin[w] = 0
    done = 0
    while True:
        # The earliest stage that is next on its worker and has all it needs; of equals the first in the orders.
        best, when = -1, _BLOCKED
        for w in range(num_workers):
            if begin[w] < when:
                best, when = w, begin[w]
        if best < 0:
            break
        s = order[head[best]]
        start[s], end[s], popped[s] = when, when + duration[s], done
        done += 1
        free[best], begin[best] = end[s], _BLOCKED
        head[best] += 1
        for i in range(successor_start[s], successor_start[s + 1]):
            t = successor[i]
            waiting[t] -= 1
            ready[t] = max(ready[t], end[s] + lag[i])
            w = worker[t]
            if waiting[t] == 0 and w >= 0 and w != best and head[w] < order_start[w + 1] and order[head[w]] == t:
                begin[w] = max(free[w], ready[t])
        if head[best] < order_start[best + 1] and waiting[order[head[best]]] == 0:
            begin[best] = max(free[best], ready[order[head[best]]])
    return start, end, _merged(order_start, order, end, popped, head), head


@numba.njit(cache=True)
def _merged(order_start, order, end, popped, stop):  # type: ignore[no-untyped-def]
    """The stages of all workers, up to place `stop` of each, by their ends; of equals first who was timed first."""
    num_workers = len(stop)
    place = order_start[:-1].copy()
    merged = np.empty(np.sum(stop - place), np.int64)
    first, rank = np.full(num_workers, _BLOCKED, np.int64), np.zeros(num_workers, np.int64)
    for w in range(num_workers):
        if place[w] < stop[w]:
            first[w], rank[w] = end[order[place[w]]], popped[order[place[w]]]
    for i in range(len(merged)):
        best = 0
        for w in range(1, num_workers):
            if first[w] < first[best] or (first[w] == first[best] and rank[w] < rank[best]):
                best = w
        merged[i] = order[place[best]]
        place[best] += 1
        if place[best] < stop[best]:
            first[best], rank[best] = end[order[place[best]]], popped[order[place[best]]]
        else:
            first[best] = _BLOCKED
    return merged
