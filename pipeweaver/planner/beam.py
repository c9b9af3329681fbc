"""Beam search over schedules, for problems that are not large: stage after stage in the order of their starts.

A partial schedule is extended by every stage that may come next and starts no earlier than its last one, so that every
set of orders is met once, waiting for a stage that is not ready included. Of all that have the same number of stages
the best `width` are kept, by what they cannot end before. Unlike list scheduling, it may leave a worker idle though
something could run, and knows no reference (`safety.py`): some nodes run into a corner, and others do not. Example, width 2,
two workers, limit of one microbatch on worker 0:

    0F0 | 0F1      0F0 1F0 | 0F1 1F1      0F0 1F0 1B0 | 0F1 1F1 1B1, neither 0F1 nor 0F0 fits      ...

Beam search for machine scheduling: Ow and Morton 1988; the same stages done sooner everywhere make a node superfluous.
"""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.planner.listing import NEVER, Schedule
from pipeweaver.planner.problem import Ints, Problem


def beam_search(
    problem: Problem,
    tails: Ints,
    limits: Ints | None = None,
    *,
    width: int,
    mix: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
    cutoff_ns: int,
) -> tuple[Schedule | None, bool]:
    """The best schedule that ends before `cutoff_ns` among those that a beam of `width` meets, None if it meets none; and
    whether it was wide enough for all of them.

    `tails` [n]: ns from the start of a stage to the end of the step. Nodes are ranked by the largest of what workers and
    stages cannot end before, plus `mix` times the mean over workers, plus up to `noise` times itself at random.
    `limits` [P] bytes; problems whose stages take memory of other workers are not for this search.
    Same arguments, same schedule.
    """
    assert limits is None or len(problem.effect_worker) == problem.num_stages, "effects on other workers"
    unlimited = np.full(problem.num_workers, np.iinfo(np.int64).max // 4, np.int64)
    start, sequence, makespan, wide = _search(
        problem, tails, unlimited if limits is None else limits, width, mix, noise, seed, cutoff_ns
    )
    found = None if makespan < 0 else Schedule(start_ns=start, sequence=sequence, makespan_ns=int(makespan))
    return found, bool(wide)


@numba.njit(cache=True)
def _search(problem, tails, limits, width, mix, noise, seed, cutoff):  # type: ignore[no-untyped-def]
    """(start [n], stages by their start [n], makespan, -1 for none; whether no node was left out for want of width)."""
    np.random.seed(seed % 4_294_967_291)
    n, workers = len(problem.worker), problem.num_workers
    start, sequence = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # Nodes of this level and the next: when stages may start, what they still wait for (-1 once they are done), when
    # workers are free, what they hold and have left to do, start and worker of the last stage, which stages are done.
    ready, waiting = np.zeros((2, width, n), np.int64), np.zeros((2, width, n), np.int16)
    free, held, left = (
        np.zeros((2, width, workers), np.int64),
        np.zeros((2, width, workers), np.int64),
        np.zeros((2, width, workers), np.int64),
    )
    last, last_worker = np.zeros((2, width), np.int64), np.zeros((2, width), np.int64)
    done, mark = np.zeros((2, width), np.int64), np.empty(n, np.int64)
    for s in range(n):
        mark[s] = np.random.randint(np.int64(1) << 62)
        waiting[0, 0, s] = problem.predecessor_start[s + 1] - problem.predecessor_start[s]
        left[0, 0, problem.worker[s]] += problem.duration_ns[s]
    parent, stage = np.zeros((n, width), np.int32), np.zeros((n, width), np.int32)
    rank, child_of, adds = np.empty(width * n), np.empty(width * n, np.int32), np.empty(width * n, np.int32)
    slots = 1
    while slots < 4 * width:
        slots *= 2
    size, wide = 1, True
    for level in range(n):
        # 1. Children, with what they cannot end before.
        now, after, count = level & 1, 1 - (level & 1), 0
        for i in range(size):
            for s in range(n):
                if waiting[now, i, s] != 0:
                    continue
                w, e = problem.worker[s], problem.effect_start[s]
                begin = max(free[now, i, w], ready[now, i, s])
                if begin < last[now, i] or (begin == last[now, i] and w < last_worker[now, i]):
                    continue
                if held[now, i, w] + problem.effect_takes[e] + problem.effect_passing[e] > limits[w]:
                    continue
                bound, mean = _bound(
                    problem, tails, ready[now, i], waiting[now, i], free[now, i], left[now, i], s, begin
                )
                if bound < cutoff:
                    rank[count] = bound + mix * mean + noise * bound * np.random.random()
                    child_of[count], adds[count] = i, s
                    count += 1
        # 2. The best of them, none that another one dominates.
        table, size = np.full(slots, -1, np.int32), 0
        for k in np.argsort(rank[:count]):
            if size == width:
                wide = False
                break
            i, s = child_of[k], adds[k]
            w, e = problem.worker[s], problem.effect_start[s]
            begin = max(free[now, i, w], ready[now, i, s])
            end = begin + problem.duration_ns[s]
            ready[after, size], waiting[after, size], free[after, size] = ready[now, i], waiting[now, i], free[now, i]
            free[after, size, w], waiting[after, size, s] = end, -1
            last[after, size], done[after, size] = begin, done[now, i] ^ mark[s]
            for j in range(problem.successor_start[s], problem.successor_start[s + 1]):
                t = problem.successor[j]
                waiting[after, size, t] -= 1
                ready[after, size, t] = max(ready[after, size, t], end + problem.lag_ns[j])
            slot, dominated = done[after, size] & (slots - 1), False
            while table[slot] >= 0 and not dominated:
                dominated = done[after, table[slot]] == done[after, size] and _is_sooner(
                    problem, ready[after], waiting[after], free[after], last[after], table[slot], size
                )
                slot = (slot + 1) & (slots - 1)
            if dominated:
                continue
            table[slot] = size
            held[after, size], left[after, size], last_worker[after, size] = held[now, i], left[now, i], w
            held[after, size, w] += problem.effect_takes[e] - problem.effect_gives[e]
            left[after, size, w] -= problem.duration_ns[s]
            parent[level, size], stage[level, size] = i, s
            size += 1
        if size == 0:
            return start, sequence, np.int64(-1), wide
    # 3. The one that ends first, from its last stage back.
    makespan, best = NEVER, 0
    for i in range(size):
        end = int(free[n & 1, i].max())
        if end < makespan:
            makespan, best = end, i
    for level in range(n - 1, -1, -1):
        sequence[level] = stage[level, best]
        best = int(parent[level, best])
    free_at, ready_at = np.zeros(workers, np.int64), np.zeros(n, np.int64)
    for level in range(n):
        s = int(sequence[level])
        start[s] = max(free_at[problem.worker[s]], ready_at[s])
        free_at[problem.worker[s]] = start[s] + problem.duration_ns[s]
        for j in range(problem.successor_start[s], problem.successor_start[s + 1]):
            t = problem.successor[j]
            ready_at[t] = max(ready_at[t], free_at[problem.worker[s]] + problem.lag_ns[j])
    return start, sequence, makespan, wide


@numba.njit(cache=True)
def _bound(problem, tails, ready, waiting, free, left, s, begin):  # type: ignore[no-untyped-def]
    """(what a node cannot end before once stage s begins next, the mean over workers of what they cannot)."""
    w, end, total = problem.worker[s], begin + problem.duration_ns[s], 0.0
    bound = end
    for v in range(problem.num_workers):
        until = end + left[v] - problem.duration_ns[s] if v == w else max(free[v], begin) + left[v]
        total += until
        bound = max(bound, until)
    for t in range(len(ready)):
        if waiting[t] >= 0 and t != s:
            v = problem.worker[t]
            bound = max(bound, max(ready[t], end if v == w else max(free[v], begin)) + tails[t])
    for j in range(problem.successor_start[s], problem.successor_start[s + 1]):
        bound = max(bound, end + problem.lag_ns[j] + tails[problem.successor[j]])
    return bound, total / problem.num_workers


@numba.njit(cache=True)
def _is_sooner(problem, ready, waiting, free, last, a, b):  # type: ignore[no-untyped-def]
    """Whether node a, of the same stages as node b, lets everything that is left start as soon."""
    for v in range(problem.num_workers):
        if max(free[a, v], last[a]) > max(free[b, v], last[b]):
            return False
    for t in range(ready.shape[1]):
        if waiting[b, t] >= 0 and ready[a, t] > max(ready[b, t], free[b, problem.worker[t]], last[b]):
            return False
    return True
