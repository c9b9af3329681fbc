"""Links that take their time: a transport around another one whose transfers end no earlier than they would elsewhere.

    transfer 3, worker 0 -> 1, 40 ms, the link free since 110:
    posted at 100 by the sender, at 120 by the receiver     ->     both waits end at 160, or later

The tensors travel, shrunk, over the transport within. Beside that, both ends leave the times of their posts in memory
that all workers share, so that both come to the same end. One link joins every two workers, first in, first out,
both directions in it: what `schedule/emulate.py` calls the queue "pair".
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeweaver.rehearsal.device import Device
from pipeweaver.runtime.transport import Address, Transport
from pipeweaver.schedule.ir import Plan, Span, Transfer

Marks = NDArray[np.int64]
"""[steps, replicas, transfers + 1, 2]: when each end (0 sender, 1 receiver) posted each transfer, ns; 0 is not yet.
The last line of the first replica has the step's start."""

LEAD_NS = 20_000_000
"""From the moment when all workers are ready to the start of a step: all of them have to hear of it."""
LOOK_S = 0.0002


def marks_for(steps: Sequence[Sequence[Plan]], path: Path | None = None) -> Marks:
    """Room for the steps of a rehearsal, in a file that processes share or, without one, for threads.

    steps[s][r] is the plan of replica r. An existing file is opened with what is in it.
    """
    most = max(len(plan.transfers) for plans in steps for plan in plans)
    shape = (len(steps), max(map(len, steps)), most + 1, 2)
    if path is None:
        return np.zeros(shape, np.int64)
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=shape)


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
        self.within.barrier()
        if self.address == Address(0, 0):
            self._marks[step, 0, -1, 0] = time.perf_counter_ns() + LEAD_NS
        self.started_ns.append(self._mark(step, 0, -1, 0))
        self.device.begin(self.started_ns[-1])

    def post(self, number: int, transfer: Transfer, tensor: Tensor) -> None:
        # Before the post itself: whoever sees the tensor sees the time.
        side = 0 if self.address.worker == transfer.sender else 1
        self._marks[len(self.started_ns) - 1, self.address.replica, number, side] = self.device.now_ns()
        self._queues[self._peer(transfer)].append(number)
        self.within.post(number, transfer, tensor)

    def wait(self, number: int) -> None:
        self.within.wait(number)
        self.device.until(self._end_ns(number))

    def reduce(self, members: Sequence[Address], tensor: Tensor) -> None:
        self.within.reduce(members, tensor)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return self.within.all_sum(values)

    def barrier(self) -> None:
        self.within.barrier()

    def close(self) -> None:
        self.within.close()

    def _end_ns(self, number: int) -> int:
        """When a transfer that both ends have posted is through the link; so are those before it in the queue."""
        moved, peer = self.moved[-1], self._peer(self._transfers[number])
        while number not in moved:
            head = self._queues[peer].popleft()
            step, replica = len(self.started_ns) - 1, self.address.replica
            posted = [self._mark(step, replica, head, side) for side in (0, 1)]
            start_ns = max(*posted, self._free_ns[peer])
            moved[head] = Span(start_ns, start_ns + self._transfers[head].duration_ns)
            self._free_ns[peer] = moved[head].end_ns
        return moved[number].end_ns

    def _peer(self, transfer: Transfer) -> int:
        return transfer.receiver if self.address.worker == transfer.sender else transfer.sender

    def _mark(self, *place: int) -> int:
        """A time that another worker is about to leave, or has left."""
        while not (mark := int(self._marks[place])):
            time.sleep(LOOK_S)
        return mark
