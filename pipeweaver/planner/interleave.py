"""Order the stages of all workers by a greedy dual queue (pipeweaver.md, section 3.2), within a memory limit.

Every worker has a queue of forwards and one of backwards, by rank. Again and again the worker that can start
soonest takes a stage: if a forward and a backward wait for it, the tie-break decides (by default the kind that
it did not run last, as in 1F1B); else what is there. Example, two workers, three microbatches, F 1, B 2, lag 0:

    worker 0   0 1 2 . 0 0 1 1 2 2 .     order 0F0 0F1 0F2 0B0 0B1 0B2
    worker 1   . 0 0 0 1 1 1 2 2 2

**No way into a corner.** A stage starts only if afterwards all open microbatches can still be brought to their
end, one after the other in some order, each in the order of its stage numbers (a banker's check). In such a state
the next stage of the first microbatch in that order may always start: what it needs is part of what that
microbatch needs, and nothing changes for the others, since it gives everything back. So there is always a stage
that may start, until all are done. Microbatches that are not open hold nothing and can wait. Hence: if every
microbatch alone fits, a schedule is found, and if one does not, no limit on microbatches helps: ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.planner.instance import Instance, Ints

TieBreak = Literal["alternate", "backward", "rank"]
"""When a forward and a backward wait for a worker: the kind it did not run last; the backward; the lower rank."""

TIE_BREAKS: tuple[TieBreak, ...] = ("alternate", "backward", "rank")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each stage starts, ns [n], and the stages in the order of their starts [n]."""

    start_ns: Ints
    sequence: Ints
    makespan_ns: int

    def orders(self, instance: Instance) -> tuple[tuple[int, ...], ...]:
        """Stage numbers of each worker, in order."""
        of: list[list[int]] = [[] for _ in range(instance.num_workers)]
        for stage, worker in zip(self.sequence.tolist(), instance.worker[self.sequence].tolist(), strict=True):
            of[worker].append(stage)
        return tuple(map(tuple, of))


class MemoryLimitError(ValueError):
    """A microbatch does not fit alone: worker `worker` lacks `missing_bytes` for microbatch `microbatch`."""

    def __init__(self, worker: int, microbatch: int, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"worker {worker} needs {needed_bytes} bytes for microbatch {microbatch} alone, "
            f"{needed_bytes - limit_bytes} more than the {limit_bytes} that it may use"
        )
        self.worker = worker
        self.microbatch = microbatch
        self.missing_bytes = needed_bytes - limit_bytes


def interleave(
    instance: Instance,
    rank: Ints,
    tie_break: TieBreak = "alternate",
    limits: Sequence[int] | None = None,
    most_open: int | None = None,
) -> Schedule:
    """Schedule all stages; of waiting stages of one kind the one with the lowest `rank` [n] goes first.

    `limits` [P]: bytes that each worker may use for stages, None for no limit. `most_open`: how many microbatches
    may be under way at a time, None for any number; a limit far from reach wastes no memory on forwards that
    run ahead. Raises MemoryLimitError if a microbatch does not fit alone.
    """
    most_open = instance.num_microbatches if most_open is None else most_open
    assert most_open >= 1 or instance.num_microbatches == 0, most_open
    limited = limits is not None and bool(np.any(_at_most(instance) > np.array(limits, np.int64)))
    if limited:
        check_limits(instance, limits or ())
    usable = np.array(limits if limited else [0] * instance.num_workers, np.int64) - instance.reserve
    start, sequence = _run(instance, _distinct(rank), TIE_BREAKS.index(tie_break), most_open, limited, usable)
    makespan = int((start + instance.duration_ns).max(initial=0))
    return Schedule(start_ns=start, sequence=sequence, makespan_ns=makespan)


def check_limits(instance: Instance, limits: Sequence[int]) -> None:
    """Raises MemoryLimitError, for the worker that lacks most, if some microbatch does not fit alone."""
    needed = needed_alone(instance)
    missing = needed - np.array(limits, np.int64)
    if missing.max(initial=0) > 0:
        microbatch, worker = (int(i) for i in np.unravel_index(int(missing.argmax()), missing.shape))
        raise MemoryLimitError(worker, microbatch, int(needed[microbatch, worker]), limits[worker])


def needed_alone(instance: Instance) -> Ints:
    """[J, P] bytes: the most that a worker holds while a microbatch runs alone in the order of its numbers."""
    needed = np.zeros((instance.num_microbatches, instance.num_workers), np.int64)
    done = np.zeros(instance.num_stages, np.bool_)
    for microbatch in range(instance.num_microbatches):
        _still_needed(instance, done, microbatch, needed[microbatch])
    return needed + instance.reserve


def tails(instance: Instance) -> Ints:
    """[n] ns: the longest path from the start of a stage to the end of the step, transfers included."""
    return _tails(instance)


def _distinct(rank: Ints) -> Ints:
    """Ranks 0..n-1 in the same order, ties by stage number."""
    result = np.empty(len(rank), np.int64)
    result[np.argsort(rank, kind="stable")] = np.arange(len(rank))
    return result


def _at_most(instance: Instance) -> Ints:
    """[P] bytes that no order exceeds."""
    held, passing = instance.reserve.copy(), np.zeros(instance.num_workers, np.int64)
    np.add.at(held, instance.worker, instance.holds)
    np.add.at(held, instance.remote_worker, instance.remote_bytes)
    np.maximum.at(passing, instance.worker, instance.passing)
    return held + passing


class _Memory(NamedTuple):
    """The memory of a partial schedule. `held[j, w]` is what microbatch j holds on worker w, `used[w]` all of it.

    Microbatches `open[:num_open[0]]` have begun and not ended. `needed[j, w]`, where not `stale[j]`, is what
    bringing j to its end takes beyond what it holds. Coarser: of the `total[j, w]` that the stages of j hold in
    all, `to_come[w]` is still to come of all open ones; no stage passes more than `most_passing[w]`.
    """

    limits: Ints
    used: Ints
    held: Ints
    done: NDArray[np.bool_]
    left: Ints
    is_open: NDArray[np.bool_]
    open: Ints
    num_open: Ints
    needed: Ints
    stale: NDArray[np.bool_]
    total: Ints
    to_come: Ints
    most_passing: Ints


# The rest is compiled. Heaps are slices of flat arrays: `base[w]` is where the one of worker w begins.


@numba.njit(cache=True)
def _push(heap, base, size, stage, key):  # type: ignore[no-untyped-def]
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
def _run(problem, rank, tie_break, most_open, limited, limits):  # type: ignore[no-untyped-def]
    """(start [n], stages in the order of their starts [n])."""
    worker, backward = problem.worker, problem.backward
    n, num_workers = len(worker), len(limits)
    start, sequence = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # Queues: `future` by the time from which a stage may start, `queue[k]` (0 forward, 1 backward) by rank.
    base = np.zeros(num_workers + 1, np.int64)
    for s in range(n):
        base[worker[s] + 1] += 1
    for w in range(num_workers):
        base[w + 1] += base[w]
    future, queue = np.empty(n, np.int64), np.empty((2, n), np.int64)
    in_future, in_queue = np.zeros(num_workers, np.int64), np.zeros((2, num_workers), np.int64)
    ready_at, waiting = np.zeros(n, np.int64), problem.num_predecessors.copy()
    # Microbatches are let in by the rank of their first stages, `most_open` at a time.
    num_microbatches = len(problem.forward_range) - 1
    left, first_rank = np.zeros(num_microbatches, np.int64), np.full(num_microbatches, n, np.int64)
    for s in range(n):
        left[problem.microbatch[s]] += 1
        first_rank[problem.microbatch[s]] = min(first_rank[problem.microbatch[s]], rank[s])
    entry = np.argsort(first_rank)
    num_entered = 0
    while num_entered < min(most_open, num_microbatches):
        _enter(problem, entry[num_entered], 0, future, base, in_future, ready_at)
        num_entered += 1
    clock, last_kind = np.zeros(num_workers, np.int64), np.ones(num_workers, np.int64)
    memory = _empty_memory(problem, limits)
    # `refused[w]`: nothing that waits at w may start before memory is freed, at `freed_at[w]` at the earliest.
    refused, freed_at = np.zeros(num_workers, np.bool_), np.zeros(num_workers, np.int64)
    aside = np.empty(n, np.int64)
    scheduled = 0
    while scheduled < n:
        # 1. The worker that can start soonest.
        w, now = -1, np.int64(0)
        for candidate in range(num_workers):
            begin = np.int64(-1)
            if not refused[candidate] and in_queue[0, candidate] + in_queue[1, candidate] > 0:
                begin = max(clock[candidate], freed_at[candidate])
            if in_future[candidate] > 0:
                at = max(clock[candidate], ready_at[future[base[candidate]]])
                begin = at if begin < 0 else min(begin, at)
            if begin >= 0 and (w < 0 or begin < now):
                w, now = candidate, begin
        assert w >= 0
        # 2. What waits for it by then.
        while in_future[w] > 0 and ready_at[future[base[w]]] <= now:
            s = _pop(future, base[w], in_future[w], ready_at)
            in_future[w] -= 1
            kind = backward[s]
            _push(queue[kind], base[w], in_queue[kind, w], s, rank)
            in_queue[kind, w] += 1
            refused[w] = False
        # 3. Which kind first, and of it the first that may start.
        first = 1
        if in_queue[0, w] > 0 and in_queue[1, w] > 0:
            if tie_break == 0:
                first = 1 - last_kind[w]
            elif tie_break == 2:
                first = 0 if rank[queue[0, base[w]]] < rank[queue[1, base[w]]] else 1
        chosen = -1
        for kind in (first, 1 - first):
            num_aside = 0
            while in_queue[kind, w] > 0:
                s = _pop(queue[kind], base[w], in_queue[kind, w], rank)
                in_queue[kind, w] -= 1
                if not limited or _admit(problem, memory, s):
                    chosen = s
                    break
                aside[num_aside] = s
                num_aside += 1
            for i in range(num_aside):
                _push(queue[kind], base[w], in_queue[kind, w], aside[i], rank)
                in_queue[kind, w] += 1
            if chosen >= 0:
                break
        if chosen < 0:
            refused[w] = True
            continue
        # 4. Run it.
        s = chosen
        start[s] = now
        sequence[scheduled] = s
        scheduled += 1
        end = now + problem.duration_ns[s]
        clock[w] = end
        last_kind[w] = backward[s]
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            t = problem.successor[i]
            ready_at[t] = max(ready_at[t], end + problem.lag_ns[i])
            waiting[t] -= 1
            if waiting[t] == 0:
                _push(future, base[worker[t]], in_future[worker[t]], t, ready_at)
                in_future[worker[t]] += 1
        left[problem.microbatch[s]] -= 1
        if left[problem.microbatch[s]] == 0 and num_entered < num_microbatches:
            _enter(problem, entry[num_entered], end, future, base, in_future, ready_at)
            num_entered += 1
        if limited and problem.frees[s] + problem.passing[s] > 0:
            for other in range(num_workers):
                if refused[other]:
                    refused[other] = False
                    freed_at[other] = end
    return start, sequence


@numba.njit(cache=True)
def _enter(problem, j, now, future, base, in_future, ready_at):  # type: ignore[no-untyped-def]
    """Put the stages of microbatch j that depend on none into the queues."""
    for s in range(problem.forward_range[j], problem.forward_range[j + 1]):
        if problem.num_predecessors[s] == 0:
            w = problem.worker[s]
            ready_at[s] = now
            _push(future, base[w], in_future[w], s, ready_at)
            in_future[w] += 1


@numba.njit(cache=True)
def _empty_memory(problem, limits):  # type: ignore[no-untyped-def]
    num_stages, num_workers, num_microbatches = len(problem.worker), len(limits), len(problem.forward_range) - 1
    left, total = np.zeros(num_microbatches, np.int64), np.zeros((num_microbatches, num_workers), np.int64)
    most_passing = np.zeros(num_workers, np.int64)
    for s in range(num_stages):
        w, j = problem.worker[s], problem.microbatch[s]
        left[j] += 1
        total[j, w] += problem.holds[s]
        most_passing[w] = max(most_passing[w], problem.passing[s])
        for i in range(problem.remote_start[s], problem.remote_start[s + 1]):
            total[j, problem.remote_worker[i]] += problem.remote_bytes[i]
    return _Memory(
        limits,
        np.zeros(num_workers, np.int64),
        np.zeros((num_microbatches, num_workers), np.int64),
        np.zeros(num_stages, np.bool_),
        left,
        np.zeros(num_microbatches, np.bool_),
        np.zeros(num_microbatches, np.int64),
        np.zeros(1, np.int64),
        np.zeros((num_microbatches, num_workers), np.int64),
        np.ones(num_microbatches, np.bool_),
        total,
        np.zeros(num_workers, np.int64),
        most_passing,
    )


@numba.njit(cache=True)
def _admit(problem, memory, s):  # type: ignore[no-untyped-def]
    """Whether stage s fits now and leaves a safe state; if so, `memory` is the state after it, else as before."""
    j, w, limits = problem.microbatch[s], problem.worker[s], memory.limits
    if memory.used[w] + problem.holds[s] + problem.passing[s] > limits[w]:
        return False
    for i in range(problem.remote_start[s], problem.remote_start[s + 1]):
        v = problem.remote_worker[i]
        if memory.used[v] + problem.remote_bytes[i] > limits[v]:
            return False
    opens = not memory.is_open[j]
    if opens:
        memory.is_open[j] = True
        memory.open[memory.num_open[0]] = j
        memory.num_open[0] += 1
        memory.to_come[:] += memory.total[j]
    _apply(problem, memory, s, 1)
    if _is_safe(problem, memory):
        if memory.left[j] == 0:
            memory.is_open[j] = False
            memory.num_open[0] -= 1
            last = memory.open[memory.num_open[0]]
            for k in range(memory.num_open[0]):
                if memory.open[k] == j:
                    memory.open[k] = last
        return True
    _apply(problem, memory, s, -1)
    if opens:
        memory.is_open[j] = False
        memory.num_open[0] -= 1
        memory.to_come[:] -= memory.total[j]
    return False


@numba.njit(cache=True)
def _apply(problem, memory, s, sign):  # type: ignore[no-untyped-def]
    """Run stage s, or with sign -1 take it back."""
    j, w = problem.microbatch[s], problem.worker[s]
    memory.done[s] = sign > 0
    memory.left[j] -= sign
    memory.stale[j] = True
    kept = sign * (problem.holds[s] - problem.frees[s])
    memory.used[w] += kept
    memory.held[j, w] += kept
    memory.to_come[w] -= sign * problem.holds[s]
    for i in range(problem.remote_start[s], problem.remote_start[s + 1]):
        v, received = problem.remote_worker[i], sign * problem.remote_bytes[i]
        memory.used[v] += received
        memory.held[j, v] += received
        memory.to_come[v] -= received


@numba.njit(cache=True)
def _is_safe(problem, memory):  # type: ignore[no-untyped-def]
    """Whether the open microbatches can be brought to their end one after the other, in some order."""
    num_workers, num_open = len(memory.limits), memory.num_open[0]
    all_at_once = True
    for w in range(num_workers):
        all_at_once &= memory.used[w] + memory.to_come[w] + memory.most_passing[w] <= memory.limits[w]
    if all_at_once:
        return True
    unfinished = num_open
    ended = np.zeros(num_open, np.bool_)
    free = memory.limits - memory.used
    advanced = True
    while advanced and unfinished > 0:
        advanced = False
        for k in range(num_open):
            if ended[k]:
                continue
            j = memory.open[k]
            if memory.stale[j]:
                _still_needed(problem, memory.done, j, memory.needed[j])
                memory.stale[j] = False
            enough = True
            for w in range(num_workers):
                enough &= memory.needed[j, w] <= free[w]
            if enough:
                free += memory.held[j]
                ended[k] = True
                unfinished -= 1
                advanced = True
    return unfinished == 0


@numba.njit(cache=True)
def _still_needed(problem, done, j, peak):  # type: ignore[no-untyped-def]
    """Fill `peak` [P]: bytes beyond what microbatch j holds that bringing it to its end takes at most."""
    held = np.zeros(len(peak), np.int64)
    peak[:] = 0
    for phase in range(2):
        stages = problem.forward_range if phase == 0 else problem.backward_range
        for s in range(stages[j], stages[j + 1]):
            if not done[s]:
                w = problem.worker[s]
                held[w] += problem.holds[s]
                peak[w] = max(peak[w], held[w] + problem.passing[s])
                for i in range(problem.remote_start[s], problem.remote_start[s + 1]):
                    v = problem.remote_worker[i]
                    held[v] += problem.remote_bytes[i]
                    peak[v] = max(peak[v], held[v])
                held[w] -= problem.frees[s]


@numba.njit(cache=True)
def _tails(problem):  # type: ignore[no-untyped-def]
    n = len(problem.worker)
    order, waiting, size = np.empty(n, np.int64), problem.num_predecessors.copy(), 0
    for s in range(n):
        if waiting[s] == 0:
            order[size] = s
            size += 1
    at = 0
    while at < size:
        s = order[at]
        at += 1
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            waiting[problem.successor[i]] -= 1
            if waiting[problem.successor[i]] == 0:
                order[size] = problem.successor[i]
                size += 1
    result = np.zeros(n, np.int64)
    for k in range(n - 1, -1, -1):
        s = order[k]
        for i in range(problem.successor_start[s], problem.successor_start[s + 1]):
            result[s] = max(result[s], problem.lag_ns[i] + result[problem.successor[i]])
        result[s] += problem.duration_ns[s]
    return result
