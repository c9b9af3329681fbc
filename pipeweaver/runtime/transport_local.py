"""A transport between threads of one process, strict where real ones are lax: for tests.

    hub = Hub(num_replicas=1, num_workers=2)
    run in one thread per worker: Worker(..., transport=hub.end(Address(0, worker)))

Transfers match first in, first out: one queue per unordered pair of workers with both directions in it, or,
with `queue="worker"`, one queue per worker over all its peers, as batched NCCL transfers on one communicator
behave. A head completes when both ends have it as their head. Two heads that can never match, a shape or dtype
that differs from the plan's, a meeting that its members see differently, and a state in which every worker is
blocked are errors, raised in all threads. Nothing ever hangs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeweaver.runtime.transport import Address, TransferError, check_tensor
from pipeweaver.schedule.ir import Plan, Transfer


class Hub:
    """Where the ends meet. One lock guards everything: this is for small tests."""

    def __init__(self, num_replicas: int, num_workers: int, queue: Literal["pair", "worker"] = "pair") -> None:
        self.addresses = tuple(Address(r, w) for r in range(num_replicas) for w in range(num_workers))
        self.queue = queue
        self.lock = threading.Condition()
        self.queues: dict[tuple[Address, Address | None], deque[_Post]] = {}
        self.done: dict[Address, set[int]] = {address: set() for address in self.addresses}
        self.meetings: dict[tuple[str, tuple[Address, ...]], _Meeting] = {}
        self.blocked: dict[Address, tuple[str, Callable[[], bool]]] = {}
        self.alive: set[Address] = set(self.addresses)
        self.failure: str | None = None

    def end(self, address: Address) -> LocalTransport:
        return LocalTransport(self, address)

    def fail(self, message: str) -> None:
        """End every wait with an error: a worker died."""
        with self.lock:
            # What went wrong first is the cause of the rest.
            self.failure = self.failure or message
            self.lock.notify_all()

    def block(self, address: Address, what: str, ready: Callable[[], bool]) -> None:
        """Wait, with the lock held, until `ready`; raise if that cannot come."""
        self.blocked[address] = (what, ready)
        self.look_for_deadlock()
        while self.failure is None and not ready():
            self.lock.wait()
        del self.blocked[address]
        if self.failure is not None:
            raise TransferError(self.failure)

    def look_for_deadlock(self) -> None:
        if self.alive and self.alive <= self.blocked.keys() and not any(ready() for _, ready in self.blocked.values()):
            waiting = "; ".join(f"{address} in {what}" for address, (what, _) in sorted(self.blocked.items()))
            gone = [str(address) for address in self.addresses if address not in self.alive]
            self.fail(f"deadlock: {waiting}" + (f"; {', '.join(gone)} left" if gone else ""))

    def key(self, owner: Address, peer: Address) -> tuple[Address, Address | None]:
        return (owner, None) if self.queue == "worker" else (owner, peer)

    def match(self, owner: Address, peer: Address) -> None:
        """Complete heads as long as they match; what completes may uncover others."""
        todo = [(owner, peer)]
        while todo:
            one, other = todo.pop()
            mine, theirs = self.queues.get(self.key(one, other)), self.queues.get(self.key(other, one))
            if not mine or not theirs or mine[0].peer != other or theirs[0].peer != one:
                continue
            first, second = mine[0], theirs[0]
            if first.number != second.number or first.sends == second.sends:
                self.fail(
                    f"{one} and {other} can never meet: the one is at {first}, the other at {second} of the same queue"
                )
                return
            send, receive = (first, second) if first.sends else (second, first)
            if send.tensor.shape != receive.tensor.shape or send.tensor.dtype != receive.tensor.dtype:
                self.fail(
                    f"transfer {first.number}: {list(send.tensor.shape)} {send.tensor.dtype} is sent, "
                    f"{list(receive.tensor.shape)} {receive.tensor.dtype} expected"
                )
                return
            receive.tensor.copy_(send.tensor)
            for queue, end in ((mine, one), (theirs, other)):
                queue.popleft()
                self.done[end].add(first.number)
                if queue:
                    todo.append((end, queue[0].peer))
        self.lock.notify_all()


class LocalTransport:
    """One worker's end of a hub: see `transport.Transport`."""

    def __init__(self, hub: Hub, address: Address) -> None:
        self.hub = hub
        self.address = address

    def prepare(self, plan: Plan) -> None:
        pass

    def post(self, number: int, transfer: Transfer, tensor: Tensor) -> None:
        check_tensor(number, transfer, tensor)
        sends = self.address.worker == transfer.sender
        peer = Address(self.address.replica, transfer.receiver if sends else transfer.sender)
        with self.hub.lock:
            queue = self.hub.queues.setdefault(self.hub.key(self.address, peer), deque())
            queue.append(_Post(number=number, peer=peer, sends=sends, tensor=tensor))
            self.hub.match(self.address, peer)

    def wait(self, number: int) -> None:
        done = self.hub.done[self.address]
        with self.hub.lock:
            self.hub.block(self.address, f"the wait for transfer {number}", lambda: number in done)
            done.remove(number)

    def reduce(self, members: Sequence[Address], tensor: Tensor) -> None:
        if len(members) > 1:
            tensor.copy_(self._meet("a reduction", tuple(members), tensor))

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return self._meet("a sum", self.hub.addresses, torch.tensor(list(values), dtype=torch.float64)).tolist()

    def barrier(self) -> None:
        self.all_sum([0.0])

    def close(self) -> None:
        with self.hub.lock:
            self.hub.alive.discard(self.address)
            self.hub.look_for_deadlock()

    def _meet(self, what: str, members: tuple[Address, ...], tensor: Tensor) -> Tensor:
        """The sum of the members' tensors, in the order of the members."""
        hub = self.hub
        with hub.lock:
            meeting = hub.meetings.setdefault((what, members), _Meeting({}, {}))
            meeting.given[self.address] = tensor
            if len(meeting.given) == len(members):
                shapes = {(tuple(given.shape), given.dtype) for given in meeting.given.values()}
                if len(shapes) > 1:
                    hub.fail(f"{what} over {', '.join(map(str, members))}: tensors differ, {shapes}")
                else:
                    total = torch.stack([meeting.given[member] for member in members]).sum(0)
                    meeting.results.update({member: total for member in members})
                meeting.given.clear()
                hub.lock.notify_all()
            hub.block(
                self.address,
                f"{what} over {', '.join(map(str, members))}",
                lambda: self.address in meeting.results,
            )
            return meeting.results.pop(self.address)


class _Post(NamedTuple):
    number: int
    peer: Address
    sends: bool
    tensor: Tensor

    def __str__(self) -> str:
        return f"{'sending' if self.sends else 'receiving'} transfer {self.number}"


class _Meeting(NamedTuple):
    given: dict[Address, Tensor]
    results: dict[Address, Tensor]
