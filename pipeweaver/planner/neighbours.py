"""Local search around the critical path: tabu search over the orders of the workers, for problems that are not large.

A schedule gets shorter only if its critical path is broken, and that runs through *blocks*: stages that follow each
other without a gap on one worker. Moving a stage to the front or the back of its block (Balas and Vazacopoulos 1998,
Nowicki and Smutnicki 1996) is a neighbour; the best one that was not undone lately is taken, better or not. Example:

    worker 0   a a b b b . .          b before a lets c start earlier:     worker 0   b b b a a
    worker 1   . . . . . c c                                               worker 1   . . . c c

Memory depends on the orders alone. Orders that exceed a limit may be passed through, not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from pipeweaver.planner.listing import Schedule
from pipeweaver.planner.problem import Ints, Problem

TENURE = 8
"""Least number of moves for which a changed pair stays as it is."""
STALE = 400
"""Moves without a new best after which the search starts again from its best, shaken."""
PRICE = 1.0
"""First price of exceeding a limit: share of the makespan for each share of the limit."""
SHAKES = 6
"""Random moves of a shake."""


def tabu_search(
    problem: Problem,
    orders: Sequence[Ints],
    limits: Ints | None = None,
    *,
    seed: int = 0,
    moves: int = 1_000,
    enough_ns: int = 0,
) -> Schedule:
    """The best schedule found within a number of moves; stops at a makespan of `enough_ns` or less.

    `orders` [P] of stages must be feasible. `limits` [P] bytes; problems whose stages take memory of other workers
    are not for this search. Same arguments, same schedule.
    """
    assert limits is None or len(problem.effect_worker) == problem.num_stages, "effects on other workers"
    base = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(order) for order in orders])]).astype(np.int64)
    sequence = np.concatenate([np.zeros(0, np.int64), *orders])
    unlimited = np.full(problem.num_workers, np.iinfo(np.int64).max // 4, np.int64)
    start, by_start = _search(
        problem, base, sequence, unlimited if limits is None else limits, seed, moves, enough_ns, TENURE, STALE, SHAKES
    )
    return Schedule(start_ns=start, sequence=by_start, makespan_ns=int((start + problem.duration_ns).max(initial=0)))


@numba.njit(cache=True)
def _times(problem, base, sequence, place, order, waiting, head):  # type: ignore[no-untyped-def]
    """Fill `order` (topological) and `head` (starts). Returns the makespan, -1 if there is a circle."""
    n, size = len(sequence), 0
    for s in range(n):
        waiting[s] = problem.predecessor_start[s + 1] - problem.predecessor_start[s]
        head[s] = 0
    for w in range(len(base) - 1):
        for i in range(base[w] + 1, base[w + 1]):
            waiting[sequence[i]] += 1
    for s in range(n):
        if waiting[s] == 0:
            order[size] = s
            size += 1
    at, makespan = 0, np.int64(0)
    while at < size:
        s = order[at]
        at += 1
        end = head[s] + problem.duration_ns[s]
        makespan = max(makespan, end)
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            t = problem.successor[i]
            head[t] = max(head[t], end + problem.lag_ns[i])
            waiting[t] -= 1
            if waiting[t] == 0:
                order[size] = t
                size += 1
        i = place[s] + 1
        if i < base[problem.worker[s] + 1]:
            t = sequence[i]
            head[t] = max(head[t], end)
            waiting[t] -= 1
            if waiting[t] == 0:
                order[size] = t
                size += 1
    return makespan if size == n else np.int64(-1)


@numba.njit(cache=True)
def _tails(problem, base, sequence, place, order, tail):  # type: ignore[no-untyped-def]
    """Fill `tail`: longest path from the end of a stage."""
    for k in range(len(order) - 1, -1, -1):
        s = order[k]
        longest = np.int64(0)
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            t = problem.successor[i]
            longest = max(longest, problem.lag_ns[i] + problem.duration_ns[t] + tail[t])
        i = place[s] + 1
        if i < base[problem.worker[s] + 1]:
            t = sequence[i]
            longest = max(longest, problem.duration_ns[t] + tail[t])
        tail[s] = longest


@numba.njit(cache=True)
def _excess(problem, base, sequence, limits, w):  # type: ignore[no-untyped-def]
    """By how much the order of a worker exceeds its limit at most, as a share of the limit."""
    held, most = np.int64(0), np.int64(0)
    for i in range(base[w], base[w + 1]):
        e = problem.effect_start[sequence[i]]
        held += problem.effect_takes[e]
        most = max(most, held + problem.effect_passing[e])
        held -= problem.effect_gives[e]
    return max(0.0, (most - limits[w]) / max(1, limits[w]))


@numba.njit(cache=True)
def _shift(sequence, place, a, b):  # type: ignore[no-untyped-def]
    """Move the stage at place a to place b, those between one place towards a."""
    s = sequence[a]
    step = 1 if b > a else -1
    for i in range(a, b, step):
        sequence[i] = sequence[i + step]
        place[sequence[i]] = i
    sequence[b] = s
    place[s] = b


@numba.njit(cache=True)
def _is_tabu(sequence, until, now, a, b):  # type: ignore[no-untyped-def]
    """Whether moving place a to place b restores a pair that was changed lately. `until[x, y]`: x may not come to
    stand before y."""
    s = sequence[a]
    if b > a:
        for i in range(a + 1, b + 1):
            if until[sequence[i], s] > now:
                return True
    else:
        for i in range(b, a):
            if until[s, sequence[i]] > now:
                return True
    return False


@numba.njit(cache=True)
def _search(problem, base, sequence, limits, seed, moves, enough, tenure, stale, shakes):  # type: ignore[no-untyped-def]
    """(start [n], stages by their start [n]) of the best."""
    np.random.seed(seed)
    n, workers = len(sequence), len(base) - 1
    place = np.zeros(n, np.int64)
    for i in range(n):
        place[sequence[i]] = i
    order, waiting = np.zeros(n, np.int64), np.zeros(n, np.int64)
    head, tail = np.zeros(n, np.int64), np.zeros(n, np.int64)
    scratch_order, scratch_head = np.zeros(n, np.int64), np.zeros(n, np.int64)
    until = np.zeros((n, n), np.int64)
    makespan = _times(problem, base, sequence, place, order, waiting, head)
    assert makespan >= 0
    best, best_sequence, best_head, best_order = makespan, sequence.copy(), head.copy(), order.copy()
    candidates = np.zeros((4 * n + 4, 2), np.int64)
    # Orders that exceed a limit may be passed through, at a price that rises until it is worth it no more.
    excess, price = np.zeros(workers), PRICE
    since = 0
    for now in range(moves):
        if best <= enough:
            break
        _tails(problem, base, sequence, place, order, tail)
        # 1. Moves to the front and to the back of every block.
        count = 0
        for w in range(workers):
            i = base[w]
            while i < base[w + 1]:
                s = sequence[i]
                if head[s] + problem.duration_ns[s] + tail[s] < makespan:
                    i += 1
                    continue
                j = i
                while j + 1 < base[w + 1]:
                    s, t = sequence[j], sequence[j + 1]
                    adjacent = head[t] == head[s] + problem.duration_ns[s]
                    if not adjacent or head[t] + problem.duration_ns[t] + tail[t] < makespan:
                        break
                    j += 1
                for k in range(i, j + 1):
                    if count + 4 > len(candidates):
                        break
                    if k < j:
                        candidates[count] = (k, j)
                        count += 1
                    if k > i:
                        candidates[count] = (k, i)
                        count += 1
                    if i < k and k + 1 < j:
                        candidates[count] = (k, k + 1)
                        count += 1
                i = j + 1
        # 2. The best of them; one that is tabu only if it is the best ever.
        chosen_a, chosen_b, chosen, ties, chosen_excess = -1, -1, -1.0, 0, 0.0
        total = excess.sum()
        for c in range(count):
            a, b = candidates[c, 0], candidates[c, 1]
            tabu = _is_tabu(sequence, until, now, a, b)
            _shift(sequence, place, a, b)
            w = problem.worker[sequence[b]]
            after = _excess(problem, base, sequence, limits, w)
            time = _times(problem, base, sequence, place, scratch_order, waiting, scratch_head)
            _shift(sequence, place, b, a)
            if time < 0 or (tabu and (time >= best or total - excess[w] + after > 0)):
                continue
            found = time * (1.0 + price * (total - excess[w] + after))
            if chosen < 0 or found < chosen:
                chosen_a, chosen_b, chosen, ties, chosen_excess = a, b, found, 1, after
            elif found == chosen:
                ties += 1
                if np.random.randint(ties) == 0:
                    chosen_a, chosen_b, chosen_excess = a, b, after
        since += 1
        if chosen < 0 or since > stale:
            # 3. Shake the best: random neighbours that keep to limits and dependencies.
            sequence[:] = best_sequence
            for i in range(n):
                place[sequence[i]] = i
            for _ in range(shakes):
                for _ in range(20):
                    a = np.random.randint(n)
                    if a + 1 >= base[problem.worker[sequence[a]] + 1]:
                        continue
                    _shift(sequence, place, a, a + 1)
                    if (
                        _excess(problem, base, sequence, limits, problem.worker[sequence[a]]) == 0
                        and _times(problem, base, sequence, place, order, waiting, head) >= 0
                    ):
                        break
                    _shift(sequence, place, a + 1, a)
            until[:] = 0
            since = 0
            excess[:] = 0
            price = PRICE
        else:
            s = sequence[chosen_a]
            lasting = now + tenure + np.random.randint(tenure)
            if chosen_b > chosen_a:
                for i in range(chosen_a + 1, chosen_b + 1):
                    until[s, sequence[i]] = lasting
            else:
                for i in range(chosen_b, chosen_a):
                    until[sequence[i], s] = lasting
            _shift(sequence, place, chosen_a, chosen_b)
            excess[problem.worker[sequence[chosen_b]]] = chosen_excess
            price = min(1e3, price * 1.1) if excess.sum() > 0 else max(1e-2, price / 1.1)
        makespan = _times(problem, base, sequence, place, order, waiting, head)
        if makespan < best and excess.sum() == 0:
            best = makespan
            best_sequence[:] = sequence
            best_head[:] = head
            best_order[:] = order
            since = 0
    rank = np.zeros(n, np.int64)
    for i in range(n):
        rank[best_order[i]] = i
    by_rank = best_order
    return best_head, by_rank[np.argsort(best_head[by_rank], kind="mergesort")]
