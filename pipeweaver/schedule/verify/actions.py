"""Rule "actions": a worker's list run symbolically. What it uses is there, what it frees is done with."""

from __future__ import annotations

import numba
import numpy as np

from pipeweaver.model.graph import ModelGraph, positions
from pipeweaver.schedule.flat import (
    BUFFERS,
    COMPUTE,
    FREE,
    GRADIENT,
    HOST,
    LEAVING,
    LOAD,
    LOADED,
    NORM,
    OFFLOAD,
    OUTPUT,
    PHASES,
    POST,
    REDUCE,
    RELOAD,
    RETURNED,
    SAVED,
    SETTLE,
    STEP,
    WAIT,
    WEIGHT,
    FlatPlan,
    Ints,
    starts,
)
from pipeweaver.schedule.ir import ITEM_SIZES, Placement
from pipeweaver.schedule.memory import buffer_numbers
from pipeweaver.schedule.verify.action_words import (
    ALLOCATED_TWICE,
    BEFORE_LAST,
    FINE,
    FOREIGN_BUFFER,
    FREED_EARLY,
    FREED_UNSENT,
    FREED_UNUSED,
    LOADS_NOTHING,
    LOADS_OTHERS,
    NEGATIVE,
    NEVER_FREES,
    NEVER_WAITS,
    NO_COPY,
    NO_INPUT,
    NO_INPUT_HALF,
    NO_TRANSFER,
    NO_UNIT,
    NOT_HELD,
    NOT_ITS_POST,
    NOT_LOADED,
    NOT_ON_HOST,
    NOT_RECEIVED,
    NOT_RETURNED,
    NOT_SAVED,
    NOTHING_LEAVES,
    SENT_EARLY,
    UNKNOWN_BUFFER,
    WAITS_WRONGLY,
    WRONG_COPY,
    WRONG_LEAVING,
    WRONG_LOAD,
    WRONG_RECEIVE,
    WRONG_RESULT,
    found_words,
)
from pipeweaver.schedule.verify.stages import covered_of
from pipeweaver.schedule.verify.words import PlanError

STAYS, GOES, AWAY, COMES, BACK = range(5)
"""Where what a unit offloads is: on the device, on its way to the host, there, on its way back, on the device again."""


def check_actions(plan: FlatPlan, graph: ModelGraph) -> None:
    """Run each worker's list symbolically: what it needs must be there, what it frees must not be needed."""
    head, edges, transfers, actions = plan.head, plan.edges, plan.transfers, plan.actions
    units = starts([len(of) for of in head.parts])
    source = units[edges.source_chunk] + edges.source_part
    destination = units[edges.destination_chunk] + edges.destination_part
    transfer_of = np.full((len(source), 2), -1, np.int64)
    transfer_of[transfers.edge, transfers.phase] = np.arange(len(transfers.edge))
    allocated, freed, num_buffers = buffer_numbers(plan)
    needed = _loads(graph, head.placement)
    loads = np.array([[set(names) == wanted for wanted in needed] for names in plan.loads], np.bool_)
    offloads = np.array(["offload" in chosen for chosen in plan.strategies], np.bool_)
    learns = np.zeros(int(units[-1]), np.bool_)
    learns[(units[plan.order.chunk] + plan.order.part)[plan.order.phase > 0]] = True
    item_bytes = np.array([ITEM_SIZES.get(name, 0) for name in plan.names], np.int64)
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(edges.runs[:, 2])])
    row_bytes = edges.width * item_bytes[edges.dtype]
    edge_bytes = (rows[edges.run_start[1:]] - rows[edges.run_start[:-1]]) * row_bytes
    read_up_to = np.zeros(len(source), np.int64)  # one row may go to several items
    np.maximum.at(
        read_up_to, np.repeat(np.arange(len(source)), np.diff(edges.run_start)), edges.runs[:, 0] + edges.runs[:, 2]
    )
    code, worker, action, detail = _run(
        actions.start,
        actions.kind,
        actions.first,
        actions.second,
        actions.phase,
        actions.detail,
        actions.allocation_start,
        allocated,
        actions.allocation_bytes,
        actions.free_start,
        freed,
        num_buffers,
        units,
        source,
        destination,
        edges.grad,
        edge_bytes,
        read_up_to * row_bytes,
        learns,
        transfer_of,
        transfers.edge,
        transfers.phase,
        transfers.sender,
        transfers.receiver,
        transfers.num_bytes,
        *_by_unit(destination, int(units[-1])),
        *_by_unit(source, int(units[-1])),
        loads.reshape(len(plan.loads), len(needed)),
        np.array([bool(names) for names in needed], np.bool_),
        offloads,
        np.diff(plan.order.start),
    )
    if code != FINE:
        raise PlanError("actions", found_words(plan, code, worker, action, detail, needed))


def _loads(graph: ModelGraph, placement: Placement) -> list[set[str]]:
    """Names of the data that each chunk loads."""
    layers = {module.name: dict(positions(module)) for module in graph.modules}
    covered = zip(placement.chunks, covered_of(graph, placement), strict=True)
    return [{name for p in of for name in layers[chunk.module][p].loads} for chunk, of in covered]


def _by_unit(unit: Ints, size: int) -> tuple[Ints, Ints]:
    """Edges by unit: those of unit u from start[u] on."""
    return starts(np.bincount(unit, minlength=size)), np.argsort(unit, kind="stable")


@numba.njit(cache=True)
def _run(  # type: ignore[no-untyped-def]
    start,
    kind,
    first,
    second,
    phase,
    detail,
    allocation_start,
    allocated,
    allocation_bytes,
    free_start,
    freed,
    num_buffers,
    units,
    source,
    destination,
    grad,
    edge_bytes,
    read_bytes,
    learns,
    transfer_of,
    transfer_edge,
    transfer_phase,
    sender,
    receiver,
    transfer_bytes,
    incoming_start,
    incoming,
    outgoing_start,
    outgoing,
    loads,
    must_load,
    offloads,
    num_stages,
):
    """(code, worker, action, detail) of the first thing that is wrong."""
    num_units, num_kinds, num_edges = units[-1], len(BUFFERS), len(source)
    num_transfers, num_chunks = len(sender), len(units) - 1
    f, b, i_, w_ = 0, 1, 2, 3  # phases
    for w in range(len(start) - 1):
        done = np.zeros((num_units, len(PHASES)), np.bool_)
        posted, waited = np.zeros(num_transfers, np.bool_), np.zeros(num_transfers, np.bool_)
        held, gone = np.zeros(num_buffers, np.bool_), np.zeros(num_buffers, np.bool_)
        leaving, where = np.full(num_units, -1, np.int64), np.full(num_units, STAYS, np.int64)
        computed = 0
        for a in range(start[w], start[w + 1]):
            what, x = kind[a], first[a]
            for k in range(allocation_start[a], allocation_start[a + 1]):
                buffer = allocated[k]
                if buffer < 0:
                    return UNKNOWN_BUFFER, w, a, k
                if held[buffer] or gone[buffer]:
                    return ALLOCATED_TWICE, w, a, k
                if allocation_bytes[k] < 0:
                    return NEGATIVE, w, a, k
                held[buffer] = True
            if what == LOAD:
                if not 0 <= x < num_chunks or not 0 <= second[a] < units[x + 1] - units[x]:
                    return LOADS_NOTHING, w, a, 0
                if not loads[detail[a], x]:
                    return LOADS_OTHERS, w, a, 0
                k = allocation_start[a]
                if allocation_start[a + 1] - k != 1 or allocated[k] != LOADED * num_units + units[x] + second[a]:
                    return WRONG_LOAD, w, a, 0
            elif what == COMPUTE:
                u, p = units[x] + second[a], phase[a]
                if p == f:
                    if must_load[x] and not held[LOADED * num_units + u]:
                        return NOT_LOADED, w, a, 0
                    for k in range(incoming_start[u], incoming_start[u + 1]):
                        e = incoming[k]
                        t = transfer_of[e, 0]
                        if t >= 0:
                            if not waited[t] or not held[num_kinds * num_units + t]:
                                return NOT_RECEIVED, w, a, t
                        elif not done[source[e], f]:
                            return NO_INPUT, w, a, 2 * e
                    for k in range(allocation_start[a], allocation_start[a + 1]):
                        if allocated[k] == LEAVING * num_units + u:
                            leaving[u] = allocation_bytes[k]
                    if offloads[detail[a]] != (leaving[u] >= 0):
                        return WRONG_LEAVING, w, a, 0
                elif p == w_:
                    if not done[u, i_] or not held[WEIGHT * num_units + u]:
                        return NO_INPUT_HALF, w, a, 0
                else:
                    if not done[u, f] or not held[SAVED * num_units + u]:
                        return NOT_SAVED, w, a, 0
                    if leaving[u] >= 0 and (where[u] != BACK or not held[RETURNED * num_units + u]):
                        return NOT_RETURNED, w, a, 0
                    for k in range(outgoing_start[u], outgoing_start[u + 1]):
                        e = outgoing[k]
                        if grad[e]:
                            t = transfer_of[e, 1]
                            if t >= 0:
                                if not waited[t] or not held[num_kinds * num_units + t]:
                                    return NOT_RECEIVED, w, a, t
                            elif not (done[destination[e], b] or done[destination[e], i_]):
                                return NO_INPUT, w, a, 2 * e + 1
                # What it leaves behind for others, and how large that is at least.
                result, least = -1, 0
                if p == f:
                    for k in range(outgoing_start[u], outgoing_start[u + 1]):
                        result, least = OUTPUT, max(least, read_bytes[outgoing[k]])
                    if learns[u]:
                        result = SAVED
                elif p != w_:
                    for k in range(incoming_start[u], incoming_start[u + 1]):
                        if grad[incoming[k]]:
                            result, least = GRADIENT, least + edge_bytes[incoming[k]]
                has_result = result < 0 or least == 0
                for k in range(allocation_start[a], allocation_start[a + 1]):
                    of = allocated[k] // num_units
                    has_result |= of == result
                    expected = of == result or (of == LEAVING and p == f) or (of == WEIGHT and p == i_)
                    if not expected or allocated[k] % num_units != u:
                        return FOREIGN_BUFFER, w, a, k
                    if of == result and allocation_bytes[k] < least:
                        return WRONG_RESULT, w, a, least
                if not has_result:
                    return WRONG_RESULT, w, a, least
                done[u, p] = True
                computed += 1
            elif what in (OFFLOAD, RELOAD, SETTLE):
                if not 0 <= x < num_chunks or not 0 <= second[a] < units[x + 1] - units[x]:
                    return NO_UNIT, w, a, 0
                u, k = units[x] + second[a], allocation_start[a]
                if what == SETTLE:
                    if where[u] != GOES and where[u] != COMES:
                        return NO_COPY, w, a, 0
                    where[u] += 1
                    continue
                if what == OFFLOAD and (where[u] != STAYS or not held[LEAVING * num_units + u]):
                    return NOTHING_LEAVES, w, a, 0
                if what == RELOAD and (where[u] != AWAY or not held[HOST * num_units + u]):
                    return NOT_ON_HOST, w, a, 0
                made = (HOST if what == OFFLOAD else RETURNED) * num_units + u
                count = allocation_start[a + 1] - k
                if count != 1 or allocated[k] != made or allocation_bytes[k] != leaving[u]:
                    return WRONG_COPY, w, a, 0
                where[u] += 1
            elif what == POST:
                if not 0 <= x < num_transfers:
                    return NO_TRANSFER, w, a, 0
                if (sender[x] != w and receiver[x] != w) or posted[x]:
                    return NOT_ITS_POST, w, a, 0
                posted[x] = True
                count, k = allocation_start[a + 1] - allocation_start[a], allocation_start[a]
                if receiver[x] == w:
                    right = count == 1 and allocated[k] == num_kinds * num_units + x
                    if not right or allocation_bytes[k] != transfer_bytes[x]:
                        return WRONG_RECEIVE, w, a, 0
                elif count > 0:
                    return WRONG_RECEIVE, w, a, 0
                if sender[x] == w:
                    e = transfer_edge[x]
                    if transfer_phase[x] == 0:
                        produced = done[source[e], f]
                    else:
                        produced = done[destination[e], b] or done[destination[e], i_]
                    if not produced:
                        return SENT_EARLY, w, a, 2 * e + transfer_phase[x]
            elif what == WAIT:
                if not 0 <= x < num_transfers or not posted[x] or waited[x]:
                    return WAITS_WRONGLY, w, a, 0
                waited[x] = True
            elif what == FREE:
                for k in range(free_start[a], free_start[a + 1]):
                    buffer = freed[k]
                    place = k * (num_edges + 1)
                    if buffer < 0 or not held[buffer]:
                        return NOT_HELD, w, a, place
                    of, u = buffer // num_units, buffer % num_units
                    if of >= num_kinds:
                        t = buffer - num_kinds * num_units
                        e = transfer_edge[t]
                        if transfer_phase[t] == 0:
                            used = done[destination[e], f]
                        else:
                            used = done[source[e], b] or done[source[e], i_]
                        if not used:
                            return FREED_EARLY, w, a, place
                    elif of in (LOADED, WEIGHT):
                        if not done[u, f if of == LOADED else w_]:
                            return FREED_EARLY, w, a, place
                    elif of in (LEAVING, HOST):
                        if where[u] < (AWAY if of == LEAVING else BACK):
                            return FREED_EARLY, w, a, place
                    elif of == RETURNED:
                        if not (done[u, b] or done[u, i_]):
                            return FREED_EARLY, w, a, place
                    elif of == GRADIENT:
                        for j in range(incoming_start[u], incoming_start[u + 1]):
                            e = incoming[j]
                            if grad[e]:
                                t = transfer_of[e, 1]
                                if t >= 0:
                                    if not waited[t]:
                                        return FREED_UNSENT, w, a, place + e
                                elif not (done[source[e], b] or done[source[e], i_]):
                                    return FREED_UNUSED, w, a, place + e
                    else:
                        if of == SAVED and not (done[u, b] or done[u, i_]):
                            return FREED_EARLY, w, a, place
                        for j in range(outgoing_start[u], outgoing_start[u + 1]):
                            e = outgoing[j]
                            t = transfer_of[e, 0]
                            if t >= 0:
                                if not waited[t]:
                                    return FREED_UNSENT, w, a, place + e
                            elif not done[destination[e], f]:
                                return FREED_UNUSED, w, a, place + e
                    held[buffer] = False
                    gone[buffer] = True
            elif (what in (REDUCE, NORM, STEP)) and computed < num_stages[w]:
                return BEFORE_LAST, w, a, 0
        for t in range(num_transfers):
            if (sender[t] == w or receiver[t] == w) and not waited[t]:
                return NEVER_WAITS, w, 0, t
        for buffer in range(num_buffers):
            if held[buffer]:
                return NEVER_FREES, w, 0, buffer
    return FINE, 0, 0, 0
