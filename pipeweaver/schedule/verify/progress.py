"""Rule "progress": all lists, run against queues of transfers, come to their end."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from pipeweaver.schedule.convert import action_of
from pipeweaver.schedule.flat import NORM, POST, REDUCE, WAIT, FlatPlan
from pipeweaver.schedule.verify.words import PlanError, describe


def check_progress(plans: Sequence[FlatPlan], per_worker: bool) -> None:
    """Run all lists against queues of transfers, whose head completes when it is the head at both ends.

    A worker has one queue towards each peer, or, `per_worker`, one towards all.
    """
    workers, transfers = plans[0].num_workers, [len(plan.transfers.edge) for plan in plans]
    kind = np.concatenate([plan.actions.kind for plan in plans])
    argument = np.concatenate([plan.actions.first for plan in plans])
    lengths = [len(plan.actions.kind) for plan in plans]
    bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    starts = np.concatenate([plan.actions.start[:-1] + base for plan, base in zip(plans, bases[:-1], strict=True)])
    starts = np.append(starts, bases[-1])
    shift = np.repeat(np.cumsum([0, *transfers[:-1]]), lengths)
    moves = (kind == POST) | (kind == WAIT)
    argument = argument + shift * moves
    groups = plans[0].head.groups
    members = np.array([*(len(group.holders) for group in groups), workers], np.int64) * len(plans)
    argument = np.where(kind == NORM, len(groups), argument)
    first_worker = [number * workers for number in range(len(plans))]
    ends = [
        np.concatenate([one + base for one, base in zip(side, first_worker, strict=True)])
        for side in zip(*((plan.transfers.sender, plan.transfers.receiver) for plan in plans), strict=True)
    ]
    place = _run(kind, argument, starts, ends[0], ends[1], members, workers, per_worker)
    stuck = np.nonzero(place < starts[1:])[0].tolist()
    if stuck:
        lines = []
        for number in stuck[:8]:
            replica, worker = divmod(number, workers)
            plan = plans[replica]
            action = action_of(plan, int(place[number] - bases[replica]))
            lines.append(f"replica {plan.head.replica} worker {worker} at {describe(action)}")
        reading = "one queue per worker" if per_worker else "one queue per pair of workers"
        raise PlanError("progress", f"deadlock with {reading}: {'; '.join(lines)}")


@numba.njit(cache=True)
def _run(kind, argument, starts, sender, receiver, members, workers, per_worker):  # type: ignore[no-untyped-def]
    """Place at which each list stands when none goes on. Queues are chains of transfers: `follower[t, end]` is what
    was posted after t at that end, `head[queue]` and `tail[queue]` their ends, -1 for none."""
    num_lists = len(starts) - 1
    num_queues = num_lists if per_worker else num_lists * workers
    head, tail = np.full(num_queues, -1, np.int64), np.full(num_queues, -1, np.int64)
    follower = np.full((len(sender), 2), -1, np.int64)
    completed = np.zeros(len(sender), np.bool_)
    arrived = np.zeros(len(members), np.int64)
    joined = np.zeros(num_lists, np.bool_)  # the meeting that the list stands at
    place = starts[:-1].copy()
    pending = np.empty(2 * len(sender) + 2, np.int64)
    advanced = True
    while advanced:
        advanced = False
        for w in range(num_lists):
            while place[w] < starts[w + 1]:
                what, x = kind[place[w]], argument[place[w]]
                if what == POST:
                    q = w if per_worker else w * workers + (receiver[x] if sender[x] == w else sender[x]) % workers
                    if head[q] < 0:
                        head[q] = x
                    else:
                        follower[tail[q], 0 if sender[tail[q]] == w else 1] = x
                    tail[q] = x
                    # Complete what heads both queues, and what that brings to the front.
                    pending[0], size = x, 1
                    while size > 0:
                        size -= 1
                        t = pending[size]
                        s, r = sender[t], receiver[t]
                        qs = s if per_worker else s * workers + r % workers
                        qr = r if per_worker else r * workers + s % workers
                        if not completed[t] and head[qs] == t and head[qr] == t:
                            completed[t] = True
                            for end in range(2):
                                q2 = qs if end == 0 else qr
                                head[q2] = follower[t, end]
                                if head[q2] >= 0:
                                    pending[size] = head[q2]
                                    size += 1
                elif what == WAIT:
                    if not completed[x]:
                        break
                elif what in (REDUCE, NORM):
                    if not joined[w]:
                        joined[w] = True
                        arrived[x] += 1
                        advanced = True
                    if arrived[x] < members[x]:
                        break
                    joined[w] = False
                place[w] += 1
                advanced = True
    return place
