"""The timeline of a plan: every worker runs its actions in order, transfers and meetings join them.

A transfer starts when both ends have posted it and the transfers queued before it at either end are done;
a wait ends no earlier than the transfer. A meeting (reduction, norm) starts when all members are there.
All replicas of a step are emulated together. Integer nanoseconds throughout.

`queue` says how transfers line up: "pair", one queue per unordered pair of workers; "worker", one per
worker over all its peers, as batched NCCL transfers on a group's communicator; "none", none at all, as
Gloo with tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.schedule.ir import Compute, Free, Load, Norm, Plan, Post, Prediction, Reduce, Span, Stage, Step, Wait
from pipeweaver.schedule.memory import peak_bytes

Queue = Literal["pair", "worker", "none"]

_LOCAL, _POST, _WAIT, _MEET = 0, 1, 2, 3
Ints = NDArray[np.int64]


class Timeline:
    """Start and end of every action and transfer of one replica, ns from the start of the step."""

    def __init__(self, spans: tuple[tuple[Span, ...], ...], transfers: tuple[Span, ...]) -> None:
        self.spans = spans
        self.transfers = transfers


def emulate(plans: Sequence[Plan], queue: Queue = "pair") -> tuple[Timeline, ...]:
    """Timelines of the plans of one step, one per replica (or of any subset of them, which then meet alone).

    Raises ValueError if the actions get stuck, saying where each worker stands.
    """
    kinds, arguments, durations, starts = [], [], [], [0]
    senders, receivers, transfer_ns = [], [], []
    meetings: dict[tuple[str, int], int] = {}
    members: list[int] = []
    lengths: list[int] = []
    worker_base, transfer_base = 0, 0
    for plan in plans:
        for actions in plan.actions:
            for action in actions:
                kind, argument, duration = _LOCAL, 0, 0
                match action:
                    case Post():
                        kind, argument = _POST, transfer_base + action.transfer
                    case Wait():
                        kind, argument = _WAIT, transfer_base + action.transfer
                    case Reduce() | Norm():
                        key = ("reduce", action.group) if isinstance(action, Reduce) else ("norm", 0)
                        kind, argument = _MEET, meetings.setdefault(key, len(meetings))
                        duration = action.duration_ns
                        if argument == len(members):
                            members.append(0)
                            lengths.append(0)
                        members[argument] += 1
                        lengths[argument] = max(lengths[argument], duration)
                    case Load() | Compute() | Step():
                        duration = action.duration_ns
                    case Free():
                        pass
                kinds.append(kind)
                arguments.append(argument)
                durations.append(duration)
            starts.append(len(kinds))
        for transfer in plan.transfers:
            senders.append(worker_base + transfer.sender)
            receivers.append(worker_base + transfer.receiver)
            transfer_ns.append(transfer.duration_ns)
        worker_base += len(plan.actions)
        transfer_base += len(plan.transfers)
    kind_of, argument_of = np.array(kinds, np.int64), np.array(arguments, np.int64)
    worker_start = np.array(starts, np.int64)
    sender, receiver = np.array(senders, np.int64), np.array(receivers, np.int64)
    before, after = _queue_order(kind_of, argument_of, worker_start, sender, receiver, queue)
    begin, end, moved, arrived, stuck = _run(
        kind_of,
        argument_of,
        np.array(durations, np.int64),
        worker_start,
        sender,
        np.array(transfer_ns, np.int64),
        before,
        after,
        np.array(members, np.int64),
        np.array(lengths, np.int64),
    )
    if stuck.max(initial=-1) >= 0:
        raise ValueError("the plan gets stuck: " + _where_stuck(plans, worker_start, stuck))
    timelines, base, transfer_base = [], 0, 0
    for plan in plans:
        spans = []
        for actions in plan.actions:
            stop = base + len(actions)
            spans.append(
                tuple(Span(b, e) for b, e in zip(begin[base:stop].tolist(), end[base:stop].tolist(), strict=True))
            )
            base = stop
        stop = transfer_base + len(plan.transfers)
        pairs = zip(moved[transfer_base:stop].tolist(), arrived[transfer_base:stop].tolist(), strict=True)
        timelines.append(Timeline(tuple(spans), tuple(Span(b, e) for b, e in pairs)))
        transfer_base = stop
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


def _queue_order(
    kind: Ints, argument: Ints, worker_start: Ints, sender: Ints, receiver: Ints, queue: Queue
) -> tuple[Ints, Ints]:
    """Neighbours in the queues, [transfers, 2] each: the transfer queued just before and just after at the
    sender's end (column 0) and at the receiver's (1); -1 for none."""
    before, after = np.full((len(sender), 2), -1, np.int64), np.full((len(sender), 2), -1, np.int64)
    if queue == "none":
        return before, after
    for worker in range(len(worker_start) - 1):
        last: dict[int, tuple[int, int]] = {}
        mine = slice(worker_start[worker], worker_start[worker + 1])
        for transfer in argument[mine][kind[mine] == _POST].tolist():
            side = 0 if sender[transfer] == worker else 1
            peer = int(receiver[transfer] if side == 0 else sender[transfer]) if queue == "pair" else 0
            if peer in last:
                previous, previous_side = last[peer]
                before[transfer, side] = previous
                after[previous, previous_side] = transfer
            last[peer] = (transfer, side)
    return before, after


def _where_stuck(plans: Sequence[Plan], worker_start: Ints, stuck: Ints) -> str:
    lines, worker = [], 0
    for plan in plans:
        for number, actions in enumerate(plan.actions):
            if stuck[worker] >= 0:
                lines.append(
                    f"replica {plan.replica} worker {number} at {actions[int(stuck[worker] - worker_start[worker])]}"
                )
            worker += 1
    return "; ".join(lines)


@numba.njit(cache=True)
def _run(kind, argument, duration, worker_start, sender, transfer_ns, before, after, members, meeting_ns):  # type: ignore[no-untyped-def]
    """Advance every worker until it blocks, over and over, until all are done or none advances."""
    num_workers, num_transfers = len(worker_start) - 1, len(sender)
    begin, end = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.int64)
    posted = np.full((num_transfers, 2), -1, np.int64)
    moved, arrived = np.full(num_transfers, -1, np.int64), np.full(num_transfers, -1, np.int64)
    met = np.zeros(len(members), np.int64)
    meeting = np.zeros(len(members), np.int64)
    joined = np.zeros(num_workers, np.int64)
    place = worker_start[:-1].copy()
    clock = np.zeros(num_workers, np.int64)
    work = np.empty(2 * num_transfers + 2, np.int64)
    advanced = True
    while advanced:
        advanced = False
        for w in range(num_workers):
            while place[w] < worker_start[w + 1]:
                a = place[w]
                x = argument[a]
                if kind[a] == _LOCAL:
                    begin[a] = clock[w]
                    clock[w] += duration[a]
                elif kind[a] == _POST:
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
                elif kind[a] == _WAIT:
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
