"""A scheduling problem as flat integer arrays: what every search over orders works on.

Stages have a worker, a duration, and successors that may start a lag after their end. Memory: a stage *takes* bytes
when it starts and *gives* back others when it ends; *passing* bytes are needed only while it runs. Beside its own
worker a stage may have an effect on others, whose receive buffers its tensor fills. Example, two microbatches on one
worker, F takes 5 and its B gives them back:

    stage      0F0  0B0  0F1  0B1          reference   0F0 0B0 0F1 0B1   needs 5
    takes        5    0    5    0          in order    0F0 0F1 0B0 0B1   needs 10
    gives        0    5    0    5

`reference` is an order in which the stages can run one after the other within the limits, whatever else is not
done; that is what keeps a schedule out of corners (`safety.py`). Stages fall into *groups* (microbatches) that begin
and end with nothing held, so the reference runs group by group, and any order of the groups will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.schedule.bounds import lower_bound_ns
from pipeweaver.schedule.flat import starts
from pipeweaver.schedule.stages import Orders, StageGraph

Ints = NDArray[np.int64]


class Problem(NamedTuple):
    """n stages on P workers in G groups. All arrays int64; ns and bytes. Compiled code takes it as it is.

    `worker`, `duration_ns`, `group`, `gives` (1 for stages after which less is held, or that lead to such: backwards
    and weight halves), `late` (1 for what nothing waits for: weight halves): [n]. `successor_start` [n + 1] indexes
    `successor` and `lag_ns`; `predecessor_start`, `predecessor` likewise. `effect_start` [n + 1] indexes
    `effect_worker`, `effect_takes`, `effect_gives`, `effect_passing`; the first effect of a stage is on its own worker.
    `sequence` [n] is the reference within each group, groups one after the other; `sequence_start` [G + 1].
    """

    num_workers: int
    worker: Ints
    duration_ns: Ints
    group: Ints
    gives: Ints
    late: Ints
    successor_start: Ints
    successor: Ints
    lag_ns: Ints
    predecessor_start: Ints
    predecessor: Ints
    predecessor_lag_ns: Ints
    effect_start: Ints
    effect_worker: Ints
    effect_takes: Ints
    effect_gives: Ints
    effect_passing: Ints
    sequence: Ints
    sequence_start: Ints

    @property
    def num_stages(self) -> int:
        return len(self.worker)

    @property
    def num_groups(self) -> int:
        return len(self.sequence_start) - 1


class Effects(NamedTuple):
    """What stages do to the memory of workers other than their own: [M] each."""

    stage: Ints
    worker: Ints
    takes: Ints


NO_EFFECTS = Effects(*(np.zeros(0, np.int64),) * 3)


def make_problem(
    *,
    num_workers: int,
    worker: Ints,
    duration_ns: Ints,
    source: Ints,
    target: Ints,
    lag_ns: Ints,
    group: Ints,
    num_groups: int,
    gives: Ints,
    late: Ints,
    takes: Ints,
    frees: Ints,
    passing: Ints,
    elsewhere: Effects = NO_EFFECTS,
    urgency: Ints,
) -> Problem:
    """A problem from its dependencies (source, target, lag) and memory by stage.

    In the reference, of the stages of a group that could be next the one with the lowest `urgency` [n] is.
    """
    size = len(worker)
    forward = np.argsort(source, kind="stable")
    backward = np.argsort(target, kind="stable")
    stage = np.concatenate([np.arange(size), elsewhere.stage])
    zeros = np.zeros(len(elsewhere.stage), np.int64)
    by_stage = np.argsort(stage, kind="stable")
    successor_start = starts(np.bincount(source, minlength=size))
    rank = np.empty(size, np.int64)
    rank[np.lexsort((np.arange(size), urgency, group))] = np.arange(size)
    sequence = _reference(successor_start, target[forward], np.bincount(target, minlength=size), rank)
    assert len(sequence) == size, "stages wait for each other in a circle"
    assert (np.diff(group[sequence]) >= 0).all(), "groups depend on each other"
    return Problem(
        num_workers=num_workers,
        worker=worker,
        duration_ns=duration_ns,
        group=group,
        gives=gives,
        late=late,
        successor_start=successor_start,
        successor=target[forward],
        lag_ns=lag_ns[forward],
        predecessor_start=starts(np.bincount(target, minlength=size)),
        predecessor=source[backward],
        predecessor_lag_ns=lag_ns[backward],
        effect_start=starts(np.bincount(stage, minlength=size)),
        effect_worker=np.concatenate([worker, elsewhere.worker])[by_stage],
        effect_takes=np.concatenate([takes, elsewhere.takes])[by_stage],
        effect_gives=np.concatenate([frees, zeros])[by_stage],
        effect_passing=np.concatenate([passing, zeros])[by_stage],
        sequence=sequence,
        sequence_start=starts(np.bincount(group, minlength=num_groups)),
    )


def bound_ns(problem: Problem) -> int:
    """What no schedule of these stages goes below, whatever memory there is."""
    by_worker = np.argsort(problem.worker, kind="stable")
    orders = Orders(
        starts(np.bincount(problem.worker, minlength=problem.num_workers)), by_worker, np.zeros(0, np.int64)
    )
    graph = StageGraph(problem.worker, problem.duration_ns, problem.successor_start, problem.successor, problem.lag_ns)
    return lower_bound_ns(graph, orders)


def groups_of(num_stages: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """A number for each stage, equal for stages that are joined by pairs, directly or not."""
    parent = list(range(num_stages))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in pairs:
        parent[root(a)] = root(b)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) for i in range(num_stages)]


@numba.njit(cache=True)
def _reference(successor_start, successor, waiting, rank):  # type: ignore[no-untyped-def]
    """All stages after what they wait for, of those that could be next always the one of lowest rank."""
    n = len(rank)
    stage_of = np.empty(n, np.int64)
    for s in range(n):
        stage_of[rank[s]] = s
    heap, size, order, known = np.empty(n, np.int64), 0, np.empty(n, np.int64), 0
    for s in range(n):
        if waiting[s] == 0:
            size = _push(heap, size, rank[s])
    while size > 0:
        s = stage_of[heap[0]]
        size = _pop(heap, size)
        order[known] = s
        known += 1
        for i in range(successor_start[s], successor_start[s + 1]):
            t = successor[i]
            waiting[t] -= 1
            if waiting[t] == 0:
                size = _push(heap, size, rank[t])
    return order[:known]


@numba.njit(cache=True)
def _push(heap, size, key):  # type: ignore[no-untyped-def]
    child = size
    while child > 0 and heap[(child - 1) // 2] > key:
        heap[child] = heap[(child - 1) // 2]
        child = (child - 1) // 2
    heap[child] = key
    return size + 1


@numba.njit(cache=True)
def _pop(heap, size):  # type: ignore[no-untyped-def]
    size -= 1
    key, parent = heap[size], 0
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if key <= heap[child]:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = key
    return size
