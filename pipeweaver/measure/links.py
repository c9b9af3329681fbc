"""Measure what joins the workers: transfers between every two of them, reductions over more and more.

Two workers play ping-pong: the one sends, the other sends back what arrived; half of the round trip is a
transfer. Both count what it takes of their cores too, all threads together: on a CPU that is lost to compute. All pairs get their turn, disjoint pairs at the same time (a round-robin tournament). Reductions
run over workers 0..k-1 of all replicas, k growing by doubling. And what joins a worker to its host's memory.

The medians of several repetitions count: a transfer is short beside what a busy machine takes away at a
time, so few of them are hit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch

from pipeweaver.measure.records import LinkSample
from pipeweaver.runtime.clock import make_clock
from pipeweaver.runtime.transport import Address, Transport
from pipeweaver.schedule.ir import ParameterGroup, Placement, Plan, Transfer

TRANSFER_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
REDUCTION_BYTES = (8, 1 << 14, 1 << 20, 1 << 24)
HOST_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
REPETITIONS = 9


def measure_links(
    transport: Transport, *, num_workers: int, num_replicas: int, device: torch.device, per_host: int = 0
) -> tuple[tuple[LinkSample, ...], tuple[LinkSample, ...]]:
    """(transfers, reductions) that this worker took part in. All workers call this at the same time.

    A sample of a transfer counts for both directions. Both ends report it. `per_host` workers share a host, replica by
    replica; 0 for all of them.
    """
    plan = _probe_plan(num_workers, num_replicas)
    transport.prepare(plan)
    me = transport.address.worker
    base = transport.address.replica * num_workers
    host_of = [(base + worker) // per_host if per_host else 0 for worker in range(num_workers)]
    transfers: list[LinkSample] = []
    for pairs in tournament(num_workers):
        transport.barrier()
        for one, other in pairs:
            if me in (one, other):
                for num_bytes in TRANSFER_BYTES:
                    duration_ns, core_ns = _ping_pong(transport, plan, me == one, (one, other), num_bytes, device)
                    for ends in ((one, other), (other, one)):
                        crosses = host_of[one] != host_of[other]
                        transfers.append(
                            LinkSample(
                                ends=ends,
                                num_bytes=num_bytes,
                                duration_ns=duration_ns,
                                crosses=crosses,
                                core_ns=core_ns,
                            )
                        )
    reductions: list[LinkSample] = []
    for group in plan.groups:
        members = [Address(replica, holder) for replica in range(num_replicas) for holder in group.holders]
        transport.barrier()
        hosts = {(m.replica * num_workers + m.worker) // per_host if per_host else 0 for m in members}
        if transport.address in members and len(members) > 1:
            for num_bytes in REDUCTION_BYTES:
                duration_ns = _reduction(transport, members, num_bytes, device)
                reductions.append(
                    LinkSample(
                        ends=(len(members),), num_bytes=num_bytes, duration_ns=duration_ns, crosses=len(hosts) > 1
                    )
                )
    transport.barrier()
    return tuple(transfers), tuple(reductions)


def measure_host(device: torch.device) -> tuple[LinkSample, ...]:
    """Copies to pinned host memory and back, each the slower of the two; none for a CPU, whose memory is the host's."""
    if device.type != "cuda":
        return ()
    samples = []
    for num_bytes in HOST_BYTES:
        here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        times = []
        for source, target in ((here, there), (there, here)):
            of_way = []
            for _ in range(REPETITIONS):
                clock = make_clock(device)
                clock.mark()
                target.copy_(source, non_blocking=True)
                clock.mark()
                start, end = clock.times()
                of_way.append(end - start)
            times.append(median(of_way[1:]))
        samples.append(LinkSample(ends=(), num_bytes=num_bytes, duration_ns=max(1, round(max(times)))))
    return tuple(samples)


def tournament(num_workers: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (smaller, larger) in which every two workers meet once."""
    seats: list[int | None] = list(range(num_workers))
    if num_workers % 2:
        seats.append(None)
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _ping_pong(
    transport: Transport, plan: Plan, first: bool, pair: tuple[int, int], num_bytes: int, device: torch.device
) -> tuple[int, int]:
    """(nanoseconds of one transfer, what it takes of this end's cores: nothing that holds up a GPU)."""
    number = next(i for i, t in enumerate(plan.transfers) if (t.sender, t.receiver, t.num_bytes) == (*pair, num_bytes))
    there, back = plan.transfers[number], plan.transfers[number + 1]
    out, received = (torch.zeros(there.shape, device=device) for _ in range(2))
    times, cores = [], []
    for _ in range(REPETITIONS):
        clock = make_clock(device)
        clock.mark()
        busy_ns = time.process_time_ns()
        # Posted in the same order on both ends, as every transport wants it.
        if first:
            transport.post(number, there, out)
            transport.post(number + 1, back, received)
            transport.wait(number)
            transport.wait(number + 1)
        else:
            transport.post(number, there, received)
            transport.wait(number)
            transport.post(number + 1, back, received)
            transport.wait(number + 1)
        clock.mark()
        cores.append((time.process_time_ns() - busy_ns) // 2)
        start, end = clock.times()
        times.append((end - start) // 2)
    return max(1, round(median(times[1:]))), round(median(cores[1:])) if device.type == "cpu" else 0


def _reduction(transport: Transport, members: list[Address], num_bytes: int, device: torch.device) -> int:
    tensor = torch.zeros(max(1, num_bytes // 4), device=device)
    times = []
    for _ in range(REPETITIONS):
        clock = make_clock(device)
        clock.mark()
        transport.reduce(members, tensor)
        clock.mark()
        start, end = clock.times()
        times.append(end - start)
    return max(1, round(median(times[1:])))


def _probe_plan(num_workers: int, num_replicas: int) -> Plan:
    """A plan with a transfer there and one back for every pair and size, and a group for every number of holders."""
    transfers = tuple(
        Transfer(
            edge=0,
            phase="F",
            sender=sender,
            receiver=receiver,
            shape=(num_bytes // 4, 1),
            dtype="float32",
            num_bytes=num_bytes,
        )
        for one in range(num_workers)
        for other in range(one + 1, num_workers)
        for num_bytes in TRANSFER_BYTES
        for sender, receiver in ((one, other), (other, one))
    )
    counts = {1 << power for power in range(num_workers.bit_length()) if 1 << power <= num_workers} | {num_workers}
    return Plan(
        step=-1,
        replica=0,
        num_replicas=num_replicas,
        policy="calibration",
        seed=0,
        rounds=0,
        forward_only=True,
        items=(),
        links=(),
        records={},
        placement=Placement(workers=num_workers, chunks=()),
        parts=(),
        order=((),) * num_workers,
        edges=(),
        transfers=transfers,
        groups=tuple(ParameterGroup(parameters=(), holders=tuple(range(count))) for count in sorted(counts)),
        normalisers={},
        actions=((),) * num_workers,
        static_bytes=(0,) * num_workers,
    )
