"""The timeline of a plan: every worker runs its actions in order, transfers and meetings join them.

A transfer starts when both ends have begun to post it and the transfers queued before it at either end are done;
a wait ends no earlier than the transfer. A meeting (reduction, norm) starts when all members are there.
A copy to the host starts when the one before it is done, beside compute; copies back likewise, beside those.
All replicas of a step are emulated together. Integer nanoseconds throughout.

`queue` says how transfers line up: "pair", one queue per unordered pair of workers; "worker", one per
worker over all its peers, as batched NCCL transfers on a group's communicator; "none", none at all, as
Gloo with tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numba
import numpy as np

from pipeweaver.schedule.convert import action_of, flatten
from pipeweaver.schedule.flat import NORM, OFFLOAD, POST, REDUCE, RELOAD, SETTLE, WAIT, FlatPlan, Ints, starts
from pipeweaver.schedule.ir import Compute, Plan, Prediction, Span, Stage
from pipeweaver.schedule.memory import peak_bytes

Queue = Literal["pair", "worker", "none"]


class Timeline:
    """Start and end of every action and transfer of one replica, ns from the start of the step."""

    def __init__(self, spans: tuple[tuple[Span, ...], ...], transfers: tuple[Span, ...]) -> None:
        self.spans = spans
        self.transfers = transfers


class FlatTimeline(NamedTuple):
    """The same as arrays: of all actions [A] and transfers [T] of a replica."""

    start_ns: Ints
    end_ns: Ints
    moved_ns: Ints
    arrived_ns: Ints


def emulate(plans: Sequence[Plan], queue: Queue = "pair") -> tuple[Timeline, ...]:
    """Timelines of the plans of one step, one per replica (or of any subset of them, which then meet alone).

    Raises ValueError if the actions get stuck, saying where each worker stands.
    """
    flats = [flatten(plan) for plan in plans]
    timelines = []
    for flat, found in zip(flats, emulate_flat(flats, queue), strict=True):
        spans = list(map(Span, found.start_ns.tolist(), found.end_ns.tolist()))
        transfers = map(Span, found.moved_ns.tolist(), found.arrived_ns.tolist())
        bounds = flat.actions.start.tolist()
        timelines.append(Timeline(tuple(tuple(spans[a:b]) for a, b in pairwise(bounds)), tuple(transfers)))
    return tuple(timelines)


def emulate_flat(plans: Sequence[FlatPlan], queue: Queue = "pair") -> tuple[FlatTimeline, ...]:
    """The same from flat plans, as arrays."""
    num_groups = max((len(plan.head.groups) for plan in plans), default=0)
    columns: list[tuple[Ints, ...]] = []
    worker_base, transfer_base, action_base, unit_base = 0, 0, 0, 0
    for plan in plans:
        actions, transfers = plan.actions, plan.transfers
        unit_start = starts([len(of) for of in plan.head.parts])
        columns.append(
            (
                actions.kind,
                _arguments(
                    actions.kind, actions.first, actions.second, unit_start, transfer_base, unit_base, num_groups
                ),
                actions.duration_ns,
                actions.start[1:] + action_base,
                transfers.sender + worker_base,
                transfers.receiver + worker_base,
                transfers.duration_ns,
            )
        )
        worker_base += plan.num_workers
        transfer_base += len(transfers.edge)
        action_base += len(actions.kind)
        unit_base += int(unit_start[-1])
    none = np.zeros(0, np.int64)
    kind, argument, duration, ends, sender, receiver, transfer_ns = (
        (np.concatenate(column) for column in zip(*columns, strict=True)) if columns else (none,) * 7
    )
    worker_start = np.concatenate([np.zeros(1, np.int64), ends])
    before, after = _queue_order(kind, argument, worker_start, sender, receiver, _QUEUES.index(queue))
    begin, end, moved, arrived, stuck = _run(
        kind,
        argument,
        duration,
        worker_start,
        sender,
        transfer_ns,
        before,
        after,
        num_groups + 1,
        unit_base,
    )
    if stuck.max(initial=-1) >= 0:
        raise ValueError("the plan gets stuck: " + _where_stuck(plans, worker_start, stuck))
    timelines, base, transfer_base = [], 0, 0
    for plan in plans:
        here = slice(base, base + len(plan.actions.kind))
        there = slice(transfer_base, transfer_base + len(plan.transfers.edge))
        timelines.append(FlatTimeline(begin[here], end[here], moved[there], arrived[there]))
        base, transfer_base = here.stop, there.stop
    return tuple(timelines)


def makespan_ns(plan: Plan, timeline: Timeline) -> int:
    """End of the last stage (the last backward), ns from the first action."""
    return max(
        (
            span.end_ns
            for actions, spans in zip(plan.actions, timeline.spans, strict=True)
            for action, span in zip(actions, spans, strict=True)
            if isinstance(action, Compute)
        ),
        default=0,
    )


def prediction(plan: Plan, timeline: Timeline, *, useful_ns: int, lower_bound_ns: int) -> Prediction:
    """What is predicted of a plan, from its timeline and the order of its actions."""
    return Prediction(
        spans=timeline.spans,
        transfers=timeline.transfers,
        makespan_ns=makespan_ns(plan, timeline),
        step_ns=max((spans[-1].end_ns for spans in timeline.spans if spans), default=0),
        peak_bytes=peak_bytes(plan),
        useful_ns=useful_ns,
        lower_bound_ns=lower_bound_ns,
    )


def stage_spans(plan: Plan, spans: Sequence[Sequence[Span]]) -> dict[Stage, Span]:
    """Start and end of every stage."""
    return {
        action.stage: span
        for actions, worker_spans in zip(plan.actions, spans, strict=True)
        for action, span in zip(actions, worker_spans, strict=True)
        if isinstance(action, Compute)
    }


_QUEUES: tuple[Queue, ...] = ("pair", "worker", "none")


def _where_stuck(plans: Sequence[FlatPlan], worker_start: Ints, stuck: Ints) -> str:
    lines, worker, base = [], 0, 0
    for plan in plans:
        for number in range(plan.num_workers):
            if stuck[worker] >= 0:
                action = action_of(plan, int(stuck[worker]) - base)
                lines.append(f"replica {plan.head.replica} worker {number} at {action}")
            worker += 1
        base += len(plan.actions.kind)
    return "; ".join(lines)


@numba.njit(cache=True)
def _arguments(kind, first, second, unit_start, transfer_base, unit_base, num_groups):  # type: ignore[no-untyped-def]
    """What each action is about, numbered through all plans: a transfer, a unit (of copies), a meeting; `num_groups` is
    the norm."""
    found = first.copy()
    for a in range(len(kind)):
        if kind[a] == POST or kind[a] == WAIT:
            found[a] += transfer_base
        elif kind[a] == OFFLOAD or kind[a] == RELOAD or kind[a] == SETTLE:
            found[a] = unit_start[first[a]] + second[a] + unit_base
        elif kind[a] == NORM:
            found[a] = num_groups
    return found


@numba.njit(cache=True)
def _queue_order(kind, argument, worker_start, sender, receiver, queue):  # type: ignore[no-untyped-def]
    """Neighbours in the queues, [transfers, 2] each: the transfer queued just before and just after at the
    sender's end (column 0) and at the receiver's (1); -1 for none. `queue` indexes `_QUEUES`."""
    num_workers = len(worker_start) - 1
    before, after = np.full((len(sender), 2), -1, np.int64), np.full((len(sender), 2), -1, np.int64)
    if queue == 2:
        return before, after
    for worker in range(num_workers):
        last = np.full((num_workers, 2), -1, np.int64)  # per peer: its latest transfer, and at which end of it
        for a in range(worker_start[worker], worker_start[worker + 1]):
            if kind[a] == POST:
                t = argument[a]
                side = 0 if sender[t] == worker else 1
                peer = (receiver[t] if side == 0 else sender[t]) if queue == 0 else 0
                if last[peer, 0] >= 0:
                    before[t, side] = last[peer, 0]
                    after[last[peer, 0], last[peer, 1]] = t
                last[peer] = (t, side)
    return before, after


@numba.njit(cache=True)
def _run(kind, argument, duration, worker_start, sender, transfer_ns, before, after, num_meetings, num_units):  # type: ignore[no-untyped-def]
    """Advance every worker until it blocks, over and over, until all are done or none advances."""
    num_workers, num_transfers = len(worker_start) - 1, len(sender)
    begin, end = np.empty(len(kind), np.int64), np.empty(len(kind), np.int64)
    posted = np.full((num_transfers, 2), -1, np.int64)
    moved, arrived = np.full(num_transfers, -1, np.int64), np.full(num_transfers, -1, np.int64)
    members, meeting_ns = np.zeros(num_meetings, np.int64), np.zeros(num_meetings, np.int64)
    for a in range(len(kind)):
        if kind[a] == REDUCE or kind[a] == NORM:
            members[argument[a]] += 1
            meeting_ns[argument[a]] = max(meeting_ns[argument[a]], duration[a])
    met, meeting = np.zeros(num_meetings, np.int64), np.zeros(num_meetings, np.int64)
    joined = np.zeros(num_workers, np.int64)
    place = worker_start[:-1].copy()
    clock = np.zeros(num_workers, np.int64)
    copied = np.zeros(num_units, np.int64)  # end of the latest copy of a unit
    copying = np.zeros((num_workers, 2), np.int64)  # until when copies are under way to the host, and back
    work = np.empty(2 * num_transfers + 2, np.int64)
    advanced = True
    while advanced:
        advanced = False
        for w in range(num_workers):
            while place[w] < worker_start[w + 1]:
                a = place[w]
                x = argument[a]
                if kind[a] == OFFLOAD or kind[a] == RELOAD:
                    begin[a] = clock[w]
                    way = 0 if kind[a] == OFFLOAD else 1
                    copying[w, way] = copied[x] = max(copying[w, way], clock[w]) + duration[a]
                elif kind[a] == SETTLE:
                    begin[a] = clock[w]
                    clock[w] = max(clock[w], copied[x])
                elif kind[a] != POST and kind[a] != WAIT and kind[a] != REDUCE and kind[a] != NORM:
                    begin[a] = clock[w]
                    clock[w] += duration[a]
                elif kind[a] == POST:
                    begin[a] = clock[w]
                    posted[x, 0 if sender[x] == w else 1] = clock[w]
                    work[0] = x
                    size = 1
                    while size > 0:
                        size -= 1
                        t = work[size]
                        if arrived[t] >= 0 or posted[t, 0] < 0 or posted[t, 1] < 0:
                            continue
                        first = max(posted[t, 0], posted[t, 1])
                        ready = True
                        for side in range(2):
                            previous = before[t, side]
                            if previous >= 0:
                                if arrived[previous] < 0:
                                    ready = False
                                    break
                                first = max(first, arrived[previous])
                        if ready:
                            moved[t] = first
                            arrived[t] = first + transfer_ns[t]
                            for side in range(2):
                                if after[t, side] >= 0:
                                    work[size] = after[t, side]
                                    size += 1
                    clock[w] += duration[a]
                elif kind[a] == WAIT:
                    if arrived[x] < 0:
                        break
                    begin[a] = clock[w]
                    clock[w] = max(clock[w], arrived[x])
                else:
                    if joined[w] == 0:
                        joined[w] = 1
                        begin[a] = clock[w]
                        met[x] += 1
                        meeting[x] = max(meeting[x], clock[w])
                        advanced = True
                    if met[x] < members[x]:
                        break
                    joined[w] = 0
                    clock[w] = meeting[x] + meeting_ns[x]
                end[a] = clock[w]
                place[w] += 1
                advanced = True
    stuck = np.full(num_workers, -1, np.int64)
    for w in range(num_workers):
        if place[w] < worker_start[w + 1]:
            stuck[w] = place[w]
    return begin, end, moved, arrived, stuck
