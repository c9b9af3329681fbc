"""What a layer costs on a machine: latency of every operator, exchanges of a tensor-parallel group, memory.

Latency of an operator is the largest of three terms (PipeWeaver section 4), never below the floor of a kernel:

    compute   FLOPs / (peak * factor by kind and size)
    memory    access + bytes / (bandwidth * factor)
    network   for what a tensor-parallel group exchanges, see `machine.collective_ns`

`Layout` says over how many devices a worker spreads each layer. With sequence parallelism a column-parallel matmul
gathers its input and a row-parallel one scatters its output, without it outputs are summed on every device;
either way gradients take the mirrored path (`sharding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.semu.counts import (
    BATCH,
    BYTES_ROWS,
    BYTES_SPLIT,
    BYTES_WHOLE,
    COLUMNS,
    COUNT,
    COUNTED_FLOPS,
    GATHERED,
    LIVE_ROWS,
    LIVE_SPLIT,
    LIVE_WHOLE,
    SAVED,
    SHARED,
    WEIGHT,
    Counts,
    Exchanged,
    K,
    M,
    N,
    Operator,
    Structure,
    unpack,
)
from pipeweaver.semu.factors import attention_share, curve_share, flat_factors, matmul_share, memory_curve
from pipeweaver.semu.machine import Group, Machine, Ring, ring, ring_ns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A worker of `tensor_parallel` devices, all on one island unless there are more than an island has."""

    tensor_parallel: int = 1
    sequence_parallel: bool = True
    dtype: str = "bfloat16"

    @property
    def row_cut(self) -> int:
        """Over how many devices a tensor cut by rows is spread."""
        return self.tensor_parallel if self.sequence_parallel else 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of an operator on one device: what a user's rule gets to see. Bytes are read plus written."""

    flops: float
    num_bytes: float
    shape: tuple[float, float, float, float]


Rule = Callable[[Operator, Launch], float | None]
"""A user's rule: nanoseconds of one launch, or None to leave it to the machine."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer on one device of its worker. Times in ns (float), memory in bytes.

    `operator_ns` [operators] and `exchange_ns` [exchanges] are in the order of the counts, `phase_ns` sums them
    by phase F, I and W, `phase_flops` the FLOPs of all devices of the worker. `guessed_ns` is the part of the time that rests on no measurement of this machine,
    `num_guessed` counts its launches; `launches` are those of the forward. `saved_bytes`, `weight_bytes` and `shared_bytes` as in
    `Counts.memory`. `forward_live` and
    `backward_live` are peaks of what the layer holds while it runs, parameters and inputs aside.
    """

    counts: Counts
    operator_ns: Floats
    exchange_ns: Floats
    phase_ns: dict[str, float]
    phase_flops: dict[str, float]
    guessed_ns: float
    num_guessed: int
    launches: int
    saved_bytes: int
    weight_bytes: int
    shared_bytes: int
    forward_live: int
    backward_live: int


NUM_GUESSED, LAUNCHES, SAVED_BYTES, WEIGHT_BYTES, SHARED_BYTES, FORWARD_LIVE, BACKWARD_LIVE = range(7)
"""Columns of `LayerCosts.numbers`."""
_NUMBERS = (
    "num_guessed",
    "launches",
    "saved_bytes",
    "weight_bytes",
    "shared_bytes",
    "forward_live",
    "backward_live",
)


class LayerCosts(NamedTuple):
    """The same of P parts with one structure: `values` [P, numbers] as packed, all others as in `LayerCost` with P rows;
    phases are columns F, I, W, and so are `NUM_GUESSED`, `LAUNCHES`… of `numbers`."""

    structure: Structure
    values: Floats
    operator_ns: Floats
    exchange_ns: Floats
    phase_ns: Floats
    phase_flops: Floats
    guessed_ns: Floats
    numbers: Ints

    def one(self, part: int) -> LayerCost:
        """The cost of one of the parts."""
        return LayerCost(
            counts=unpack(self.structure, self.values[part]),
            phase_ns=dict(zip("FIW", self.phase_ns[part].tolist(), strict=True)),
            phase_flops=dict(zip("FIW", self.phase_flops[part].tolist(), strict=True)),
            operator_ns=self.operator_ns[part],
            exchange_ns=self.exchange_ns[part],
            guessed_ns=float(self.guessed_ns[part].sum()),
            **dict(zip(_NUMBERS, self.numbers[part].tolist(), strict=True)),
        )


def gathered(rows: Sequence[tuple[LayerCosts, int]]) -> LayerCosts:
    """Costs of parts with one structure that were costed apart."""
    first = rows[0][0]
    if len(first.values) == len(rows) and all(of is first and i == row for i, (of, row) in enumerate(rows)):
        return first
    columns = [np.stack([getattr(of, name)[row] for of, row in rows]) for name in LayerCosts._fields[1:]]
    return LayerCosts(first.structure, *columns)


def layer_cost(counts: Counts, machine: Machine, layout: Layout) -> LayerCost:
    """Cost of a layer on one device of a worker laid out so.

    Raises ValueError if the machine has no peak for the layout's dtype.
    """
    parts = (counts.table, counts.exchanged_bytes, counts.memory, counts.tensor_sizes)
    values = np.concatenate([part.reshape(-1) for part in parts])
    return layer_costs(counts.structure, values[None], machine, layout).one(0)


def layer_costs(
    structure: Structure, values: Floats, machine: Machine, layout: Layout, rules: tuple[Rule, ...] = ()
) -> LayerCosts:
    """The same on many parts, `values` [P, numbers] as packed: each costs what it would alone, bit for bit."""
    plan = _plan(structure, machine, layout)
    degree, row_cut = layout.tensor_parallel, layout.row_cut
    operator_ns, live = _operators(values, flat_factors(machine), plan.numbers, degree, row_cut)
    guessed = np.broadcast_to(plan.guessed, operator_ns.shape)
    if rules:
        guessed = guessed.copy()
        for part, numbers in enumerate(values):
            counts = unpack(structure, numbers)
            operator_ns[part], guessed[part] = _ruled(counts, layout, plan, operator_ns[part], rules)
    return LayerCosts(
        structure,
        values,
        operator_ns,
        *_sums(
            values,
            plan.numbers.phase,
            operator_ns,
            live,
            guessed,
            plan.exchanges,
            bool(machine.calibrated),
            degree,
            row_cut,
        ),
    )


@numba.njit(cache=True)
def add_covered(covered, phase_ns, guessed_ns, numbers):  # type: ignore[no-untyped-def]
    """Add to `covered` [3] the time of all parts, what of it is guessed, and the launches that are."""
    for p in range(len(numbers)):
        for k in range(3):
            covered[0] += phase_ns[p, k]
            covered[1] += guessed_ns[p, k]
        covered[2] += numbers[p, NUM_GUESSED]


def _exchange(machine: Machine, layout: Layout, exchange: Exchanged) -> tuple[int, Ring]:
    """How often in a row a group of the layout runs a collective for one exchange (0: it does not need it), and which."""
    degree, kind, phase = layout.tensor_parallel, exchange.kind, exchange.phase
    if degree == 1:
        return 0, Ring(1, 1, 0.0, 1.0)
    group = Group(size=degree, per_island=min(degree, machine.devices_per_island))
    if kind == "loss":
        # Largest logit, sum of exponentials and the target's logit, one after the other.
        return 3, ring(machine, "all_reduce", group)
    if layout.sequence_parallel:
        gathers = (kind == "enter") == (phase != "I")
        return 1, ring(machine, "all_gather" if gathers else "reduce_scatter", group)
    needed = (kind, phase) in (("leave", "F"), ("enter", "I"))
    return int(needed), ring(machine, "all_reduce", group)


class _Numbers(NamedTuple):
    """All of a layer's cost that does not change with its sizes, as arrays over its operators.

    `divisor`: over how many devices FLOPs are spread; `shape_divisor` [operators, 4] likewise for each dimension.
    `kind` is 0 for memory, 1 for matmul, 2 for attention; `phase` 0 for F, 1 for I, 2 for W, `work` the phase that an
    operator works like. `curve` is the number of its curve over bytes, or -1. `launch_ns` is what each launch costs
    beside its kernel. Times in ns, rates per ns.
    """

    divisor: Floats
    shape_divisor: Floats
    kind: Ints
    phase: Ints
    work: Ints
    bytes_per_ns: Floats
    curve: Ints
    launch_ns: Floats
    access_ns: float
    floor_ns: float
    flops_per_ns: float
    bandwidth_per_ns: float


class _Exchanges(NamedTuple):
    """What a tensor-parallel group exchanges, as arrays: `calls` in a row of a ring with these numbers, and the phase."""

    calls: Ints
    ring: Ring
    phase: Ints


class _Plan(NamedTuple):
    numbers: _Numbers
    exchanges: _Exchanges
    guessed: NDArray[np.bool_]


@lru_cache(maxsize=4096)
def _plan(structure: Structure, machine: Machine, layout: Layout) -> _Plan:
    operators = structure.operators
    shape_divisor = np.ones((len(operators), 4))
    for row, operator in enumerate(operators):
        dimension = _DIMENSION[operator.divided]
        if dimension is not None:
            shape_divisor[row, dimension] = layout.tensor_parallel
    memory, overheads = machine.memory, machine.overheads
    shares = np.array([memory.factors.get(operator.name, memory.factor) for operator in operators])
    kind = np.array([("memory", "matmul", "attention").index(operator.kind) for operator in operators], np.int64)
    curve = memory_curve(machine, [operator.name for operator in operators])
    work = ["F" if operator.again else operator.phase for operator in operators]
    launch = {"F": overheads.forward_ns, "I": overheads.backward_ns, "W": overheads.backward_ns}
    unknown = (kind == 0) & (curve < 0) if memory.curves else np.zeros(len(operators), np.bool_)
    numbers = _Numbers(
        divisor=shape_divisor.prod(axis=1),
        shape_divisor=shape_divisor,
        kind=kind,
        phase=np.array(["FIW".index(operator.phase) for operator in operators], np.int64),
        work=np.array(["FIW".index(phase) for phase in work], np.int64),
        bytes_per_ns=machine.memory_bandwidth * shares / 1e9,
        curve=curve,
        launch_ns=np.array([launch[phase] for phase in work], np.float64),
        access_ns=memory.access_ns,
        floor_ns=machine.floor_ns,
        flops_per_ns=machine.peak(layout.dtype) / 1e9,
        bandwidth_per_ns=machine.memory_bandwidth / 1e9,
    )
    found = [_exchange(machine, layout, exchange) for exchange in structure.exchanges]
    rings = np.array([of for _, of in found], np.float64).reshape(-1, len(Ring._fields))
    return _Plan(
        numbers=numbers,
        exchanges=_Exchanges(
            calls=np.array([calls for calls, _ in found], np.int64),
            ring=Ring(*rings.T.copy()),  # type: ignore[arg-type]
            phase=np.array(["FIW".index(exchange.phase) for exchange in structure.exchanges], np.int64),
        ),
        guessed=unknown if machine.calibrated else np.ones(len(operators), np.bool_),
    )


@numba.njit(cache=True)
def _operators(values, factors, plan, degree, row_cut):  # type: ignore[no-untyped-def]
    """(time of all launches in ns, bytes held meanwhile) [parts, operators] on one device."""
    num_parts, size = len(values), len(plan.kind)
    found, live = np.zeros((num_parts, size)), np.zeros((num_parts, size))
    for p, i in np.ndindex(num_parts, size):
        row = values[p, i * COLUMNS : (i + 1) * COLUMNS]
        live[p, i] = row[LIVE_WHOLE] + row[LIVE_SPLIT] / degree + row[LIVE_ROWS] / row_cut
        if row_cut > 1:
            live[p, i] += row[GATHERED]
        count = row[COUNT]
        if count == 0:
            continue
        num_bytes = (row[BYTES_WHOLE] + row[BYTES_SPLIT] / degree + row[BYTES_ROWS] / row_cut) / count
        flops = row[COUNTED_FLOPS] / (plan.divisor[i] * count)
        if plan.curve[i] >= 0 and num_bytes > 0:
            start, stop = factors.memory_start[plan.curve[i]], factors.memory_start[plan.curve[i] + 1]
            each = num_bytes / (plan.bandwidth_per_ns * curve_share(factors, start, stop, num_bytes))
        else:
            each = plan.access_ns + num_bytes / plan.bytes_per_ns[i]
        if plan.kind[i] == 1:
            m, k, n = row[M] / count, row[K] / count, row[N] / count
            cut = plan.shape_divisor[i]
            share = matmul_share(factors, plan.work[i], m / cut[1], k / cut[2], n / cut[3])
            each = max(each, flops / (plan.flops_per_ns * share))
        elif plan.kind[i] == 2 and flops > 0:
            share = attention_share(factors, min(plan.work[i], 1), flops)
            each = max(each, flops / (plan.flops_per_ns * share))
        found[p, i] = count * (max(each, plan.floor_ns) + plan.launch_ns[i])
    return found, live


@numba.njit(cache=True)
def _sums(values, phase, operator_ns, live, guessed, exchanges, calibrated, degree, row_cut):  # type: ignore[no-untyped-def]
    """Of every part: times of exchanges [P, exchanges], (time, FLOPs, time that is guessed) [P, 3] by phase, and
    `LayerCosts.numbers`."""
    num_parts, size = operator_ns.shape
    num_exchanges, rest = len(exchanges.calls), size * COLUMNS
    exchange_ns = np.zeros((num_parts, num_exchanges))
    time, flops, guessed_ns = np.zeros((num_parts, 3)), np.zeros((num_parts, 3)), np.zeros((num_parts, 3))
    numbers = np.zeros((num_parts, 7), np.int64)
    for p in range(num_parts):
        for i in range(size):
            time[p, phase[i]] += operator_ns[p, i]
            flops[p, phase[i]] += values[p, i * COLUMNS + COUNTED_FLOPS]
            count = int(values[p, i * COLUMNS + COUNT])
            if phase[i] == 0:
                numbers[p, LAUNCHES] += count
            if guessed[p, i]:
                numbers[p, NUM_GUESSED] += count
                guessed_ns[p, phase[i]] += operator_ns[p, i]
            side = FORWARD_LIVE if phase[i] == 0 else BACKWARD_LIVE
            numbers[p, side] = max(numbers[p, side], int(live[p, i]))
        exchanged = np.zeros(3)
        for e in range(num_exchanges):
            if exchanges.calls[e]:
                of, num_bytes = exchanges.ring, values[p, rest + e] / exchanges.calls[e]
                each = ring_ns(of.passes[e], of.size[e], of.latency_ns[e], of.bandwidth[e], num_bytes)
                exchange_ns[p, e] = exchanges.calls[e] * each
            exchanged[exchanges.phase[e]] += exchange_ns[p, e]
        time[p] += exchanged
        if not calibrated:
            guessed_ns[p] += exchanged
        for kind, column in ((SAVED, SAVED_BYTES), (WEIGHT, WEIGHT_BYTES), (SHARED, SHARED_BYTES)):
            at = rest + num_exchanges + 3 * kind
            rows, split, whole = values[p, at : at + 3]
            numbers[p, column] = int(whole + split / degree + rows / row_cut)
    return exchange_ns, time, flops, guessed_ns, numbers


def _ruled(
    counts: Counts, layout: Layout, plan: _Plan, operator_ns: Floats, rules: Sequence[Rule]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Times, and which of them are guessed, after a user's rules: the first that knows an operator counts."""
    operator_ns, guessed = operator_ns.copy(), plan.guessed.copy()
    for i, operator in enumerate(counts.operators):
        row = counts.table[i]
        count = max(row[COUNT], 1)
        num_bytes = row[BYTES_WHOLE] + row[BYTES_SPLIT] / layout.tensor_parallel + row[BYTES_ROWS] / layout.row_cut
        launch = Launch(
            flops=row[COUNTED_FLOPS] / (plan.numbers.divisor[i] * count),
            num_bytes=num_bytes / count,
            shape=tuple((row[BATCH : N + 1] / count / plan.numbers.shape_divisor[i]).tolist()),
        )
        ruled = next((ns for rule in rules if (ns := rule(operator, launch)) is not None), None)
        if ruled is not None:
            operator_ns[i], guessed[i] = ruled * row[COUNT], False
    return operator_ns, guessed


_DIMENSION = {"batch": 0, "m": 1, "k": 2, "n": 3, "none": None}
