"""Plans as bytes: what planner processes send to the first worker, and the first worker to all.

    unpack(pack(plans))      equal plans: heads in MessagePack, every array in the narrowest integers that hold it

The records of a plan with thousands of stages take longer to make and to read than the plan took to find: they are made
of its arrays where they are read, and nowhere on the way. What comes from another process may be anything, and compiled
code does not look where it reads: `unpack` gives nothing but what `flatten` could have made of records. Whether that is
a plan for a batch is for the verifier to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Literal

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
)
from pipeweaver.schedule.ir import Part, Plan, Strategy


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """Integers of so many bytes each, little-endian."""

    width: Literal[1, 2, 4, 8]
    content: bytes


class _Times(msgspec.Struct, frozen=True, array_like=True):
    """A prediction without its arrays."""

    makespan_ns: int
    step_ns: int
    peak_bytes: tuple[int, ...]
    useful_ns: int
    lower_bound_ns: int


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A flat plan. Chunks of a module have the same parts, which are here once: chunk c has `parts[parts_of[c]]`.

    `arrays` are those of order, edges, transfers, actions and, with `times`, of the prediction.
    """

    head: Plan
    parts: tuple[tuple[Part, ...], ...]
    parts_of: tuple[int, ...]
    names: tuple[str, ...]
    loads: tuple[tuple[str, ...], ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    arrays: tuple[_Array, ...]
    times: _Times | None


def pack(plans: Sequence[FlatPlan]) -> bytes:
    """The plans as bytes; without loss."""
    return msgspec.msgpack.encode([_pack(plan) for plan in plans])


def unpack(content: bytes) -> tuple[FlatPlan, ...]:
    """The plans of these bytes. Raises ValueError, saying what is wrong, if they are not what `pack` makes of plans."""
    try:
        packed = msgspec.msgpack.decode(content, type=tuple[_Packed, ...])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not plans: {error}") from None
    return tuple(map(_unpack, packed))


def _pack(plan: FlatPlan) -> _Packed:
    distinct: dict[int, int] = {}  # by identity, which is what chunks of a module share
    parts_of = tuple(distinct.setdefault(id(parts), len(distinct)) for parts in plan.head.parts)
    parts = dict(zip(parts_of, plan.head.parts, strict=True))
    found = plan.prediction
    timeline = () if found is None else (found.start_ns, found.end_ns, found.moved_ns, found.arrived_ns)
    return _Packed(
        head=msgspec.structs.replace(plan.head, parts=()),
        parts=tuple(parts[number] for number in range(len(distinct))),
        parts_of=parts_of,
        names=plan.names,
        loads=plan.loads,
        strategies=plan.strategies,
        arrays=tuple(map(_array, chain(plan.order, plan.edges, plan.transfers, plan.actions, timeline))),
        times=None
        if found is None
        else _Times(
            makespan_ns=found.makespan_ns,
            step_ns=found.step_ns,
            peak_bytes=found.peak_bytes,
            useful_ns=found.useful_ns,
            lower_bound_ns=found.lower_bound_ns,
        ),
    )


def _unpack(packed: _Packed) -> FlatPlan:
    head, times = packed.head, packed.times
    if head.parts or head.order or head.edges or head.transfers or head.actions or head.prediction is not None:
        raise ValueError("not plans: what is kept beside the head is in it as well")
    if not all(0 <= number < len(packed.parts) for number in packed.parts_of):
        raise ValueError(f"not plans: chunks of parts {packed.parts_of}, but there are {len(packed.parts)}")
    wanted = sum(_NUM_ARRAYS) + (0 if times is None else _NUM_PREDICTED)
    if len(packed.arrays) != wanted:
        raise ValueError(f"not plans: {len(packed.arrays)} arrays, not {wanted}")
    arrays = iter(list(map(_values, packed.arrays)))
    order, edges, transfers, actions = ([*islice(arrays, count)] for count in _NUM_ARRAYS)
    plan = FlatPlan(
        head=msgspec.structs.replace(head, parts=tuple(packed.parts[number] for number in packed.parts_of)),
        names=packed.names,
        loads=packed.loads,
        strategies=packed.strategies,
        order=FlatStages(*order),
        edges=FlatEdges._make([*edges[:-1], _triples(edges[-1])]),
        transfers=FlatTransfers(*transfers),
        actions=FlatActions(*actions),
        prediction=None if times is None else FlatPrediction._make([*arrays, *msgspec.structs.astuple(times)]),
    )
    _check_order(plan)
    _check_edges(plan)
    _check_transfers(plan)
    _check_actions(plan)
    _check_prediction(plan)
    return plan


_NUM_ARRAYS = tuple(len(group._fields) for group in (FlatStages, FlatEdges, FlatTransfers, FlatActions))
_NUM_PREDICTED = 4


def _array(values: Ints) -> _Array:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    width = next(width for width in _WIDTHS if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
    return _Array(width, values.astype(f"<i{width}").tobytes())


_WIDTHS: tuple[Literal[1, 2, 4, 8], ...] = (1, 2, 4, 8)


def _values(array: _Array) -> Ints:
    """Own memory, that can be written to: compiled code is compiled for that."""
    if len(array.content) % array.width:
        raise ValueError(f"not plans: {len(array.content)} bytes for integers of {array.width}")
    return np.frombuffer(array.content, f"<i{array.width}").astype(np.int64)


def _triples(values: Ints) -> Ints:
    if len(values) % 3:
        raise ValueError(f"not plans: {len(values)} integers for runs of three")
    return values.reshape(-1, 3)


def _check_order(plan: FlatPlan) -> None:
    workers, order = plan.head.placement.workers, plan.order
    _check_lengths("stages", order[1:])
    _check_starts("stages", order.start, workers, len(order.chunk))
    _check_range("phase", order.phase, len(PHASES))
    if len(plan.head.static_bytes) != workers:
        raise ValueError(f"not plans: memory of {len(plan.head.static_bytes)} workers, not {workers}")


def _check_edges(plan: FlatPlan) -> None:
    edges = plan.edges
    _check_lengths("edges", edges[:9])
    _check_starts("runs", edges.run_start, len(edges.grad), len(edges.runs))
    for names in (edges.output, edges.input, edges.dtype):
        _check_range("name", names, len(plan.names))
    _check_range("gradient", edges.grad, 2)


def _check_transfers(plan: FlatPlan) -> None:
    _check_lengths("transfers", plan.transfers)
    _check_range("direction", plan.transfers.phase, 2)
    _check_range("name", plan.transfers.dtype, len(plan.names))


def _check_actions(plan: FlatPlan) -> None:
    actions = plan.actions
    columns = actions[1:8]
    _check_lengths("actions", columns)
    _check_starts("actions", actions.start, plan.head.placement.workers, len(actions.kind))
    allocated, freed = actions[9:13], actions[14:]
    _check_lengths("allocations", allocated)
    _check_lengths("freed buffers", freed)
    _check_starts("allocations", actions.allocation_start, len(actions.kind), len(allocated[0]))
    _check_starts("freed buffers", actions.free_start, len(actions.kind), len(freed[0]))
    _check_range("action", actions.kind, len(_HAS))
    _check_range("buffer", actions.allocation_kind, len(BUFFERS))
    _check_range("buffer", actions.free_kind, len(BUFFERS))
    _check_range("phase", actions.phase, len(PHASES))
    _check_range("load", actions.detail[actions.kind == LOAD], len(plan.loads))
    _check_range("strategy", actions.detail[actions.kind == COMPUTE], len(plan.strategies))
    # What a kind of action has not is in no record of it, and would be lost.
    for name, values in zip(
        _FIELDS, (*columns[1:], np.diff(actions.allocation_start), np.diff(actions.free_start)), strict=True
    ):
        has = np.array([name in fields for fields in _HAS.values()], np.bool_)
        for a in np.nonzero((values != 0) & ~has[actions.kind])[0][:1].tolist():
            raise ValueError(f"not plans: action {a} of kind {actions.kind[a]} has {name} {values[a]}")


_FIELDS = ("first", "second", "phase", "detail", "duration_ns", "workspace_bytes", "allocations", "frees")
_HAS = {
    LOAD: ("first", "second", "detail", "duration_ns", "allocations"),
    COMPUTE: ("first", "second", "phase", "detail", "duration_ns", "workspace_bytes", "allocations"),
    POST: ("first", "duration_ns", "allocations"),
    WAIT: ("first",),
    FREE: ("frees",),
    REDUCE: ("first", "duration_ns"),
    NORM: ("duration_ns",),
    STEP: ("duration_ns",),
    OFFLOAD: ("first", "second", "duration_ns", "allocations"),
    RELOAD: ("first", "second", "duration_ns", "allocations"),
    SETTLE: ("first", "second"),
}
"""What the kinds of actions have, in the order of their numbers (`flat.py`)."""


def _check_prediction(plan: FlatPlan) -> None:
    found = plan.prediction
    if found is None:
        return
    wanted = (len(plan.actions.kind),) * 2 + (len(plan.transfers.edge),) * 2
    got = tuple(map(len, (found.start_ns, found.end_ns, found.moved_ns, found.arrived_ns)))
    if got != wanted:
        raise ValueError(f"not plans: {got} times are predicted of actions and transfers, not {wanted}")


def _check_lengths(name: str, columns: Sequence[Ints]) -> None:
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise ValueError(f"not plans: {name} have columns of {sorted(lengths)}")


def _check_starts(name: str, start: Ints, count: int, stop: int) -> None:
    """`start` cuts what there is `stop` of into `count` pieces."""
    # Compared, not subtracted: differences of what anybody may send can overflow.
    fits = count >= 0 and len(start) == count + 1 and start[0] == 0 and start[-1] == stop
    if not fits or (start[1:] < start[:-1]).any():
        raise ValueError(f"not plans: {stop} {name} are not cut into {count} lists")


def _check_range(name: str, values: Ints, stop: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < stop):
        raise ValueError(f"not plans: {name} {values.min()} to {values.max()} of {stop}")
