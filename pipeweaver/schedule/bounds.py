"""Lower bounds for the makespan of any schedule of the same stages.

Each worker is a machine with heads and tails: a stage can start no earlier than its head and leaves its tail to be done.
Scheduling one machine preemptively by largest tail (Jackson 1955, Carlier 1982) is optimal for the relaxed problem and
bounds the real one. Heads and tails are longest paths, and more: all that precedes a stage on one worker is done one
after the other (Brucker and others call this an input-or-output test). Three images on worker 1 before a text on 2:

    1   a a b b c c . .          longest path to t: 2          with worker 1 as a machine: 6
    2   . . . . . . t t

Example of the machine: stages of 4 and 3 that may start at 0 and 2, with 0 and 5 to follow: 2 + 3 + 5 = 10.
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.stages import Orders, StageGraph

LARGEST = 1_500
"""Stages that depend on each other, directly or not, up to which all pairs of them are looked at."""
NEVER = 1 << 62


def lower_bound_ns(graph: StageGraph, orders: Orders) -> int:
    """Bound in ns for stages with fixed workers, durations and successors with lags, in whatever order they run.

    Only which stages there are is taken from `orders`.
    """
    if not len(orders.stage):
        return 0
    heads, tails = heads_and_tails(graph, len(orders.start) - 1)
    listed = orders.stage
    best = int((heads + graph.duration_ns + tails)[listed].max())
    for worker in range(len(orders.start) - 1):
        mine = listed[orders.start[worker] : orders.start[worker + 1]]
        best = max(best, jackson(heads[mine], graph.duration_ns[mine], tails[mine]))
    return best


def heads_and_tails(graph: StageGraph, num_workers: int) -> tuple[Ints, Ints]:
    """[S] each: ns that must pass before each stage starts, and after it ends."""
    order, heads, tails = _longest_paths(graph.duration_ns, graph.start, graph.successor, graph.lag_ns)
    members, bounds = _components(order, graph.start, graph.successor)
    # With more microbatches than workers the busiest one bounds as well by itself.
    if np.count_nonzero(np.diff(bounds) > 1) <= num_workers:
        _through_workers(
            graph.worker, num_workers, graph.duration_ns, graph.start, graph.successor, graph.lag_ns,
            members, bounds, heads, tails,
        )  # fmt: skip
    return heads, tails


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
    return order[:known], heads, tails


@numba.njit(cache=True)
def _components(order, start, successor):  # type: ignore[no-untyped-def]
    """Stages that depend on each other, directly or not, together, each set in topological order: (stages, bounds)."""
    size = len(order)
    parent = np.arange(size)
    for s in order:
        for i in range(start[s], start[s + 1]):
            a, b = s, successor[i]
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            while parent[b] != b:
                parent[b] = parent[parent[b]]
                b = parent[b]
            parent[b] = a
    root, count = np.empty(size, np.int64), np.zeros(size, np.int64)
    for s in range(size):
        a = s
        while parent[a] != a:
            a = parent[a]
        root[s] = a
        count[a] += 1
    bounds, at = np.zeros(size + 1, np.int64), np.zeros(size, np.int64)
    num_sets = 0
    for s in range(size):
        if root[s] == s:
            at[s] = bounds[num_sets]
            bounds[num_sets + 1] = bounds[num_sets] + count[s]
            num_sets += 1
    members = np.empty(size, np.int64)
    for s in order:
        members[at[root[s]]] = s
        at[root[s]] += 1
    return members, bounds[: num_sets + 1]


@numba.njit(cache=True)
def _through_workers(worker, num_workers, duration, start, successor, lag, members, bounds, heads, tails):  # type: ignore[no-untyped-def]
    """Raise heads and tails: what precedes (follows) a stage on one worker runs one after the other there."""
    local = np.zeros(len(worker), np.int64)
    first, total, last = (
        np.zeros(num_workers, np.int64),
        np.zeros(num_workers, np.int64),
        np.zeros(num_workers, np.int64),
    )
    for component in range(len(bounds) - 1):
        stages = members[bounds[component] : bounds[component + 1]]
        size = len(stages)
        if size < 2 or size > LARGEST:
            continue
        for k in range(size):
            local[stages[k]] = k
        # 1. path[a, b]: longest path from the end of a to the start of b, -1 for none.
        path = np.full((size, size), -1, np.int64)
        for b in range(size):
            s = stages[b]
            for i in range(start[s], start[s + 1]):
                k = local[successor[i]]
                path[b, k] = max(path[b, k], lag[i])
                for a in range(b):
                    if path[a, b] >= 0:
                        path[a, k] = max(path[a, k], path[a, b] + duration[s] + lag[i])
        # 2. Heads, from the front: the earliest of what precedes, all of it, the shortest way on.
        for b in range(size):
            s = stages[b]
            first[:], total[:], last[:] = NEVER, 0, NEVER
            for a in range(b):
                if path[a, b] >= 0:
                    p = stages[a]
                    w = worker[p]
                    heads[s] = max(heads[s], heads[p] + duration[p] + path[a, b])
                    first[w] = min(first[w], heads[p])
                    total[w] += duration[p]
                    last[w] = min(last[w], path[a, b])
            for w in range(num_workers):
                if total[w] > 0:
                    heads[s] = max(heads[s], first[w] + total[w] + last[w])
        # 3. Tails likewise, from the back.
        for a in range(size - 1, -1, -1):
            s = stages[a]
            first[:], total[:], last[:] = NEVER, 0, NEVER
            for b in range(a + 1, size):
                if path[a, b] >= 0:
                    p = stages[b]
                    w = worker[p]
                    tails[s] = max(tails[s], tails[p] + duration[p] + path[a, b])
                    first[w] = min(first[w], path[a, b])
                    total[w] += duration[p]
                    last[w] = min(last[w], tails[p])
            for w in range(num_workers):
                if total[w] > 0:
                    tails[s] = max(tails[s], first[w] + total[w] + last[w])


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
