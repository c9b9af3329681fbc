"""The transfers of a step in their total order, and when each worker posts them.

A transfer is a single event, at the end of the stage that produces its tensor. The sender posts right after that stage,
the receiver before the stage that it runs at that time (`lead` stages earlier still, but never ahead of a transfer
that it has to post first). Example, two workers, the tensor of 0F0 travels while worker 1 runs 2F0:

    worker 0   0F0 post ...
    worker 1   post 2F0 wait 1F0
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.flat import FlatTransfers, ints
from pipeweaver.schedule.stages import Orders, StepStages
from pipeweaver.schedule.timing import StageTimes


class Posts(NamedTuple):
    """The posts of worker w in order, from `start[w]` on: in which slot (before its so many-th stage), of which
    transfer."""

    start: Ints
    slot: Ints
    transfer: Ints


def step_transfers(step: StepStages, orders: Orders, times: StageTimes, lead: int) -> tuple[FlatTransfers, Posts]:
    """All transfers in their total order, and who posts them where."""
    inlets = [inlet for of in step.wiring.inlets for inlet in of]
    names = tensor_names(step)
    columns, posts = _transfers(
        orders,
        times.completed,
        step.worker,
        step.edges,
        step.grad,
        step.is_local,
        step.edge_bytes,
        step.lag_ns,
        ints([inlet.width for inlet in inlets]),
        ints([names[inlet.dtype] for inlet in inlets]),
        step.placement.workers,
        lead,
    )
    return FlatTransfers(*columns), Posts(*posts)


def tensor_names(step: StepStages) -> dict[str, int]:
    """Numbers of all names that edges and transfers use."""
    inlets = [inlet for of in step.wiring.inlets for inlet in of]
    names = [name for inlet in inlets for name in (inlet.output, inlet.input, inlet.dtype)]
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


@numba.njit(cache=True)
def by_unit(unit, size):  # type: ignore[no-untyped-def]
    """(start [size + 1], edges): the edges of unit u, ascending, from start[u] on."""
    start = np.zeros(size + 1, np.int64)
    for e in range(len(unit)):
        start[unit[e] + 1] += 1
    for u in range(size):
        start[u + 1] += start[u]
    edges, filled = np.empty(len(unit), np.int64), start[:-1].copy()
    for e in range(len(unit)):
        edges[filled[unit[e]]] = e
        filled[unit[e]] += 1
    return start, edges


@numba.njit(cache=True)
def _transfers(orders, completed, worker, edges, grad, is_local, edge_bytes, lag_ns, width, dtype, num_workers, lead):  # type: ignore[no-untyped-def]
    """(columns of the transfers, start, slot and transfer of the posts). A stage's transfers come in the order of
    their edges."""
    size, num_edges = len(worker), len(grad)
    count = 0
    for e in range(num_edges):
        if not is_local[e]:
            count += 2 if grad[e] else 1
    edge, phase = np.empty(count, np.int64), np.empty(count, np.int64)
    sender, receiver = np.empty(count, np.int64), np.empty(count, np.int64)
    sent, received = np.empty(count, np.int64), np.empty(count, np.int64)  # slots of the two posts
    slot, post_start = np.zeros(3 * size, np.int64), np.zeros(num_workers + 1, np.int64)
    for w in range(num_workers):
        for at in range(orders.start[w], orders.start[w + 1]):
            slot[orders.stage[at]] = at - orders.start[w]
    outgoing_start, outgoing = by_unit(edges.source, size)
    incoming_start, incoming = by_unit(edges.destination, size)
    passed = np.zeros(num_workers, np.int64)  # stages of each worker that end before the event at hand
    latest = np.zeros(num_workers, np.int64)  # slot of its latest post
    t = 0
    for s in completed:
        u, third = s % size, s // size
        if third < 2:
            start, of = (outgoing_start, outgoing) if third == 0 else (incoming_start, incoming)
            for i in range(start[u], start[u + 1]):
                e = of[i]
                if is_local[e] or (third == 1 and not grad[e]):
                    continue
                source, destination = worker[edges.source[e]], worker[edges.destination[e]]
                edge[t], phase[t] = e, third
                sender[t], receiver[t] = (source, destination) if third == 0 else (destination, source)
                sent[t] = slot[s] + 1
                received[t] = max(passed[receiver[t]] - lead, latest[receiver[t]])
                latest[sender[t]], latest[receiver[t]] = sent[t], received[t]
                post_start[sender[t] + 1] += 1
                post_start[receiver[t] + 1] += 1
                t += 1
        passed[worker[u]] += 1
    assert t == count
    for w in range(num_workers):
        post_start[w + 1] += post_start[w]
    filled = post_start[:-1].copy()
    post_slot, posted = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
    for t in range(count):
        post_slot[filled[sender[t]]], posted[filled[sender[t]]] = sent[t], t
        filled[sender[t]] += 1
        post_slot[filled[receiver[t]]], posted[filled[receiver[t]]] = received[t], t
        filled[receiver[t]] += 1
    inlet = edges.inlet[edge]
    columns = (
        edge, phase, sender, receiver, edges.num_rows[edge], width[inlet], dtype[inlet], edge_bytes[edge], lag_ns[edge],
    )  # fmt: skip
    return columns, (post_start, post_slot, posted)
