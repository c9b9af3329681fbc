"""The actions of every worker, in compiled code: loads, stages, posts, waits and frees, slot by slot.

Slot k stands before the k-th stage of a worker's order. In it come, in this order: the copy to the host of what stage
k-1 offloads, what that stage lets go of, posts, waits for sends and copies long on their way and what these free,
copies back from the host, the load of stage k and waits for its tensors, stage k.

Stages are numbered as in `stages.py`; U is the number of units.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.schedule.flat import (
    COMPUTE,
    FREE,
    GRADIENT,
    HOST,
    LEAVING,
    LOAD,
    LOADED,
    OFFLOAD,
    OUTPUT,
    POST,
    RECEIVED,
    RELOAD,
    RETURNED,
    SAVED,
    SETTLE,
    WAIT,
    WEIGHT,
    Ints,
)
from pipeweaver.schedule.transfers import by_unit


@numba.njit(cache=True)
def place_copies(order_start, order, start_ns, end_ns, offloads, copy_ns):  # type: ignore[no-untyped-def]
    """(slot in which the copy of each unit to the host is waited for, slot in which the one back begins), [U]; -1 where
    nothing is offloaded.

    The wait stands between stages, as soon as the copy is done. The copy back begins as late as it can for
    its tensors to be there when the backward begins; copies in one direction come one after the other.
    """
    num_units = len(offloads)
    settled, returns = np.full(num_units, -1, np.int64), np.full(num_units, -1, np.int64)
    for w in range(len(order_start) - 1):
        base, size = order_start[w], order_start[w + 1] - order_start[w]
        away = np.int64(0)
        for k in range(size):
            u = order[base + k]
            if u < num_units and offloads[u]:
                away = max(away, end_ns[u]) + copy_ns[u]
                slot = k + 1
                while slot < size and end_ns[order[base + slot]] < away:
                    slot += 1
                settled[u] = min(slot + 1, size)
        begin = np.int64(1) << 62
        for k in range(size - 1, -1, -1):
            u = order[base + k] - num_units
            if 0 <= u < num_units and offloads[u]:
                begin = min(begin, start_ns[num_units + u]) - copy_ns[u]
                settled[u] = min(settled[u], k)
                slot = k
                while slot > settled[u] and end_ns[order[base + slot - 1]] > begin:
                    slot -= 1
                returns[u] = slot
    return settled, returns


class _Out(NamedTuple):
    """Columns of `FlatActions`, longer than needed; `size` [3] counts actions, allocations and frees so far."""

    size: Ints
    kind: Ints
    first: Ints
    second: Ints
    phase: Ints
    detail: Ints
    duration_ns: Ints
    workspace_bytes: Ints
    allocation_start: Ints
    allocation_kind: Ints
    allocation_first: Ints
    allocation_second: Ints
    allocation_bytes: Ints
    free_start: Ints
    free_kind: Ints
    free_first: Ints
    free_second: Ints


@numba.njit(cache=True)
def build_actions(  # type: ignore[no-untyped-def]
    orders,
    end_ns,
    duration_ns,
    edges,
    grad,
    is_local,
    is_whole,
    edge_bytes,
    post_ns,
    transfers,
    posts,
    chunk,
    part,
    learns,
    loads,
    costs,
    output_bytes,
    used,
    offloads,
    settled,
    returns,
    ending_start,
    ending,
):
    """Columns of `FlatActions`, of all workers.

    [U]: `chunk` and `part` of a unit, `loads` (whether it does), `used` (the number of its strategies), `offloads`,
    `settled` and `returns` (`place_copies`). A worker's list ends with the rows `ending[ending_start[w] :
    ending_start[w + 1]]` of kind, first, duration.
    """
    order_start, order, split = orders
    source, destination = edges.source, edges.destination
    num_units, num_workers = len(learns), len(order_start) - 1
    incoming_start, incoming = by_unit(destination, num_units)
    outgoing_start, outgoing = by_unit(source, num_units)
    number = np.full((len(source), 2), -1, np.int64)
    for t in range(len(transfers.edge)):
        number[transfers.edge[t], transfers.phase[t]] = t
    num_posts, num_copied = len(posts.transfer), np.sum(offloads)
    num_buffers = num_posts + 3 * len(order) + 3 * num_copied
    out = _columns(4 * len(order) + 4 * num_copied + 3 * num_posts + 2 * num_workers + len(ending), num_buffers)
    start = np.zeros(num_workers + 1, np.int64)
    slot_of_stage = np.full(3 * num_units, -1, np.int64)
    for w in range(num_workers):
        for at in range(order_start[w], order_start[w + 1]):
            slot_of_stage[order[at]] = at - order_start[w]
    slot_of_wait = np.zeros(len(transfers.edge), np.int64)  # of the sender
    freed = np.zeros((num_buffers, 3), np.int64)  # slot (twice, and 1 behind its waits), kind, what it is of
    for w in range(num_workers):
        base, size = order_start[w], order_start[w + 1] - order_start[w]
        # Sends are waited for one stage past the predicted arrival: by then the wait finds the send done.
        wait_start = np.zeros(size + 2, np.int64)
        for p in range(posts.start[w], posts.start[w + 1]):
            t = posts.transfer[p]
            if transfers.sender[t] == w:
                e = transfers.edge[t]
                unit = source[e] if transfers.phase[t] == 0 else destination[e] + num_units
                arrival = end_ns[unit] + transfers.duration_ns[t]
                wait = posts.slot[p]
                while wait < size and end_ns[order[base + wait]] <= arrival:
                    wait += 1
                slot_of_wait[t] = min(wait + 1, size)
                wait_start[slot_of_wait[t] + 1] += 1
        for k in range(size + 1):
            wait_start[k + 1] += wait_start[k]
        waits = np.zeros(max(1, wait_start[size + 1]), np.int64)
        filled = wait_start[:-1].copy()
        for p in range(posts.start[w], posts.start[w + 1]):
            t = posts.transfer[p]
            if transfers.sender[t] == w:
                waits[filled[slot_of_wait[t]]] = t
                filled[slot_of_wait[t]] += 1
        # Units whose copies to the host are waited for, and whose copies back begin, slot by slot.
        leave_start, leave = _by_slot(order, base, size, settled, 0, num_units)
        return_start, come_back = _by_slot(order, base, size, returns, num_units, num_units)
        # 1. When buffers are let go of.
        n = 0
        for k in range(size):
            stage = order[base + k]
            third, u = stage // num_units, stage % num_units
            last = slot_of_stage[num_units + u] if learns[u] else slot_of_stage[u]
            if third == 0:
                if loads[u]:
                    n = _let_go(freed, n, last + 1, 0, LOADED, u)
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    if not is_local[e]:
                        n = _let_go(freed, n, (last if is_whole[e] else k) + 1, 0, RECEIVED, number[e, 0])
                # Outputs are needed until their sends are waited for and the stages here that take them are done.
                needed = k + 1
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if not is_local[e]:
                        needed = max(needed, slot_of_wait[number[e, 0]])
                    else:
                        d = destination[e]
                        needed = max(needed, (slot_of_stage[num_units + d] if learns[d] else slot_of_stage[d]) + 1)
                if learns[u]:
                    # A reader that sends no gradient back may come after the backward, or its send's wait may.
                    n = _let_go(freed, n, max(last + 1, needed), 1 if needed > last else 0, SAVED, u)
                elif outgoing_start[u] < outgoing_start[u + 1]:
                    n = _let_go(freed, n, needed, 1, OUTPUT, u)
                if offloads[u]:
                    n = _let_go(freed, n, settled[u], 1, LEAVING, u)
                    n = _let_go(freed, n, last + 1, 0, HOST, u)
                    n = _let_go(freed, n, last + 1, 0, RETURNED, u)
            elif third == 1:
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if grad[e] and not is_local[e]:
                        n = _let_go(freed, n, k + 1, 0, RECEIVED, number[e, 1])
                needed, returned = k + 1, 0
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    if grad[e]:
                        returned += edge_bytes[e]
                        if is_local[e]:
                            needed = max(needed, slot_of_stage[num_units + source[e]] + 1)
                        else:
                            needed = max(needed, slot_of_wait[number[e, 1]])
                if returned:
                    n = _let_go(freed, n, needed, 1, GRADIENT, u)
                if split[u]:
                    n = _let_go(freed, n, slot_of_stage[2 * num_units + u] + 1, 0, WEIGHT, u)
        free_start, by_slot = by_unit(freed[:n, 0], 2 * size + 2)
        # 2. The actions, slot by slot.
        next_post = posts.start[w]
        for k in range(size + 1):
            if k > 0 and order[base + k - 1] < num_units and offloads[order[base + k - 1]]:
                u = order[base + k - 1]
                _allocate(out, HOST, chunk[u], part[u], costs.offloaded_bytes[u])
                _act(out, OFFLOAD, chunk[u], part[u], costs.offload_ns[u])
            for late in range(2):
                if late:
                    while next_post < posts.start[w + 1] and posts.slot[next_post] == k:
                        t = posts.transfer[next_post]
                        if transfers.receiver[t] == w:
                            _allocate(out, RECEIVED, t, 0, edge_bytes[transfers.edge[t]])
                        _act(out, POST, t, 0, post_ns[transfers.edge[t]])
                        next_post += 1
                    for i in range(wait_start[k], wait_start[k + 1]):
                        _act(out, WAIT, waits[i], 0, 0)
                    for i in range(leave_start[k], leave_start[k + 1]):
                        _act(out, SETTLE, chunk[leave[i]], part[leave[i]], 0)
                begin, end = free_start[2 * k + late], free_start[2 * k + late + 1]
                for i in range(begin, end):
                    kind, of = freed[by_slot[i], 1], freed[by_slot[i], 2]
                    f = out.size[2]
                    out.free_kind[f] = kind
                    out.free_first[f] = of if kind == RECEIVED else chunk[of]
                    out.free_second[f] = 0 if kind == RECEIVED else part[of]
                    out.size[2] += 1
                if begin < end:
                    _act(out, FREE, 0, 0, 0)
            for i in range(return_start[k], return_start[k + 1]):
                u = come_back[i]
                _allocate(out, RETURNED, chunk[u], part[u], costs.offloaded_bytes[u])
                _act(out, RELOAD, chunk[u], part[u], costs.offload_ns[u])
            if k == size:
                break
            stage = order[base + k]
            third, u = stage // num_units, stage % num_units
            if third == 0 and loads[u]:
                out.detail[out.size[0]] = chunk[u]
                _allocate(out, LOADED, chunk[u], part[u], costs.loaded_bytes[u])
                _act(out, LOAD, chunk[u], part[u], costs.load_ns[u])
            assembled, returned = 0, 0
            if third == 0:
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    assembled += 0 if is_whole[e] else edge_bytes[e]
                    if not is_local[e]:
                        _act(out, WAIT, number[e, 0], 0, 0)
            elif third == 1:
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if grad[e] and not is_local[e]:
                        _act(out, WAIT, number[e, 1], 0, 0)
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    returned += edge_bytes[incoming[i]] if grad[incoming[i]] else 0
            if third == 1 and offloads[u]:
                _act(out, SETTLE, chunk[u], part[u], 0)
            a = out.size[0]
            if third == 0:
                out.workspace_bytes[a] = costs.forward_workspace_bytes[u]
                out.detail[a] = used[u]
                if learns[u]:
                    saved = costs.saved_bytes[u] + output_bytes[u] + assembled
                    _allocate(out, SAVED, chunk[u], part[u], saved)
                    if offloads[u]:
                        _allocate(out, LEAVING, chunk[u], part[u], costs.offloaded_bytes[u])
                else:
                    out.workspace_bytes[a] += assembled
                    if outgoing_start[u] < outgoing_start[u + 1]:
                        _allocate(out, OUTPUT, chunk[u], part[u], output_bytes[u])
            elif third == 1:
                out.phase[a] = 2 if split[u] else 1
                out.workspace_bytes[a] = costs.backward_workspace_bytes[u]
                if returned:
                    _allocate(out, GRADIENT, chunk[u], part[u], returned)
                if split[u]:
                    _allocate(out, WEIGHT, chunk[u], part[u], costs.weight_bytes[u])
            else:
                out.phase[a] = 3
                out.workspace_bytes[a] = costs.weight_workspace_bytes[u]
            _act(out, COMPUTE, chunk[u], part[u], duration_ns[stage])
        for i in range(ending_start[w], ending_start[w + 1]):
            _act(out, ending[i, 0], ending[i, 1], 0, ending[i, 2])
        start[w + 1] = out.size[0]
    actions, allocations, frees = out.size
    return (
        start,
        out.kind[:actions],
        out.first[:actions],
        out.second[:actions],
        out.phase[:actions],
        out.detail[:actions],
        out.duration_ns[:actions],
        out.workspace_bytes[:actions],
        out.allocation_start[: actions + 1],
        out.allocation_kind[:allocations],
        out.allocation_first[:allocations],
        out.allocation_second[:allocations],
        out.allocation_bytes[:allocations],
        out.free_start[: actions + 1],
        out.free_kind[:frees],
        out.free_first[:frees],
        out.free_second[:frees],
    )


@numba.njit(cache=True)
def _columns(actions, buffers):  # type: ignore[no-untyped-def]
    """For at most so many actions, allocations and frees."""
    return _Out(
        np.zeros(3, np.int64),
        np.empty(actions, np.int64),
        np.empty(actions, np.int64),
        np.empty(actions, np.int64),
        np.zeros(actions, np.int64),
        np.zeros(actions, np.int64),
        np.empty(actions, np.int64),
        np.zeros(actions, np.int64),
        np.zeros(actions + 1, np.int64),
        np.empty(buffers, np.int64),
        np.empty(buffers, np.int64),
        np.empty(buffers, np.int64),
        np.empty(buffers, np.int64),
        np.zeros(actions + 1, np.int64),
        np.empty(buffers, np.int64),
        np.empty(buffers, np.int64),
        np.empty(buffers, np.int64),
    )


@numba.njit(cache=True)
def _act(out, kind, first, second, duration):  # type: ignore[no-untyped-def]
    """The next action; its allocations and frees are those since the one before."""
    a = out.size[0]
    out.kind[a], out.first[a], out.second[a], out.duration_ns[a] = kind, first, second, duration
    out.allocation_start[a + 1], out.free_start[a + 1] = out.size[1], out.size[2]
    out.size[0] += 1


@numba.njit(cache=True)
def _allocate(out, kind, first, second, num_bytes):  # type: ignore[no-untyped-def]
    """A buffer that the next action allocates."""
    i = out.size[1]
    out.allocation_kind[i], out.allocation_first[i], out.allocation_second[i] = kind, first, second
    out.allocation_bytes[i] = num_bytes
    out.size[1] += 1


@numba.njit(cache=True)
def _let_go(freed, n, slot, late, kind, of):  # type: ignore[no-untyped-def]
    """One more buffer that is freed in a slot; `late`: behind its waits."""
    freed[n, 0], freed[n, 1], freed[n, 2] = 2 * slot + late, kind, of
    return n + 1


@numba.njit(cache=True)
def _by_slot(order, base, size, slot, first, num_units):  # type: ignore[no-untyped-def]
    """(where slot k begins [size + 2], units): units of a worker's stages from number `first` on, by `slot` [U], in the
    order of these stages; slots below 0 are none."""
    start = np.zeros(size + 2, np.int64)
    for k in range(size):
        u = order[base + k] - first
        if 0 <= u < num_units and slot[u] >= 0:
            start[slot[u] + 1] += 1
    for k in range(size + 1):
        start[k + 1] += start[k]
    units, filled = np.zeros(max(1, start[size + 1]), np.int64), start[:-1].copy()
    for k in range(size):
        u = order[base + k] - first
        if 0 <= u < num_units and slot[u] >= 0:
            units[filled[slot[u]]] = u
            filled[slot[u]] += 1
    return start, units
