"""Links that take their time: a transport around another one whose transfers end no earlier than they would elsewhere.

    transfer 3, worker 0 -> 1, 40 ms, the link free since 110:
    posted at 100 by the sender, at 120 by the receiver     ->     both waits end at 160, or later

The tensors travel, shrunk, over the transport within. Beside that, both ends leave the times of their posts in memory
that all workers share, so that both come to the same end; so do the members of a meeting. One link joins every two workers, first in, first out,
both directions in it: what `schedule/emulate.py` calls the queue "pair".
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeweaver.rehearsal.device import Device
from pipeweaver.runtime.transport import Address, Transport
from pipeweaver.schedule.ir import Plan, Span, Transfer

LEAD_NS = 20_000_000
"""From the moment when all workers are ready to the start of a step: all of them have to hear of it."""
LOOK_S = 0.0002


class Marks(NamedTuple):
    """When things happened, ns; 0 is not yet. Written by one worker each, read by others.

    `starts` [steps]; `posts` [steps, replicas, transfers, 2]: each end (0 sender, 1 receiver) of each transfer;
    `meetings` [steps, groups + 1, replicas, workers]: each worker at each reduction and, last, at the norm.
    """

    starts: NDArray[np.int64]
    posts: NDArray[np.int64]
    meetings: NDArray[np.int64]


def marks_for(steps: Sequence[Sequence[Plan]], path: Path | None = None) -> Marks:
    """Room for the steps of a rehearsal, in a file that processes share or, without one, for threads.

    steps[s][r] is the plan of replica r. An existing file is opened with what is in it.
    """
    plans = [plan for step in steps for plan in step]
    num_replicas, num_workers = max(map(len, steps)), max(plan.placement.workers for plan in plans)
    shapes = (
        (len(steps),),
        (len(steps), num_replicas, max(len(plan.transfers) for plan in plans), 2),
        (len(steps), 1 + max(len(plan.groups) for plan in plans), num_replicas, num_workers),
    )
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    flat: NDArray[np.int64]
    if path is None:
        flat = np.zeros(ends[-1], np.int64)
    else:
        flat = np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(int(ends[-1]),))
    return Marks(*(part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)))


class RehearsedLinks:
    """One worker's end: see `transport.Transport`. The transport within has its own order and its own checks.

    `started_ns` are the starts of the steps so far; `moved[s]` the spans of the transfers that this worker waited
    for in step s, by number, from the moment that both ends had posted and the link was free.
    """

    def __init__(self, within: Transport, device: Device, marks: Marks) -> None:
        self.within = within
        self.device = device
        self.address = within.address
        self.started_ns: list[int] = []
        self.moved: list[dict[int, Span]] = []
        self._marks = marks
        self._transfers: Sequence[Transfer] = ()
        self._meetings: dict[tuple[Address, ...], deque[int]] = {}
        self._queues: dict[int, deque[int]] = {}
        self._free_ns: dict[int, int] = {}

    def prepare(self, plan: Plan) -> None:
        """Also the start of a step: returns at the same moment on all workers."""
        self.within.prepare(plan)
        step = len(self.started_ns)
        self._transfers = plan.transfers
        self._queues = defaultdict(deque)
        self._free_ns = defaultdict(int)
        self.moved.append({})
        self._meetings = defaultdict(deque)
        for number, group in enumerate(plan.groups):
            members = tuple(Address(r, holder) for r in range(plan.num_replicas) for holder in group.holders)
            self._meetings[members].append(number)
        self.within.barrier()
        if self.address == Address(0, 0):
            self._marks.starts[step] = time.perf_counter_ns() + LEAD_NS
        self.started_ns.append(_seen(self._marks.starts, step))
        self.device.begin(self.started_ns[-1])

    def post(self, number: int, transfer: Transfer, tensor: Tensor) -> None:
        # Before the post itself: whoever sees the tensor sees the time.
        side = 0 if self.address.worker == transfer.sender else 1
        self._posts()[number, side] = self.device.now_ns()
        self._queues[self._peer(transfer)].append(number)
        self.within.post(number, transfer, tensor)

    def wait(self, number: int) -> None:
        self.within.wait(number)
        self.device.until(self._end_ns(number))

    def reduce(self, members: Sequence[Address], tensor: Tensor) -> None:
        meeting = self._arrive(self._meetings[tuple(members)].popleft())
        self.within.reduce(members, tensor)
        self.device.met(max(_seen(meeting, *member) for member in members))

    def all_sum(self, values: Sequence[float]) -> list[float]:
        meeting = self._arrive(-1)
        sums = self.within.all_sum(values)
        # All have left their mark by now.
        self.device.met(int(meeting.max()))
        return sums

    def barrier(self) -> None:
        self.within.barrier()

    def close(self) -> None:
        self.within.close()

    def _end_ns(self, number: int) -> int:
        """When a transfer that both ends have posted is through the link; so are those before it in the queue."""
        moved, peer = self.moved[-1], self._peer(self._transfers[number])
        while number not in moved:
            head = self._queues[peer].popleft()
            posted = [_seen(self._posts(), head, side) for side in (0, 1)]
            start_ns = max(*posted, self._free_ns[peer])
            moved[head] = Span(start_ns, start_ns + self._transfers[head].duration_ns)
            self._free_ns[peer] = moved[head].end_ns
        return moved[number].end_ns

    def _peer(self, transfer: Transfer) -> int:
        return transfer.receiver if self.address.worker == transfer.sender else transfer.sender

    def _posts(self) -> NDArray[np.int64]:
        return self._marks.posts[len(self.started_ns) - 1, self.address.replica]

    def _arrive(self, number: int) -> NDArray[np.int64]:
        """This worker is there; the marks of all members of the meeting."""
        meeting = self._marks.meetings[len(self.started_ns) - 1, number]
        meeting[self.address] = self.device.now_ns()
        return meeting


def _seen(marks: NDArray[np.int64], *place: int) -> int:
    """A time that another worker is about to leave, or has left."""
    while not (mark := int(marks[place])):
        time.sleep(LOOK_S)
    return mark
