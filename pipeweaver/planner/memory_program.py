"""Which candidate of each unit, given the orders: one integer program per worker (pipeweaver.md, section 3.3).

The orders were made for the leanest candidates, so on most workers there is room at most times. A worker's *slots* are
its stages in order; a unit holds what its candidate saves from the slot of its forward to that of its backward. With
x[u, c] = 1 where unit u follows candidate c:

    minimise   sum of latency[u, c] x[u, c]
    such that  sum over c of x[u, c] = 1                                    for every unit
               base[i] + sum of more[u, c] x[u, c] over units that are held in slot i <= limit     for every slot

`base` is what the slot holds with the leanest candidates, `more` what a candidate holds beyond the leanest. HiGHS, one
thread, stops at a gap of 5 % or after a number of nodes, never by the clock, and begins with a greedy choice: units by
time gained per byte and slot, each the fastest candidate that there is room for. Example, limit 10, slots F0 B0 with
base 0, candidates of 12 bytes and 5 ns, 8 and 7, 0 and 9: the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import highspy
import numba
import numpy as np

from pipeweaver.highs import Silent
from pipeweaver.planner.candidates import Candidate
from pipeweaver.planner.problem import Ints, Problem

GAP = 0.05
"""Share of the summed latency by which the choice may miss the optimum."""
MOST_NODES = 200
"""Nodes of the search tree of one program."""
MOST_PIVOTS = 5_000
"""Iterations of the simplex method in one linear program."""
UNIT_BYTES = 1 << 20
"""Bytes that a row of the program counts in."""


class CandidateTable(NamedTuple):
    """Candidates of all units, fastest first: [U] `kind`, and by kind [K, S], short rows filled up with the leanest.

    `latency_ns` to choose by; `backward_ns` with what it waits for copies; `travel_ns`, a copy to the host or back;
    `more_bytes`, held beyond the leanest; `forward_more`, `backward_more`: needed beyond the leanest while
    the forward and the backward run, negative if less. `leanest` [K]: position of the leanest.
    """

    kind: Ints
    leanest: Ints
    latency_ns: Ints
    backward_ns: Ints
    travel_ns: Ints
    more_bytes: Ints
    forward_more: Ints
    backward_more: Ints
    by_kind: Sequence[Sequence[Candidate]]

    def chosen(self, choice: Ints) -> list[Candidate]:
        """The candidate of every unit."""
        return [self.by_kind[kind][c] for kind, c in zip(self.kind.tolist(), choice.tolist(), strict=True)]


def candidate_table(kind: Sequence[int], by_kind: Sequence[Sequence[Candidate]]) -> CandidateTable:
    """A table of the candidates of each kind, for units of these kinds."""
    width = max((len(found) for found in by_kind), default=1)
    filled = [[*found, *[found[-1]] * (width - len(found))] for found in by_kind]

    def column(value: object) -> Ints:
        assert callable(value)
        return np.array([[value(c, found[-1]) for c in found] for found in filled], np.int64).reshape(-1, width)

    return CandidateTable(
        kind=np.array(kind, np.int64),
        leanest=np.array([len(found) - 1 for found in by_kind], np.int64),
        latency_ns=column(lambda c, _: c.latency_ns),
        backward_ns=column(lambda c, _: c.cost.backward_ns + c.stall_ns),
        travel_ns=column(lambda c, _: c.cost.offload_ns),
        more_bytes=column(lambda c, lean: c.held_bytes - lean.held_bytes),
        forward_more=column(lambda c, lean: c.cost.offloaded_bytes - lean.cost.offloaded_bytes),
        backward_more=column(
            lambda c, lean: (
                c.cost.offloaded_bytes
                - lean.cost.offloaded_bytes
                + c.cost.backward_workspace_bytes
                - lean.cost.backward_workspace_bytes
            )
        ),
        by_kind=by_kind,
    )


class Slots(NamedTuple):
    """The slots of all workers: worker w's begin at `start[w]`. `base` [slots]: bytes held there with the leanest
    candidates. `first`, `last` [U]: slots of a unit's forward and backward, -1 where it has no backward."""

    start: Ints
    base: Ints
    first: Ints
    last: Ints


def slots_of(problem: Problem, sequence: Ints, forward: Ints, backward: Ints) -> Slots:
    """Slots of a schedule's stages `sequence` [n]; `forward`, `backward` [U] are stages of the units, -1 for none."""
    start, base, slot = _slots(problem, sequence)
    return Slots(start, base, np.where(backward >= 0, slot[forward], -1), np.where(backward >= 0, slot[backward], -1))


def latencies(table: CandidateTable, slack_ns: Ints) -> Ints:
    """[U, S]: latency of every unit's candidates where a backward could start `slack_ns` [U] after the end of its
    forward, had it not to wait for copies to the host and back."""
    waits: Ints = np.maximum(0, 2 * table.travel_ns[table.kind] - slack_ns[:, None])
    found: Ints = table.latency_ns[table.kind] + waits
    return found


def greedy(slots: Slots, table: CandidateTable, latency_ns: Ints, limits: Ints) -> Ints:
    """[U] candidates: by gain per byte and slot, each unit the fastest that there is room for.

    `latency_ns` [U, S] as `latencies` has them, `limits` [P] bytes.
    """
    choice: Ints = _greedy(
        slots.start,
        slots.base,
        slots.first,
        slots.last,
        limits,
        table.kind,
        table.leanest,
        latency_ns,
        table.more_bytes,
        table.forward_more,
        table.backward_more,
    )
    return choice


def solve(slots: Slots, table: CandidateTable, latency_ns: Ints, limits: Ints, *, gap: float = GAP) -> Ints:
    """[U] candidates: the best that the integer programs find, no worse than the greedy choice on any worker."""
    choice = greedy(slots, table, latency_ns, limits)
    for worker in range(len(limits)):
        first, stop = int(slots.start[worker]), int(slots.start[worker + 1])
        units = np.nonzero((slots.first >= first) & (slots.first < stop))[0]
        latency = int(latency_ns[units, choice[units]].sum())
        least = least_ns(slots, table, latency_ns, int(limits[worker]), worker)
        if latency - least > gap * latency:
            program = _program(slots, table, latency_ns, int(limits[worker]), first, stop, units, choice[units], gap)
            choice[units] = program
    return choice


def least_ns(slots: Slots, table: CandidateTable, latency_ns: Ints, limit: int, worker: int) -> float:
    """A lower bound on the summed latency of a worker's units, often proof enough that the greedy choice will do.

    Of the program, only the row of one slot is kept, with fractions of units: then bytes are given up where they cost
    least latency each (a fractional multiple-choice knapsack). The largest over all slots is the bound.
    """
    first, stop = int(slots.start[worker]), int(slots.start[worker + 1])
    units = np.nonzero((slots.first >= first) & (slots.first < stop))[0]
    return float(
        _least(
            slots.base[first:stop],
            slots.first[units] - first,
            slots.last[units] - first,
            limit,
            table.kind[units],
            table.leanest,
            latency_ns[units],
            table.more_bytes,
            table.forward_more,
            table.backward_more,
        )
    )


def fits(slots: Slots, table: CandidateTable, limits: Ints, choice: Ints) -> bool:
    """Whether every slot is within its worker's limit."""
    held = slots.base.copy()
    for unit in np.nonzero(slots.first >= 0)[0].tolist():
        at = table.kind[unit], choice[unit]
        held[slots.first[unit] : slots.last[unit] + 1] += table.more_bytes[at]
        held[slots.first[unit]] += table.forward_more[at]
        held[slots.last[unit]] += table.backward_more[at]
    return bool((held <= np.repeat(limits, np.diff(slots.start))).all())


def _program(
    slots: Slots,
    table: CandidateTable,
    latency_ns: Ints,
    limit: int,
    first: int,
    stop: int,
    units: Ints,
    warm: Ints,
    gap: float,
) -> Ints:
    """The choice for the units of one worker, whose slots are first..stop-1."""
    kind = table.kind[units]
    counts = table.leanest[kind] + 1
    column = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    owner = np.repeat(np.arange(len(units)), counts)
    number = np.arange(len(owner)) - column[owner]
    cell = kind[owner], number
    latency, more = latency_ns[units[owner], number], table.more_bytes[cell]
    starts, ends = slots.first[units][owner], slots.last[units][owner]
    rows = [np.arange(a, b) for a, b in pairwise(column.tolist())]
    values = [np.ones(len(row)) for row in rows]
    lower, upper = [1.0] * len(units), [1.0] * len(units)
    needed = np.zeros((stop - first, len(owner)), np.int64)
    for c in range(len(owner)):
        needed[starts[c] - first : ends[c] + 1 - first, c] = more[c]
        needed[starts[c] - first, c] += table.forward_more[cell][c]
        needed[ends[c] - first, c] += table.backward_more[cell][c]
    room = limit - slots.base[first:stop]
    for slot in range(stop - first):
        beside = [k for k in (slot - 1, slot + 1) if 0 <= k < stop - first]
        implied = any(
            room[k] <= room[slot]
            and (needed[k] >= needed[slot]).all()
            and (k > slot or (needed[k] > needed[slot]).any())
            for k in beside
        )
        if not implied and np.maximum.reduceat(needed[slot], column[:-1]).sum() > room[slot]:
            held = np.nonzero(needed[slot])[0]
            rows.append(held)
            values.append(needed[slot][held] / UNIT_BYTES)
            lower.append(-highspy.kHighsInf)
            upper.append(int(room[slot]) / UNIT_BYTES)
    solver = Silent()
    for name, setting in (("mip_rel_gap", gap), ("mip_max_nodes", MOST_NODES), ("presolve", "off")):
        solver.setOptionValue(name, setting)
    solver.setOptionValue("simplex_iteration_limit", MOST_PIVOTS)
    none, size = np.zeros(0, np.int32), len(owner)
    solver.addCols(size, latency / 1e3, np.zeros(size), np.ones(size), 0, none, none, np.zeros(0))
    solver.changeColsIntegrality(size, np.arange(size, dtype=np.int32), np.ones(size, np.uint8))
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows])])[:-1]
    entries = np.concatenate(rows)
    solver.addRows(
        len(rows),
        np.array(lower),
        np.array(upper),
        len(entries),
        begins.astype(np.int32),
        entries.astype(np.int32),
        np.concatenate(values),
    )
    start = highspy.HighsSolution()
    start.col_value = (number == warm[owner]).astype(np.float64).tolist()
    solver.setSolution(start)
    solver.run()
    value = np.array(solver.getSolution().col_value)
    if len(value) != size:
        return warm
    found = np.array([int(value[a:b].argmax()) for a, b in pairwise(column.tolist())], np.int64)
    # The solver counts in real numbers: its choice is taken if it holds in whole bytes, and is better.
    better = latency_ns[units, found].sum() < latency_ns[units, warm].sum()
    return found if better and (needed[:, column[:-1] + found].sum(axis=1) <= room).all() else warm


@numba.njit(cache=True)
def _slots(problem, sequence):  # type: ignore[no-untyped-def]
    """(first slot of each worker, bytes held in each slot, slot of each stage)."""
    workers, n = problem.num_workers, len(problem.worker)
    start = np.zeros(workers + 1, np.int64)
    for s in range(n):
        start[problem.worker[s] + 1] += 1
    for w in range(workers):
        start[w + 1] += start[w]
    base, slot = np.zeros(n, np.int64), np.zeros(n, np.int64)
    now, at = np.zeros(workers, np.int64), start[:-1].copy()
    for s in sequence:
        for e in range(problem.effect_start[s], problem.effect_start[s + 1]):
            w = problem.effect_worker[e]
            now[w] += problem.effect_takes[e]
            if e == problem.effect_start[s]:
                slot[s] = at[w]
                base[at[w]] = now[w] + problem.effect_passing[e]
                at[w] += 1
            elif at[w] > start[w]:
                # What arrives meanwhile is held beside the stage that runs.
                base[at[w] - 1] = max(base[at[w] - 1], now[w])
            now[w] -= problem.effect_gives[e]
    return start, base, slot


@numba.njit(cache=True)
def _least(base, first, last, limit, kind, leanest, latency, more, forward_more, backward_more):  # type: ignore[no-untyped-def]
    units, width = latency.shape
    # Each unit from its fastest candidate down the lower hull of latency over bytes: `freed` bytes at `slope` each.
    slope, freed = np.zeros((units, width)), np.zeros((units, width), np.int64)
    steps, most, fastest = np.zeros(units, np.int64), np.zeros(units, np.int64), np.int64(0)
    for u in range(units):
        k = kind[u]
        at = 0
        for c in range(1, leanest[k] + 1):
            if latency[u, c] < latency[u, at]:
                at = c
        fastest += latency[u, at]
        most[u] = more[k, at]
        while True:
            following, least = -1, np.inf
            for c in range(leanest[k] + 1):
                if more[k, c] < more[k, at]:
                    here = (latency[u, c] - latency[u, at]) / (more[k, at] - more[k, c])
                    if here < least:
                        following, least = c, here
            if following < 0:
                break
            slope[u, steps[u]], freed[u, steps[u]] = least, more[k, at] - more[k, following]
            steps[u] += 1
            at = following
    worst = 0.0
    slopes, sizes = np.empty(units * width), np.empty(units * width, np.int64)
    for slot in range(len(base)):
        excess, count = base[slot] - limit, 0
        for u in range(units):
            if first[u] <= slot <= last[u]:
                if slot == first[u] or slot == last[u]:
                    # What it needs at its ends is its own matter: here the least of it is enough.
                    k, fewest = kind[u], np.int64(1) << 62
                    for c in range(leanest[k] + 1):
                        beside = forward_more[k, c] if slot == first[u] else backward_more[k, c]
                        fewest = min(fewest, more[k, c] + beside)
                    excess += fewest
                else:
                    excess += most[u]
                    for i in range(steps[u]):
                        slopes[count], sizes[count] = slope[u, i], freed[u, i]
                        count += 1
        if excess <= 0:
            continue
        cost = 0.0
        for i in np.argsort(slopes[:count]):
            taken = min(excess, sizes[i])
            cost += taken * slopes[i]
            excess -= taken
            if excess <= 0:
                break
        worst = max(worst, cost)
    return fastest + worst


@numba.njit(cache=True)
def _greedy(start, base, first, last, limits, kind, leanest, latency, more, forward_more, backward_more):  # type: ignore[no-untyped-def]
    units = len(kind)
    held, limit = base.copy(), np.empty(len(base), np.int64)
    for w in range(len(limits)):
        limit[start[w] : start[w + 1]] = limits[w]
    choice, gain = np.empty(units, np.int64), np.zeros(units, np.float64)
    for u in range(units):
        k = kind[u]
        choice[u] = leanest[k]
        if first[u] >= 0:
            cost = max(1, more[k, 0]) * (last[u] - first[u] + 1)
            gain[u] = (latency[u, leanest[k]] - latency[u, : leanest[k] + 1].min()) / cost
    for u in np.argsort(-gain, kind="mergesort"):
        k = kind[u]
        if first[u] < 0:
            choice[u] = 0
            continue
        room = np.int64(1) << 62
        for i in range(first[u], last[u] + 1):
            room = min(room, limit[i] - held[i])
        for c in range(leanest[k]):
            ends = held[first[u]] + more[k, c] + forward_more[k, c] <= limit[first[u]]
            ends &= held[last[u]] + more[k, c] + backward_more[k, c] <= limit[last[u]]
            if ends and more[k, c] <= room and latency[u, c] < latency[u, choice[u]]:
                choice[u] = c
        c = choice[u]
        for i in range(first[u], last[u] + 1):
            held[i] += more[k, c]
        held[first[u]] += forward_more[k, c]
        held[last[u]] += backward_more[k, c]
    return choice
