"""Lower bounds for the makespan of any schedule of the same stages.

Each worker is a machine with heads and tails: a stage can start no earlier than the longest path into it
and leaves the longest path out of it to be done. Scheduling one machine preemptively by largest tail
(Jackson 1955, Carlier 1982) is optimal for the relaxed problem and bounds the real one.

Example: one worker, stages of 4 and 3 that may start at 0 and 2, with 0 and 5 to follow: 2 + 3 + 5 = 10.
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.stages import Orders, StageGraph


def lower_bound_ns(graph: StageGraph, orders: Orders) -> int:
    """Bound in ns for stages with fixed workers, durations and successors with lags, in whatever order they run.

    Only which stages there are is taken from `orders`.
    """
    if not len(orders.stage):
        return 0
    heads, tails = heads_and_tails(graph)
    listed = orders.stage
    best = int((heads + graph.duration_ns + tails)[listed].max())
    for worker in range(len(orders.start) - 1):
        mine = listed[orders.start[worker] : orders.start[worker + 1]]
        best = max(best, jackson(heads[mine], graph.duration_ns[mine], tails[mine]))
    return best


def heads_and_tails(graph: StageGraph) -> tuple[Ints, Ints]:
    """[S] each: longest path to the start of each stage, and from its end, ns."""
    return _longest_paths(graph.duration_ns, graph.start, graph.successor, graph.lag_ns)


def jackson(head: Ints, duration: Ints, tail: Ints) -> int:
    """Optimal preemptive makespan of one machine and n jobs [n]: always run the largest tail."""
    return int(_jackson(head, duration, tail, np.argsort(head, kind="stable")))


@numba.njit(cache=True)
def _longest_paths(duration, start, successor, lag):  # type: ignore[no-untyped-def]
    size = len(duration)
    waiting, order, known = np.zeros(size, np.int64), np.empty(size, np.int64), 0
    for i in range(len(successor)):
        waiting[successor[i]] += 1
    for s in range(size):
        if waiting[s] == 0:
            order[known] = s
            known += 1
    heads, tails = np.zeros(size, np.int64), np.zeros(size, np.int64)
    at = 0
    while at < known:
        s = order[at]
        at += 1
        for i in range(start[s], start[s + 1]):
            t = successor[i]
            heads[t] = max(heads[t], heads[s] + duration[s] + lag[i])
            waiting[t] -= 1
            if waiting[t] == 0:
                order[known] = t
                known += 1
    for k in range(known - 1, -1, -1):
        s = order[k]
        for i in range(start[s], start[s + 1]):
            t = successor[i]
            tails[s] = max(tails[s], lag[i] + duration[t] + tails[t])
    return heads, tails


@numba.njit(cache=True)
def _jackson(head, duration, tail, by_head):  # type: ignore[no-untyped-def]
    """Jobs wait in a heap by tail, largest first."""
    count = len(head)
    heap, size = np.empty(count, np.int64), 0
    left = duration.copy()
    clock, bound, i = np.int64(0), np.int64(0), 0
    while i < count or size > 0:
        if size == 0:
            clock = max(clock, head[by_head[i]])
        while i < count and head[by_head[i]] <= clock:
            job, child = by_head[i], size
            while child > 0 and tail[heap[(child - 1) // 2]] < tail[job]:
                heap[child] = heap[(child - 1) // 2]
                child = (child - 1) // 2
            heap[child] = job
            size += 1
            i += 1
        job = heap[0]
        until = head[by_head[i]] if i < count else clock + left[job]
        ran = min(left[job], until - clock)
        clock += ran
        left[job] -= ran
        if left[job] == 0:
            bound = max(bound, clock + tail[job])
            size -= 1
            last, parent = heap[size], 0
            while 2 * parent + 1 < size:
                child = 2 * parent + 1
                if child + 1 < size and tail[heap[child + 1]] > tail[heap[child]]:
                    child += 1
                if tail[heap[child]] <= tail[last]:
                    break
                heap[parent] = heap[child]
                parent = child
            heap[parent] = last
    return bound
