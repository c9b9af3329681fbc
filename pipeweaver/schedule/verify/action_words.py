"""What the rule "actions" (`actions.py`) may find wrong, by number, and how it is said.

found_words(plan, NOT_LOADED, worker=0, number=3, detail=0, needed=...)   "worker 0: 0F0 runs before its data is loaded"
"""

from __future__ import annotations

import numpy as np

from pipeweaver.schedule.convert import action_of
from pipeweaver.schedule.flat import BUFFERS, OUTPUT, SAVED, WAIT, FlatPlan, starts
from pipeweaver.schedule.ir import Buffer, Stage
from pipeweaver.schedule.verify.words import buffer_name, describe

(
    FINE,
    UNKNOWN_BUFFER,
    ALLOCATED_TWICE,
    NEGATIVE,
    LOADS_NOTHING,
    LOADS_OTHERS,
    NOT_LOADED,
    NO_INPUT,
    NOT_RECEIVED,
    NO_INPUT_HALF,
    NOT_SAVED,
    FOREIGN_BUFFER,
    NO_TRANSFER,
    NOT_ITS_POST,
    WRONG_RECEIVE,
    SENT_EARLY,
    WAITS_WRONGLY,
    NOT_HELD,
    FREED_EARLY,
    FREED_UNSENT,
    FREED_UNUSED,
    BEFORE_LAST,
    NEVER_WAITS,
    NEVER_FREES,
    NO_UNIT,
    WRONG_LEAVING,
    WRONG_COPY,
    NOTHING_LEAVES,
    NOT_ON_HOST,
    NO_COPY,
    NOT_RETURNED,
    WRONG_LOAD,
    WRONG_RESULT,
) = range(33)


def found_words(plan: FlatPlan, code: int, worker: int, number: int, detail: int, needed: list[set[str]]) -> str:
    """What is wrong, in words. `detail` is a transfer, an edge or the place of a buffer among all of its kind."""
    if code == NEVER_WAITS:
        mine = np.nonzero((plan.transfers.sender == worker) | (plan.transfers.receiver == worker))[0].tolist()
        here = slice(plan.actions.start[worker], plan.actions.start[worker + 1])
        waited = set(plan.actions.first[here][plan.actions.kind[here] == WAIT].tolist())
        return f"worker {worker} does not wait for transfers {[t for t in mine if t not in waited][:5]}"
    if code == NEVER_FREES:
        return f"worker {worker} never frees {buffer_name(_buffer(plan, detail))}"
    a = plan.actions
    if code in (UNKNOWN_BUFFER, ALLOCATED_TWICE, NEGATIVE, FOREIGN_BUFFER):
        kind, first, second = a.allocation_kind[detail], a.allocation_first[detail], a.allocation_second[detail]
        buffer = buffer_name(Buffer(BUFFERS[kind], int(first), int(second)))
        size = f"{a.allocation_bytes[detail]} bytes for " if code == NEGATIVE else ""
        text = f"allocates {size}{buffer}" + (" a second time" if code == ALLOCATED_TWICE else "")
    elif code in (NOT_HELD, FREED_EARLY, FREED_UNSENT, FREED_UNUSED):
        freed, extra = divmod(detail, len(plan.edges.grad) + 1)
        kind, first, second = a.free_kind[freed], a.free_first[freed], a.free_second[freed]
        text = f"frees {buffer_name(Buffer(BUFFERS[kind], int(first), int(second)))}"
        if code == NOT_HELD:
            text += ", which is not held"
        elif code == FREED_EARLY:
            text += " before it is used"
        elif code == FREED_UNSENT:
            text += f" before a transfer of edge {extra} is sent"
        else:
            text += f" before {_user(plan, int(kind), extra)} has used it"
    else:
        wanted = sorted(needed[int(a.first[number])]) if code == LOADS_OTHERS else []
        producer = _producer(plan, detail) if code in (NO_INPUT, SENT_EARLY) else None
        text = {
            LOADS_NOTHING: "is for a chunk or part that does not exist",
            WRONG_LOAD: "must allocate exactly what it loads",
            LOADS_OTHERS: f"should load {wanted}",
            NOT_LOADED: "runs before its data is loaded",
            NO_INPUT: f"runs before {producer}, which it depends on",
            NOT_RECEIVED: f"runs before transfer {detail} is waited for, or after it is freed",
            NO_INPUT_HALF: "runs before I, or after what it needs is freed",
            NOT_SAVED: "runs before its forward, or after what it saved is freed",
            NO_TRANSFER: "is for a transfer that does not exist",
            NOT_ITS_POST: "is not this worker's, or is posted twice",
            WRONG_RECEIVE: "must allocate exactly the tensor that it receives",
            SENT_EARLY: f"sends what {producer} has not produced yet",
            WAITS_WRONGLY: "waits for a transfer that it has not posted, or has already waited for",
            BEFORE_LAST: "comes before the last stage",
            NO_UNIT: "is for a chunk or part that does not exist",
            WRONG_LEAVING: "must have something leaving if, and only if, a layer is offloaded",
            WRONG_COPY: "must allocate exactly what it copies",
            NOTHING_LEAVES: "copies what is not there to be copied",
            NOT_ON_HOST: "brings back what is not on the host",
            NO_COPY: "waits for a copy that has not begun",
            NOT_RETURNED: "runs before what was offloaded is back, or after it is freed",
            WRONG_RESULT: f"must allocate what it leaves behind for others, {detail:,} bytes or more",
        }[code]
    return f"worker {worker}: {describe(action_of(plan, number))} {text}"


def _buffer(plan: FlatPlan, number: int) -> Buffer:
    units = starts([len(of) for of in plan.head.parts])
    kind, unit = divmod(number, int(units[-1]))
    if kind >= len(BUFFERS):
        return Buffer("received", number - len(BUFFERS) * int(units[-1]))
    chunk = int(np.searchsorted(units, unit, side="right")) - 1
    return Buffer(BUFFERS[kind], chunk, unit - int(units[chunk]))


def _producer(plan: FlatPlan, edge_and_phase: int) -> Stage:
    """The stage that produces an edge's tensor (even numbers: 2 * edge) or its gradient (odd ones)."""
    edge, backward = divmod(edge_and_phase, 2)
    edges = plan.edges
    if backward:
        return Stage(int(edges.destination_chunk[edge]), int(edges.destination_part[edge]), "B")
    return Stage(int(edges.source_chunk[edge]), int(edges.source_part[edge]), "F")


def _user(plan: FlatPlan, kind: int, edge: int) -> Stage:
    """The stage that takes what is in a buffer, along an edge."""
    edges = plan.edges
    if kind in (SAVED, OUTPUT):
        return Stage(int(edges.destination_chunk[edge]), int(edges.destination_part[edge]), "F")
    return Stage(int(edges.source_chunk[edge]), int(edges.source_part[edge]), "B")
