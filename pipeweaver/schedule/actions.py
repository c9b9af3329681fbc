"""The actions of every worker, in compiled code: loads, stages, posts, waits and frees, slot by slot.

Slot k stands before the k-th stage of a worker's order. In it come, in this order: the copy to the host of what stage
k-1 offloads, what that stage lets go of, posts, waits for sends and copies long on their way and what these free,
copies back from the host, the load of stage k and waits for its tensors, stage k.

Stages are numbered as in `stages.py`; U is the number of units, E of edges. `number[e, 0]` is the transfer of edge e
forward, `number[e, 1]` that of its gradient, -1 where there is none.
"""

from __future__ import annotations

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
)


@numba.njit(cache=True)
def order_transfers(order_start, order, rank, event_stage, event_receiver, lead):  # type: ignore[no-untyped-def]
    """Slots in which transfers are posted: [T, 2], sender's and receiver's.

    Transfers come sorted by their event, the end of `event_stage` [T]; `rank` [S] is the place of a stage among all
    ends. The receiver posts before the stage that it runs at that time (`lead` stages earlier still, but never ahead
    of a transfer that it has to post first).
    """
    num_workers = len(order_start) - 1
    slot = np.zeros(len(rank), np.int64)
    worker = np.zeros(len(rank), np.int64)
    for w in range(num_workers):
        for at in range(order_start[w], order_start[w + 1]):
            slot[order[at]] = at - order_start[w]
            worker[order[at]] = w
    posted = np.zeros((len(event_stage), 2), np.int64)
    passed = np.zeros(num_workers, np.int64)  # stages of each worker that end before the event at hand
    latest = np.zeros(num_workers, np.int64)  # slot of its latest post
    for t in range(len(event_stage)):
        stage, receiver = event_stage[t], event_receiver[t]
        event = rank[stage]
        while order_start[receiver] + passed[receiver] < order_start[receiver + 1]:
            if rank[order[order_start[receiver] + passed[receiver]]] >= event:
                break
            passed[receiver] += 1
        posted[t, 0] = slot[stage] + 1
        posted[t, 1] = max(passed[receiver] - lead, latest[receiver])
        latest[worker[stage]] = posted[t, 0]
        latest[receiver] = posted[t, 1]
    return posted


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


@numba.njit(cache=True)
def build_actions(  # type: ignore[no-untyped-def]
    order_start,
    order,
    split,
    learns,
    end_ns,
    source,
    destination,
    grad,
    is_local,
    is_whole,
    edge_bytes,
    number,
    transfer_edge,
    transfer_phase,
    transfer_ns,
    transfer_receiver,
    posts_start,
    posts_slot,
    posts_transfer,
    incoming_start,
    incoming,
    outgoing_start,
    outgoing,
    loads,
    loaded_bytes,
    load_ns,
    saved_bytes,
    output_bytes,
    weight_bytes,
    forward_workspace,
    backward_workspace,
    weight_workspace,
    duration,
    offloads,
    offloaded_bytes,
    copy_ns,
    settled,
    returns,
    ending_start,
    ending,
):
    """Actions of all workers: (start [P + 1], rows [A, 5] of kind, first, phase, duration, workspace,
    allocation_start [A + 1], allocations [., 3] of kind, index, bytes, free_start [A + 1], frees [., 2]).

    `first` is a unit for loads, copies and stages, a transfer for posts and waits; buffers are indexed likewise.
    `phase` as in `flat.PHASES`. A worker's list ends with the rows `ending[ending_start[w] : ending_start[w + 1]]`.
    """
    num_units, num_workers = len(learns), len(order_start) - 1
    num_stages, num_posts = len(order), len(posts_transfer)
    num_copied = np.sum(offloads)
    most = 4 * num_stages + 4 * num_copied + 3 * num_posts + 2 * num_workers + len(ending)
    rows = np.zeros((most, 5), np.int64)
    allocation_start, free_start = np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)
    num_buffers = num_posts + 3 * num_stages + 3 * num_copied
    allocations = np.zeros((num_buffers, 3), np.int64)
    frees = np.zeros((num_buffers, 2), np.int64)
    start = np.zeros(num_workers + 1, np.int64)
    slot_of_stage = np.full(3 * num_units, -1, np.int64)
    for w in range(num_workers):
        for at in range(order_start[w], order_start[w + 1]):
            slot_of_stage[order[at]] = at - order_start[w]
    slot_of_wait = np.zeros(len(transfer_edge), np.int64)  # of the sender
    num_actions, num_allocations, num_frees = 0, 0, 0
    # What is let go of in which slot, in the order in which it is found.
    freed_slot = np.zeros(num_buffers, np.int64)
    freed = np.zeros((num_buffers, 3), np.int64)  # kind, index, whether behind the waits
    for w in range(num_workers):
        base, size = order_start[w], order_start[w + 1] - order_start[w]
        num_freed = 0
        # Sends are waited for one stage past the predicted arrival: by then the wait finds the send done.
        wait_start = np.zeros(size + 2, np.int64)
        for p in range(posts_start[w], posts_start[w + 1]):
            t = posts_transfer[p]
            if transfer_receiver[t] != w:
                e = transfer_edge[t]
                unit = source[e] if transfer_phase[t] == 0 else destination[e] + num_units
                arrival = end_ns[unit] + transfer_ns[t]
                wait = posts_slot[p]
                while wait < size and end_ns[order[base + wait]] <= arrival:
                    wait += 1
                slot_of_wait[t] = min(wait + 1, size)
                wait_start[slot_of_wait[t] + 1] += 1
        for k in range(size + 1):
            wait_start[k + 1] += wait_start[k]
        waits = np.zeros(max(1, wait_start[size + 1]), np.int64)
        filled = wait_start[:-1].copy()
        for p in range(posts_start[w], posts_start[w + 1]):
            t = posts_transfer[p]
            if transfer_receiver[t] != w:
                waits[filled[slot_of_wait[t]]] = t
                filled[slot_of_wait[t]] += 1
        # Units whose copies to the host are waited for, and whose copies back begin, slot by slot.
        leave_start, leave = _by_slot(order, base, size, settled, 0, num_units)
        return_start, come_back = _by_slot(order, base, size, returns, num_units, num_units)
        # 1. When buffers are let go of.
        for k in range(size):
            stage = order[base + k]
            third, u = stage // num_units, stage % num_units
            last = slot_of_stage[num_units + u] if learns[u] else slot_of_stage[u]
            if third == 0:
                if loads[u]:
                    freed_slot[num_freed] = last + 1
                    freed[num_freed] = (LOADED, u, 0)
                    num_freed += 1
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    if not is_local[e]:
                        freed_slot[num_freed] = (last if is_whole[e] else k) + 1
                        freed[num_freed] = (RECEIVED, number[e, 0], 0)
                        num_freed += 1
                # Outputs are needed until their sends are waited for and the stages here that take them are done.
                used = k + 1
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if not is_local[e]:
                        used = max(used, slot_of_wait[number[e, 0]])
                    else:
                        d = destination[e]
                        used = max(used, (slot_of_stage[num_units + d] if learns[d] else slot_of_stage[d]) + 1)
                if learns[u]:
                    # A reader that sends no gradient back may come after the backward, or its send's wait may.
                    freed_slot[num_freed] = max(last + 1, used)
                    freed[num_freed] = (SAVED, u, 1 if used > last else 0)
                    num_freed += 1
                elif outgoing_start[u] < outgoing_start[u + 1]:
                    freed_slot[num_freed] = used
                    freed[num_freed] = (OUTPUT, u, 1)
                    num_freed += 1
                if offloads[u]:
                    freed_slot[num_freed] = settled[u]
                    freed[num_freed] = (LEAVING, u, 1)
                    for of in (HOST, RETURNED):
                        num_freed += 1
                        freed_slot[num_freed] = last + 1
                        freed[num_freed] = (of, u, 0)
                    num_freed += 1
            elif third == 1:
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if grad[e] and not is_local[e]:
                        freed_slot[num_freed] = k + 1
                        freed[num_freed] = (RECEIVED, number[e, 1], 0)
                        num_freed += 1
                used, returned = k + 1, 0
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    if grad[e]:
                        returned += edge_bytes[e]
                        if is_local[e]:
                            used = max(used, slot_of_stage[num_units + source[e]] + 1)
                        else:
                            used = max(used, slot_of_wait[number[e, 1]])
                if returned:
                    freed_slot[num_freed] = used
                    freed[num_freed] = (GRADIENT, u, 1)
                    num_freed += 1
                if split[u]:
                    freed_slot[num_freed] = slot_of_stage[2 * num_units + u] + 1
                    freed[num_freed] = (WEIGHT, u, 0)
                    num_freed += 1
        by_slot = np.argsort(freed_slot[:num_freed], kind="mergesort")
        # 2. The actions, slot by slot.
        next_freed, next_post = 0, posts_start[w]
        for k in range(size + 1):
            if k > 0 and order[base + k - 1] < num_units and offloads[order[base + k - 1]]:
                u = order[base + k - 1]
                rows[num_actions, 0], rows[num_actions, 1], rows[num_actions, 3] = OFFLOAD, u, copy_ns[u]
                allocations[num_allocations] = (HOST, u, offloaded_bytes[u])
                num_allocations += 1
                num_actions += 1
                allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            first_freed = next_freed
            while next_freed < num_freed and freed_slot[by_slot[next_freed]] == k:
                next_freed += 1
            for late in range(2):
                if late:
                    while next_post < posts_start[w + 1] and posts_slot[next_post] == k:
                        t = posts_transfer[next_post]
                        rows[num_actions, 0], rows[num_actions, 1] = POST, t
                        if transfer_receiver[t] == w:
                            allocations[num_allocations] = (RECEIVED, t, edge_bytes[transfer_edge[t]])
                            num_allocations += 1
                        next_post += 1
                        num_actions += 1
                        allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
                    for i in range(wait_start[k], wait_start[k + 1]):
                        rows[num_actions, 0], rows[num_actions, 1] = WAIT, waits[i]
                        num_actions += 1
                        allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
                    for i in range(leave_start[k], leave_start[k + 1]):
                        rows[num_actions, 0], rows[num_actions, 1] = SETTLE, leave[i]
                        num_actions += 1
                        allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
                before = num_frees
                for i in range(first_freed, next_freed):
                    if freed[by_slot[i], 2] == late:
                        frees[num_frees, 0], frees[num_frees, 1] = freed[by_slot[i], 0], freed[by_slot[i], 1]
                        num_frees += 1
                if num_frees > before:
                    rows[num_actions, 0] = FREE
                    num_actions += 1
                    allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            for i in range(return_start[k], return_start[k + 1]):
                u = come_back[i]
                rows[num_actions, 0], rows[num_actions, 1], rows[num_actions, 3] = RELOAD, u, copy_ns[u]
                allocations[num_allocations] = (RETURNED, u, offloaded_bytes[u])
                num_allocations += 1
                num_actions += 1
                allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            if k == size:
                break
            stage = order[base + k]
            third, u = stage // num_units, stage % num_units
            if third == 0 and loads[u]:
                rows[num_actions, 0], rows[num_actions, 1], rows[num_actions, 3] = LOAD, u, load_ns[u]
                allocations[num_allocations] = (LOADED, u, loaded_bytes[u])
                num_allocations += 1
                num_actions += 1
                allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            assembled, returned = 0, 0
            if third == 0:
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    e = incoming[i]
                    assembled += 0 if is_whole[e] else edge_bytes[e]
                    if not is_local[e]:
                        rows[num_actions, 0], rows[num_actions, 1] = WAIT, number[e, 0]
                        num_actions += 1
                        allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            elif third == 1:
                for i in range(outgoing_start[u], outgoing_start[u + 1]):
                    e = outgoing[i]
                    if grad[e] and not is_local[e]:
                        rows[num_actions, 0], rows[num_actions, 1] = WAIT, number[e, 1]
                        num_actions += 1
                        allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
                for i in range(incoming_start[u], incoming_start[u + 1]):
                    returned += edge_bytes[incoming[i]] if grad[incoming[i]] else 0
            if third == 1 and offloads[u]:
                rows[num_actions, 0], rows[num_actions, 1] = SETTLE, u
                num_actions += 1
                allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
            workspace = backward_workspace[u]
            if third != 1:
                workspace = forward_workspace[u] if third == 0 else weight_workspace[u]
            if third == 0 and learns[u]:
                allocations[num_allocations] = (SAVED, u, saved_bytes[u] + output_bytes[u] + assembled)
                num_allocations += 1
                if offloads[u]:
                    allocations[num_allocations] = (LEAVING, u, offloaded_bytes[u])
                    num_allocations += 1
            elif third == 0:
                workspace += assembled
                if outgoing_start[u] < outgoing_start[u + 1]:
                    allocations[num_allocations] = (OUTPUT, u, output_bytes[u])
                    num_allocations += 1
            elif third == 1:
                if returned:
                    allocations[num_allocations] = (GRADIENT, u, returned)
                    num_allocations += 1
                if split[u]:
                    allocations[num_allocations] = (WEIGHT, u, weight_bytes[u])
                    num_allocations += 1
            rows[num_actions, 0], rows[num_actions, 1] = COMPUTE, u
            rows[num_actions, 2] = 0 if third == 0 else 3 if third == 2 else 2 if split[u] else 1
            rows[num_actions, 3], rows[num_actions, 4] = duration[stage], workspace
            num_actions += 1
            allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
        for i in range(ending_start[w], ending_start[w + 1]):
            rows[num_actions] = ending[i]
            num_actions += 1
            allocation_start[num_actions], free_start[num_actions] = num_allocations, num_frees
        start[w + 1] = num_actions
    return (
        start,
        rows[:num_actions],
        allocation_start[: num_actions + 1],
        allocations[:num_allocations],
        free_start[: num_actions + 1],
        frees[:num_frees],
    )


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
