"""List scheduling: the worker that can start soonest takes the stage with the lowest rank, again and again.

Ranks and a few rules decide everything; a schedule of 10000 stages takes a few milliseconds. Example, two workers,
three microbatches, F 1, B 2, ranks in the order of the microbatches, backwards and forwards in turn:

    worker 0   0 1 2 . 0 0 1 1 2 2 .     order 0F0 0F1 0F2 0B0 0B1 0B2
    worker 1   . 0 0 0 1 1 1 2 2 2

Under memory limits a stage starts only if what is left stays safe (`safety.py`), so a schedule is always found where
the reference keeps to the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.planner.problem import Ints, Problem
from pipeweaver.planner.safety import admit, first_unsafe, make_safety

TieBreak = Literal["rank", "alternate", "gives"]
"""Of stages that take memory and stages that give it back: by rank; not the kind that ran last; the latter."""

TIE_BREAKS: tuple[TieBreak, ...] = ("rank", "alternate", "gives")
CANDIDATES = 4
"""How many stages of a kind a worker tries to admit, by rank, before the one that is first in the reference."""
NEVER = 1 << 62


class Rules(NamedTuple):
    """How list scheduling decides beside ranks.

    `tie_break` between kinds. `patience`: a stage waits for one of lower rank that can start within this share of
    its own duration. `full`: from this share of its limit on, a worker prefers stages that give memory back.
    `most_open`: how many groups may be under way at a time, 0 for any number.
    """

    tie_break: TieBreak = "rank"
    patience: float = 0.0
    full: float = 2.0
    most_open: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each stage starts, ns [n], and the stages in the order in which they were decided on [n].

    That is an order in which they can run one after the other within the limits; on each worker it is that of their
    starts.
    """

    start_ns: Ints
    sequence: Ints
    makespan_ns: int

    def orders(self, problem: Problem) -> tuple[Ints, ...]:
        """Stages of each worker, in order."""
        worker = problem.worker[self.sequence]
        return tuple(self.sequence[worker == w] for w in range(problem.num_workers))


class LimitError(ValueError):
    """The reference itself does not keep to the limits. `worker` is where."""

    def __init__(self, worker: int, limit_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"worker {worker} needs {needed_bytes:,} bytes even with one microbatch at a time, "
            f"{needed_bytes - limit_bytes:,} more than the {limit_bytes:,} that it may use"
        )
        self.worker = worker
        self.missing_bytes = needed_bytes - limit_bytes


def list_schedule(
    problem: Problem,
    rank: NDArray[np.float64],
    rules: Rules = Rules(),  # noqa: B008 (frozen)
    limits: Ints | None = None,
    tails: Ints | None = None,
    cutoff_ns: int = NEVER,
    reference: Ints | None = None,
) -> Schedule | None:
    """Schedule all stages by `rank` [n], the lowest first; None as soon as it cannot end before `cutoff_ns`.

    `limits` [P]: bytes that each worker may use, None for no limit. `tails` [n]: ns from the start of a stage to the
    end of the step, for the cutoff. Groups are let in by the rank of their first stage. `reference` [n] is a sequence
    of all stages that keeps to the limits, by default the groups' own; with `rules.most_open` no other will do, for its
    first stage might be of a group that is not let in. Raises LimitError.
    """
    assert reference is None or not rules.most_open, rules
    limited = limits is not None and exceeds(problem, limits)
    bounds = limits if limits is not None and limited else np.zeros(problem.num_workers, np.int64)
    order = group_order(problem, rank)
    if reference is None:
        reference = reference_of(problem, order) if limited else problem.sequence
    known = np.zeros(problem.num_stages, np.int64) if tails is None else tails
    start, sequence, outcome = _run(
        problem,
        rank,
        TIE_BREAKS.index(rules.tie_break),
        rules.patience,
        rules.full,
        rules.most_open if rules.most_open else problem.num_groups,
        order,
        reference,
        limited,
        bounds,
        known,
        cutoff_ns,
    )
    if outcome == _UNSAFE:
        assert limits is not None
        check_limits(problem, limits)
        raise AssertionError("the reference exceeds a limit, or its check is wrong")
    if outcome == _CUT:
        return None
    return Schedule(start_ns=start, sequence=sequence, makespan_ns=int((start + problem.duration_ns).max(initial=0)))


def check_limits(problem: Problem, limits: Ints) -> None:
    """Raises LimitError, for the worker that lacks most, if some group alone exceeds the limits."""
    needed = needed_alone(problem).max(axis=0, initial=0)
    missing = needed - limits
    if missing.max(initial=0) > 0:
        worker = int(missing.argmax())
        raise LimitError(worker, int(limits[worker]), int(needed[worker]))


def needed_alone(problem: Problem) -> Ints:
    """[G, P] bytes: the most that each worker holds while a group runs alone in the reference."""
    needed: Ints = _needed_alone(problem)
    return needed


def exceeds(problem: Problem, limits: Ints) -> bool:
    """Whether some order may exceed the limits."""
    held, passing = np.zeros(problem.num_workers, np.int64), np.zeros(problem.num_workers, np.int64)
    np.add.at(held, problem.effect_worker, problem.effect_takes)
    np.maximum.at(passing, problem.effect_worker, problem.effect_passing)
    return bool((held + passing > limits).any())


def group_order(problem: Problem, rank: NDArray[np.float64]) -> Ints:
    """Groups by the lowest rank in each."""
    lowest = np.full(problem.num_groups, np.inf)
    np.minimum.at(lowest, problem.group, rank)
    return np.argsort(lowest, kind="stable")


def reference_of(problem: Problem, order: Ints) -> Ints:
    """The reference with the groups in this order."""
    start = problem.sequence_start
    length = np.diff(start)[order]
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])[:-1]
    reference: Ints = problem.sequence[np.arange(len(problem.sequence)) + np.repeat(start[order] - first, length)]
    return reference


_DONE, _CUT, _UNSAFE = range(3)


@numba.njit(cache=True)
def _push(heap, base, size, stage, key):  # type: ignore[no-untyped-def]
    """Into the heap of `size` stages that begins at `base`."""
    child = size
    while child > 0:
        parent = (child - 1) // 2
        if key[heap[base + parent]] <= key[stage]:
            break
        heap[base + child] = heap[base + parent]
        child = parent
    heap[base + child] = stage


@numba.njit(cache=True)
def _pop(heap, base, size, key):  # type: ignore[no-untyped-def]
    """Remove and return the top of a heap of `size` stages."""
    top, stage = heap[base], heap[base + size - 1]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and key[heap[base + child + 1]] < key[heap[base + child]]:
            child += 1
        if key[stage] <= key[heap[base + child]]:
            break
        heap[base + parent] = heap[base + child]
        parent = child
    heap[base + parent] = stage
    return top


@numba.njit(cache=True)
def _remove(heap, base, size, stage, key):  # type: ignore[no-untyped-def]
    """Remove one stage from a heap of `size` stages."""
    kept = 0
    for i in range(size):
        if heap[base + i] != stage:
            other = heap[base + i]
            _push(heap, base, kept, other, key)
            kept += 1


@numba.njit(cache=True)
def _run(  # type: ignore[no-untyped-def]
    problem, rank, tie_break, patience, full, most_open, entry, reference, limited, limits, tails, cutoff
):
    """(start [n], stages in the order of their starts [n], outcome)."""
    worker, duration, group = problem.worker, problem.duration_ns, problem.group
    n, workers, num_groups = len(worker), problem.num_workers, len(entry)
    start, sequence = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # Queues: `future` by the time from which a stage may start, `queue[k]` (1 for stages that give) by rank.
    base = np.zeros(workers + 1, np.int64)
    for s in range(n):
        base[worker[s] + 1] += 1
    for w in range(workers):
        base[w + 1] += base[w]
    future, queue = np.empty(n, np.int64), np.empty((2, n), np.int64)
    in_future, in_queue = np.zeros(workers, np.int64), np.zeros((2, workers), np.int64)
    ready, waiting = np.zeros(n, np.int64), np.empty(n, np.int64)
    left, place = np.zeros(num_groups, np.int64), np.zeros(n, np.int64)
    for s in range(n):
        waiting[s] = problem.predecessor_start[s + 1] - problem.predecessor_start[s]
        left[group[s]] += 1
    for i in range(n):
        place[reference[i]] = i
    entered, num_open = 0, 0
    while entered < num_groups and num_open < most_open:
        _enter(problem, entry[entered], 0, future, base, in_future, ready, waiting)
        num_open += left[entry[entered]] > 0
        entered += 1
    safety = make_safety(problem, reference if limited else reference[:0])
    if limited and first_unsafe(safety, limits) >= 0:
        return start, sequence, _UNSAFE
    most_effects = 1
    for s in range(n):
        most_effects = max(most_effects, problem.effect_start[s + 1] - problem.effect_start[s])
    undo, aside = np.empty(most_effects, np.int64), np.empty(n, np.int64)
    clock, last_kind = np.zeros(workers, np.int64), np.ones(workers, np.int64)
    # `refused_by[w]`: a bit for every worker whose limit forbids something that waits at w, where nothing may start
    # until something changes at one of them; 0 if something may.
    refused_by, allowed_at = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    for scheduled in range(n):
        s, w, now = -1, -1, np.int64(0)
        while s < 0:
            # 1. The worker that can start soonest.
            w = -1
            for candidate in range(workers):
                begin = np.int64(-1)
                if refused_by[candidate] == 0 and in_queue[0, candidate] + in_queue[1, candidate] > 0:
                    begin = max(clock[candidate], allowed_at[candidate])
                if in_future[candidate] > 0:
                    at = max(clock[candidate], ready[future[base[candidate]]])
                    begin = at if begin < 0 else min(begin, at)
                if begin >= 0 and (w < 0 or begin < now):
                    w, now = candidate, begin
            assert w >= 0
            # 2. What waits for it by then.
            while in_future[w] > 0 and ready[future[base[w]]] <= now:
                t = _pop(future, base[w], in_future[w], ready)
                in_future[w] -= 1
                kind = problem.gives[t]
                _push(queue[kind], base[w], in_queue[kind, w], t, rank)
                in_queue[kind, w] += 1
            if patience > 0 and in_future[w] > 0:
                now = _awaited(problem, rank, patience, queue, in_queue, future[base[w]], base[w], w, now, ready)
                while in_future[w] > 0 and ready[future[base[w]]] <= now:
                    t = _pop(future, base[w], in_future[w], ready)
                    in_future[w] -= 1
                    kind = problem.gives[t]
                    _push(queue[kind], base[w], in_queue[kind, w], t, rank)
                    in_queue[kind, w] += 1
            # 3. Which kind first, and of it the first that may start.
            first = 0 if in_queue[0, w] > 0 else 1
            if in_queue[0, w] > 0 and in_queue[1, w] > 0:
                if tie_break == 2 or (limited and safety.used[w] > full * limits[w]):
                    first = 1
                elif tie_break == 1 and not problem.late[queue[1, base[w]]]:
                    first = 1 - last_kind[w]
                else:
                    first = 0 if rank[queue[0, base[w]]] < rank[queue[1, base[w]]] else 1
            refusal = np.int64(0)
            for kind in (first, 1 - first):
                num_aside = 0
                while in_queue[kind, w] > 0 and s < 0 and num_aside < CANDIDATES:
                    t = _pop(queue[kind], base[w], in_queue[kind, w], rank)
                    in_queue[kind, w] -= 1
                    by = admit(problem, safety, limits, t, undo) if limited else -1
                    if by < 0:
                        s = t
                    else:
                        refusal |= _bit(by)
                        aside[num_aside] = t
                        num_aside += 1
                if s < 0 and in_queue[kind, w] > 0:
                    t = queue[kind, base[w]]
                    for i in range(1, in_queue[kind, w]):
                        if place[queue[kind, base[w] + i]] < place[t]:
                            t = queue[kind, base[w] + i]
                    by = admit(problem, safety, limits, t, undo)
                    if by < 0:
                        s = t
                        _remove(queue[kind], base[w], in_queue[kind, w], t, rank)
                        in_queue[kind, w] -= 1
                    else:
                        refusal |= _bit(by)
                for i in range(num_aside):
                    _push(queue[kind], base[w], in_queue[kind, w], aside[i], rank)
                    in_queue[kind, w] += 1
                if s >= 0:
                    break
            refused_by[w] = refusal if s < 0 else 0
        # 4. Run it. One that patience awaited may have been refused, and is allowed earlier than it is ready.
        now = max(now, ready[s])
        if now + tails[s] >= cutoff:
            return start, sequence, _CUT
        start[s], sequence[scheduled] = now, s
        end = now + duration[s]
        clock[w], last_kind[w] = end, problem.gives[s]
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            t = problem.successor[i]
            ready[t] = max(ready[t], end + problem.lag_ns[i])
            waiting[t] -= 1
            if waiting[t] == 0:
                _push(future, base[worker[t]], in_future[worker[t]], t, ready)
                in_future[worker[t]] += 1
        left[group[s]] -= 1
        num_open -= left[group[s]] == 0
        while entered < num_groups and num_open < most_open:
            _enter(problem, entry[entered], end, future, base, in_future, ready, waiting)
            num_open += left[entry[entered]] > 0
            entered += 1
        if limited:
            for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
                changed = problem.effect_worker[e]
                for other in range(workers):
                    if refused_by[other] & _bit(changed):
                        refused_by[other] = 0
                        allowed_at[other] = max(allowed_at[other], end if changed == w else now)
    return start, sequence, _DONE


@numba.njit(cache=True)
def _bit(worker):  # type: ignore[no-untyped-def]
    """Workers may share a bit: then one is looked at in vain now and then."""
    return np.int64(1) << np.int64(worker % 62)


@numba.njit(cache=True)
def _awaited(problem, rank, patience, queue, in_queue, coming, base, w, now, ready):  # type: ignore[no-untyped-def]
    """When worker w decides: now, or as soon as the stage `coming` may start, if that is soon and of lower rank."""
    top = -1
    for kind in range(2):
        if in_queue[kind, w] > 0 and (top < 0 or rank[queue[kind, base]] < rank[top]):
            top = queue[kind, base]
    if top >= 0 and rank[coming] < rank[top] and ready[coming] < now + np.int64(patience * problem.duration_ns[top]):
        return ready[coming]
    return now


@numba.njit(cache=True)
def _enter(problem, g, now, future, base, in_future, ready, waiting):  # type: ignore[no-untyped-def]
    """Put the stages of group g that depend on none into the queues."""
    for i in range(problem.sequence_start[g], problem.sequence_start[g + 1]):
        s = problem.sequence[i]
        if waiting[s] == 0:
            w = problem.worker[s]
            ready[s] = now
            _push(future, base[w], in_future[w], s, ready)
            in_future[w] += 1


@numba.njit(cache=True)
def _needed_alone(problem):  # type: ignore[no-untyped-def]
    num_groups = len(problem.sequence_start) - 1
    needed = np.zeros((num_groups, problem.num_workers), np.int64)
    held = np.zeros(problem.num_workers, np.int64)
    for g in range(num_groups):
        held[:] = 0
        for i in range(problem.sequence_start[g], problem.sequence_start[g + 1]):
            s = problem.sequence[i]
            for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
                w = problem.effect_worker[e]
                held[w] += problem.effect_takes[e]
                needed[g, w] = max(needed[g, w], held[w] + problem.effect_passing[e])
                held[w] -= problem.effect_gives[e]
    return needed
