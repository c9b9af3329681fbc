"""Rule "progress": all lists, run against queues of transfers, come to their end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pipeweaver.schedule.ir import (
    Norm,
    Plan,
    Post,
    Reduce,
    Wait,
)
from pipeweaver.schedule.verify.words import PlanError, describe


def check_progress(plans: Sequence[Plan], per_worker: bool) -> None:
    """Run all lists against queues of transfers, whose head completes when it is the head at both ends."""
    lists = [(plan.replica, worker, actions) for plan in plans for worker, actions in enumerate(plan.actions)]
    queues: dict[tuple[int, ...], deque[int]] = {}
    completed: set[tuple[int, int]] = set()
    arrived: Counter[tuple[str, int]] = Counter()
    joined: set[tuple[int, int]] = set()
    place = [0] * len(lists)

    def queue(replica: int, worker: int, transfer: int) -> deque[int]:
        """The queue of a worker's end: towards one peer, or towards all."""
        ends = plans[replica].transfers[transfer]
        peer = ends.receiver if ends.sender == worker else ends.sender
        return queues.setdefault((replica, worker) if per_worker else (replica, worker, peer), deque())

    def settle(replica: int, transfer: int) -> None:
        """Complete a transfer that heads both queues, and what that brings to the front."""
        pending = [transfer]
        while pending:
            number = pending.pop()
            ends = plans[replica].transfers[number]
            both = [queue(replica, worker, number) for worker in (ends.sender, ends.receiver)]
            if all(q and q[0] == number for q in both):
                completed.add((replica, number))
                for q in both:
                    q.popleft()
                    if q:
                        pending.append(q[0])

    def members(action: Reduce | Norm) -> int:
        workers = (
            len(plans[0].groups[action.group].holders) if isinstance(action, Reduce) else plans[0].placement.workers
        )
        return workers * len(plans)

    advanced = True
    while advanced:
        advanced = False
        for i, (replica, worker, actions) in enumerate(lists):
            while place[i] < len(actions):
                action = actions[place[i]]
                if isinstance(action, Post):
                    queue(replica, worker, action.transfer).append(action.transfer)
                    settle(replica, action.transfer)
                elif isinstance(action, Wait):
                    if (replica, action.transfer) not in completed:
                        break
                elif isinstance(action, Reduce | Norm):
                    key = ("reduce", action.group) if isinstance(action, Reduce) else ("norm", 0)
                    if (i, place[i]) not in joined:
                        joined.add((i, place[i]))
                        arrived[key] += 1
                        advanced = True
                    if arrived[key] < members(action):
                        break
                place[i] += 1
                advanced = True
    stuck = [
        f"replica {replica} worker {worker} at {describe(actions[place[i]], plans[replica])}"
        for i, (replica, worker, actions) in enumerate(lists)
        if place[i] < len(actions)
    ]
    if stuck:
        reading = "one queue per worker" if per_worker else "one queue per pair of workers"
        raise PlanError("progress", f"deadlock with {reading}: {'; '.join(stuck[:8])}")
