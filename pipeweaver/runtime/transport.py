"""Transports: post and wait for a plan's transfers, reduce gradients, sum numbers.

One protocol with two ends: torch.distributed here (Gloo on CPU, NCCL on GPUs), threads in
`transport_local.py`. Workers are addressed by (replica, worker); `WorkerMap` alone knows which processes
that is.

Order: transfers between two workers are posted in the plan's order on both ends, and the verifier has proven
that they complete, pair by pair and even with one queue per worker. That is what NCCL needs: it matches by
order, on a communicator per pair or, where torch was told the device at the start, on that of the group.
Gloo matches by tag, which is the transfer's number. Neither checks shapes, so both ends check them against
the plan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeweaver.runtime.process import RunError
from pipeweaver.schedule.ir import Plan, Transfer

NEVER = timedelta(days=30)
"""Time limit of the process groups: the watchdog decides what a hang is, and says more about it."""


class Address(NamedTuple):
    """A worker of a replica."""

    replica: int
    worker: int

    def __str__(self) -> str:
        return f"worker {self.worker} of replica {self.replica}"


class WorkerMap(NamedTuple):
    """Which processes the workers are. Replicas are blocks of workers, workers blocks of `width` ranks."""

    num_replicas: int
    num_workers: int
    width: int = 1

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.num_workers * self.width

    def ranks(self, address: Address) -> range:
        """Ranks of a worker. Member i of one worker sends to member i of another."""
        first = (address.replica * self.num_workers + address.worker) * self.width
        return range(first, first + self.width)

    def locate(self, rank: int) -> tuple[Address, int]:
        """(worker, position in it) of a rank."""
        block, position = divmod(rank, self.width)
        return Address(*divmod(block, self.num_workers)), position


class Transport(Protocol):
    """What a worker needs of its peers. Every call names the same event on all of its members."""

    address: Address

    def prepare(self, plan: Plan) -> None:
        """Make what the plan's transfers and reductions need, in the same order on all workers."""

    def post(self, number: int, transfer: Transfer, tensor: Tensor) -> None:
        """Enqueue transfer `number`: send `tensor`, or receive into it. Never blocks. The tensor must stay
        as it is until the wait."""

    def wait(self, number: int) -> None:
        """Block until transfer `number` is complete on this end."""

    def reduce(self, members: Sequence[Address], tensor: Tensor) -> None:
        """Sum `tensor` over its members in place; all get the same bits."""

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all workers of all replicas, in float64."""

    def barrier(self) -> None: ...

    def close(self) -> None:
        """Leave. No call follows."""


@contextmanager
def lost_workers_told() -> Iterator[None]:
    """Outside of a step too, another worker's end is told in one line: a RunError in place of the backend's error."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # Gloo's words begin with a place in its source, and go on to advise.
        words = re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". ")[0]
        raise RunError(f"lost another worker: {words}") from None


class TransferError(RuntimeError):
    """A transfer or a meeting that does not go by the plan, or that cannot complete."""


def check_tensor(number: int, transfer: Transfer, tensor: Tensor) -> None:
    """Raise TransferError unless the tensor is what the plan says of transfer `number`."""
    dtype = getattr(torch, transfer.dtype)
    if tuple(tensor.shape) != tuple(transfer.shape) or tensor.dtype != dtype:
        raise TransferError(
            f"transfer {number} from worker {transfer.sender} to {transfer.receiver} should be "
            f"{list(transfer.shape)} {dtype} by the plan, but the tensor is {list(tensor.shape)} {tensor.dtype}"
        )


class ProcessTransport:
    """Workers as processes of the default group of torch.distributed, which must be initialised.

    Raises ValueError if the group's size is not what the map says, or if CUDA is limited to one queue: then a
    receive that is not matched yet holds up compute, and a plan proven free of deadlock may still hang.
    """

    def __init__(self, workers: WorkerMap, device: torch.device) -> None:
        world_size = dist.get_world_size()
        if world_size != workers.world_size:
            raise ValueError(
                f"{workers.num_replicas} replicas of {workers.num_workers} workers need {workers.world_size} "
                f"processes, but {world_size} were started"
            )
        if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ValueError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts transfers and compute into one queue, where they can wait for "
                "each other forever; unset it"
            )
        self.workers = workers
        self.device = device
        self.address, self.position = workers.locate(dist.get_rank())
        self._posted: dict[int, tuple[dist.Work, Tensor]] = {}
        self._groups: dict[tuple[Address, ...], dist.ProcessGroup | None] = {}
        self._pairs: set[tuple[int, int]] = set()

    def prepare(self, plan: Plan) -> None:
        # A group is made by all processes, member or not, so the order of the plan is the order for all.
        for group in plan.groups:
            members = tuple(
                Address(replica, holder) for replica in range(plan.num_replicas) for holder in group.holders
            )
            if len(members) > 1 and members not in self._groups:
                self._groups[members] = self._new_group(members)
        if self.device.type == "cuda":
            self._connect_pairs(plan)

    def post(self, number: int, transfer: Transfer, tensor: Tensor) -> None:
        check_tensor(number, transfer, tensor)
        assert number not in self._posted, f"transfer {number} is posted twice"
        assert tensor.is_contiguous(), f"transfer {number}: the tensor is not contiguous"
        if self.address.worker == transfer.sender:
            work = dist.isend(tensor, self._peer(transfer.receiver), tag=number)
        else:
            work = dist.irecv(tensor, self._peer(transfer.sender), tag=number)
        assert work is not None
        # Kept until the wait: the backend does not hold on to what it sends.
        self._posted[number] = (work, tensor)

    def wait(self, number: int) -> None:
        work, _ = self._posted.pop(number)
        work.wait()

    def reduce(self, members: Sequence[Address], tensor: Tensor) -> None:
        if len(members) == 1:
            return
        dist.all_reduce(tensor, group=self._groups[tuple(members)])

    def all_sum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        # Members of one worker hold equal numbers.
        return [total / self.workers.width for total in tensor.tolist()]

    def barrier(self) -> None:
        self.all_sum([0.0])

    def close(self) -> None:
        assert not self._posted, f"transfers {sorted(self._posted)} were posted and never waited for"

    def _peer(self, worker: int) -> int:
        return self.workers.ranks(Address(self.address.replica, worker))[self.position]

    def _new_group(self, members: Sequence[Address]) -> dist.ProcessGroup | None:
        """A group per position within the workers; this process is in one of them at most."""
        mine = None
        for position in range(self.workers.width):
            ranks = sorted(self.workers.ranks(member)[position] for member in members)
            group = dist.new_group(ranks, timeout=NEVER) if len(ranks) < dist.get_world_size() else dist.group.WORLD
            if dist.get_rank() in ranks:
                mine = group
        return mine

    def _connect_pairs(self, plan: Plan) -> None:
        """Make NCCL's communicators of the pairs that meet in this plan, in one order: making one blocks both ends."""
        for pair in sorted({tuple(sorted((t.sender, t.receiver))) for t in plan.transfers} - self._pairs):
            self._pairs.add((pair[0], pair[1]))
            if self.address.worker not in pair:
                continue
            token = torch.zeros(1, device=self.device)
            if self.address.worker == pair[0]:
                dist.send(token, self._peer(pair[1]))
            else:
                dist.recv(token, self._peer(pair[0]))
