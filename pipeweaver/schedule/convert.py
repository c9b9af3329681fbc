"""A plan from records to flat arrays and back.

Nothing is lost in either direction:

    records(flatten(plan)) == plan
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np

from pipeweaver.schedule.flat import (
    BUFFERS,
    COMPUTE,
    FREE,
    LOAD,
    NORM,
    OFFLOAD,
    PHASES,
    POST,
    REDUCE,
    RELOAD,
    SETTLE,
    STEP,
    WAIT,
    FlatActions,
    FlatEdges,
    FlatPlan,
    FlatPrediction,
    FlatStages,
    FlatTransfers,
    Ints,
    starts,
)
from pipeweaver.schedule.ir import (
    Action,
    Allocation,
    Buffer,
    Compute,
    Edge,
    Free,
    Load,
    Norm,
    Offload,
    Plan,
    Post,
    Prediction,
    Reduce,
    Reload,
    Rows,
    Settle,
    Span,
    Stage,
    Step,
    Strategy,
    Transfer,
    Wait,
)

Value = TypeVar("Value", bound=Hashable)


def flatten(plan: Plan) -> FlatPlan:
    """A plan's arrays. Nothing is checked beyond what the records' types say."""
    names, loads, strategies = _Table[str](), _Table[tuple[str, ...]](), _Table[tuple[Strategy, ...]]()
    edges = [
        (*e.source, *e.destination, names[e.output], names[e.input], names[e.dtype], e.width, int(e.grad))
        for e in plan.edges
    ]
    transfers = [
        (
            t.edge,
            int(t.phase == "B"),
            t.sender,
            t.receiver,
            *t.shape,
            names[t.dtype],
            t.num_bytes,
            t.duration_ns,
        )
        for t in plan.transfers
    ]
    stages = [(s.chunk, s.part, _PHASE[s.phase]) for order in plan.order for s in order]
    rows: list[tuple[int, ...]] = []
    allocations: list[tuple[int, ...]] = []
    frees: list[tuple[int, ...]] = []
    num_allocated: list[int] = []
    num_freed: list[int] = []
    for actions in plan.actions:
        for action in actions:
            allocated: tuple[Allocation, ...] = ()
            freed: tuple[Buffer, ...] = ()
            match action:
                case Post():
                    row = (POST, action.transfer, 0, 0, 0, action.duration_ns, 0)
                    allocated = action.allocations
                case Wait():
                    row = (WAIT, action.transfer, 0, 0, 0, 0, 0)
                case Compute():
                    s = action.stage
                    strategy = strategies[action.strategies]
                    row = (
                        COMPUTE,
                        s.chunk,
                        s.part,
                        _PHASE[s.phase],
                        strategy,
                        action.duration_ns,
                        action.workspace_bytes,
                    )
                    allocated = action.allocations
                case Free():
                    row = (FREE, 0, 0, 0, 0, 0, 0)
                    freed = action.buffers
                case Load():
                    row = (LOAD, action.chunk, action.part, 0, loads[action.names], action.duration_ns, 0)
                    allocated = action.allocations
                case Offload() | Reload():
                    kind = OFFLOAD if isinstance(action, Offload) else RELOAD
                    row = (kind, action.chunk, action.part, 0, 0, action.duration_ns, 0)
                    allocated = action.allocations
                case Settle():
                    row = (SETTLE, action.chunk, action.part, 0, 0, 0, 0)
                case Reduce():
                    row = (REDUCE, action.group, 0, 0, 0, action.duration_ns, 0)
                case Norm():
                    row = (NORM, 0, 0, 0, 0, action.duration_ns, 0)
                case Step():
                    row = (STEP, 0, 0, 0, 0, action.duration_ns, 0)
            rows.append(row)
            if allocated:
                allocations += [(_BUFFER_KIND[b.kind], b.first, b.second, num_bytes) for b, num_bytes in allocated]
            if freed:
                frees += [(_BUFFER_KIND[b.kind], b.first, b.second) for b in freed]
            num_allocated.append(len(allocated))
            num_freed.append(len(freed))
    return FlatPlan(
        head=headless(plan),
        names=names.values,
        loads=loads.values,
        strategies=strategies.values,
        order=FlatStages(starts([len(order) for order in plan.order]), *_columns(stages, 3)),
        edges=FlatEdges._make(
            (
                *_columns(edges, 9),
                starts([len(e.rows) for e in plan.edges]),
                np.array([run for e in plan.edges for run in e.rows], np.int64).reshape(-1, 3),
            )
        ),
        transfers=FlatTransfers(*_columns(transfers, 9)),
        actions=FlatActions._make(
            (
                starts([len(actions) for actions in plan.actions]),
                *_columns(rows, 7),
                starts(num_allocated),
                *_columns(allocations, 4),
                starts(num_freed),
                *_columns(frees, 3),
            )
        ),
        prediction=_flat_prediction(plan.prediction),
    )


def records(flat: FlatPlan) -> Plan:
    """The plan of these arrays."""
    edges = []
    runs = [Rows(*run) for run in flat.edges.runs.tolist()]
    for sc, sp, dc, dp, output, name, dtype, width, grad, first, stop in _rows(
        *flat.edges[:9], flat.edges.run_start[:-1], flat.edges.run_start[1:]
    ):
        edges.append(
            Edge(
                source=(sc, sp),
                destination=(dc, dp),
                output=flat.names[output],
                input=flat.names[name],
                dtype=flat.names[dtype],
                width=width,
                rows=tuple(runs[first:stop]),
                grad=bool(grad),
            )
        )
    phases: tuple[Literal["F"], Literal["B"]] = ("F", "B")
    transfers = tuple(
        Transfer(
            edge=edge,
            phase=phases[phase],
            sender=sender,
            receiver=receiver,
            shape=(length, width),
            dtype=flat.names[dtype],
            num_bytes=num_bytes,
            duration_ns=duration,
        )
        for edge, phase, sender, receiver, length, width, dtype, num_bytes, duration in _rows(*flat.transfers)
    )
    stages = [Stage(c, p, PHASES[phase]) for c, p, phase in _rows(*flat.order[1:])]
    actions = _actions(flat, range(len(flat.actions.kind)))
    return msgspec.structs.replace(
        flat.head,
        edges=tuple(edges),
        transfers=transfers,
        order=_split(stages, flat.order.start),
        actions=_split(actions, flat.actions.start),
        prediction=_prediction(flat),
    )


def action_of(flat: FlatPlan, number: int) -> Action:
    """One action as a record, for messages."""
    return _actions(flat, range(number, number + 1))[0]


def headless(plan: Plan) -> Plan:
    """A plan without what is kept as arrays."""
    return msgspec.structs.replace(plan, edges=(), transfers=(), order=(), actions=(), prediction=None)


_PHASE = {name: number for number, name in enumerate(PHASES)}
_BUFFER_KIND = {name: number for number, name in enumerate(BUFFERS)}


def _actions(flat: FlatPlan, numbers: range) -> list[Action]:
    """Actions `numbers` as records."""
    a = flat.actions
    here = slice(numbers.start, numbers.stop)
    first_allocation = int(a.allocation_start[numbers.start])
    first_free = int(a.free_start[numbers.start])
    allocated = slice(first_allocation, int(a.allocation_start[numbers.stop]))
    freed = slice(first_free, int(a.free_start[numbers.stop]))
    allocations = [
        Allocation(Buffer(BUFFERS[kind], first, second), num_bytes)
        for kind, first, second, num_bytes in _rows(
            a.allocation_kind[allocated],
            a.allocation_first[allocated],
            a.allocation_second[allocated],
            a.allocation_bytes[allocated],
        )
    ]
    buffers = [
        Buffer(BUFFERS[kind], first, second)
        for kind, first, second in _rows(a.free_kind[freed], a.free_first[freed], a.free_second[freed])
    ]
    columns = _rows(
        a.kind[here],
        a.first[here],
        a.second[here],
        a.phase[here],
        a.detail[here],
        a.duration_ns[here],
        a.workspace_bytes[here],
        np.diff(a.allocation_start[numbers.start : numbers.stop + 1]),
        np.diff(a.free_start[numbers.start : numbers.stop + 1]),
    )
    result: list[Action] = []
    next_allocation, next_free = 0, 0
    for kind, first, second, phase, detail, duration, workspace, num_allocations, num_frees in columns:
        mine: tuple[Allocation, ...] = ()
        if num_allocations:
            mine = tuple(allocations[next_allocation : next_allocation + num_allocations])
            next_allocation += num_allocations
        if kind == COMPUTE:
            result.append(
                Compute(
                    stage=Stage(first, second, PHASES[phase]),
                    strategies=flat.strategies[detail],
                    allocations=mine,
                    workspace_bytes=workspace,
                    duration_ns=duration,
                )
            )
        elif kind == POST:
            result.append(Post(transfer=first, allocations=mine, duration_ns=duration))
        elif kind == WAIT:
            result.append(Wait(transfer=first))
        elif kind == FREE:
            result.append(Free(buffers=tuple(buffers[next_free : next_free + num_frees])))
            next_free += num_frees
        elif kind == LOAD:
            result.append(
                Load(chunk=first, part=second, names=flat.loads[detail], allocations=mine, duration_ns=duration)
            )
        elif kind == OFFLOAD:
            result.append(Offload(chunk=first, part=second, allocations=mine, duration_ns=duration))
        elif kind == RELOAD:
            result.append(Reload(chunk=first, part=second, allocations=mine, duration_ns=duration))
        elif kind == SETTLE:
            result.append(Settle(chunk=first, part=second))
        elif kind == REDUCE:
            result.append(Reduce(group=first, duration_ns=duration))
        elif kind == NORM:
            result.append(Norm(duration_ns=duration))
        else:
            result.append(Step(duration_ns=duration))
    return result


def _prediction(flat: FlatPlan) -> Prediction | None:
    found = flat.prediction
    if found is None:
        return None
    spans = [Span(begin, end) for begin, end in _rows(found.start_ns, found.end_ns)]
    return Prediction(
        spans=_split(spans, flat.actions.start),
        transfers=tuple(Span(begin, end) for begin, end in _rows(found.moved_ns, found.arrived_ns)),
        makespan_ns=found.makespan_ns,
        step_ns=found.step_ns,
        peak_bytes=found.peak_bytes,
        useful_ns=found.useful_ns,
        lower_bound_ns=found.lower_bound_ns,
    )


def _flat_prediction(found: Prediction | None) -> FlatPrediction | None:
    if found is None:
        return None
    start, end = _columns([span for spans in found.spans for span in spans], 2)
    moved, arrived = _columns(found.transfers, 2)
    return FlatPrediction(
        start_ns=start,
        end_ns=end,
        moved_ns=moved,
        arrived_ns=arrived,
        makespan_ns=found.makespan_ns,
        step_ns=found.step_ns,
        peak_bytes=found.peak_bytes,
        useful_ns=found.useful_ns,
        lower_bound_ns=found.lower_bound_ns,
    )


class _Table(Generic[Value]):
    """Numbers for distinct values, in the order in which they first occur."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}

    def __getitem__(self, value: Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(self._numbers)


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> tuple[Ints, ...]:
    values = np.fromiter(chain.from_iterable(rows), np.int64, width * len(rows))
    return tuple(np.ascontiguousarray(column) for column in values.reshape(-1, width).T)


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _split(values: Sequence[Value], start: Ints) -> tuple[tuple[Value, ...], ...]:
    return tuple(tuple(values[a:b]) for a, b in pairwise(start.tolist()))
