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

from pipeweaver.semu.factors import attention_share, curve_share, flat_factors, matmul_share, memory_curve
from pipeweaver.semu.layer import (
    BATCH,
    BYTES_ROWS,
    BYTES_SPLIT,
    BYTES_WHOLE,
    COUNT,
    COUNTED_FLOPS,
    GATHERED,
    LIVE_ROWS,
    LIVE_SPLIT,
    LIVE_WHOLE,
    Counts,
    K,
    M,
    N,
    Operator,
    Structure,
)
from pipeweaver.semu.machine import (
    Collective,
    Group,
    Machine,
    collective_ns,
)

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


def layer_cost(counts: Counts, machine: Machine, layout: Layout, rules: tuple[Rule, ...] = ()) -> LayerCost:
    """Cost of a layer on one device of a worker laid out so.

    Raises ValueError if the machine has no peak for the layout's dtype.
    """
    plan = _plan(counts.structure, machine, layout)
    table, degree = counts.table, layout.tensor_parallel
    operator_ns, live = _operators(table, flat_factors(machine), plan.numbers, degree, layout.row_cut)
    guessed = plan.guessed
    if rules:
        operator_ns, guessed = _ruled(counts, layout, plan, operator_ns, rules)
    exchange_ns = np.array(
        [
            exchange_time(machine, layout, exchange.kind, exchange.phase, num_bytes)
            for exchange, num_bytes in zip(counts.structure.exchanges, counts.exchanged_bytes, strict=True)
        ]
    )
    phase = plan.numbers.phase
    sums = np.bincount(phase, operator_ns, 3)
    if degree > 1 and len(exchange_ns):
        sums += np.bincount(plan.exchange_phase, exchange_ns, 3)
    work = np.bincount(phase, table[:, COUNTED_FLOPS], 3)
    saved, weight, shared = (spread_bytes(rows, split, whole, layout) for rows, split, whole in counts.memory.tolist())
    return LayerCost(
        counts=counts,
        operator_ns=operator_ns,
        exchange_ns=exchange_ns,
        phase_ns={"F": float(sums[0]), "I": float(sums[1]), "W": float(sums[2])},
        phase_flops={"F": float(work[0]), "I": float(work[1]), "W": float(work[2])},
        guessed_ns=float(operator_ns[guessed].sum()) + (0.0 if machine.calibrated else float(exchange_ns.sum())),
        num_guessed=int(table[guessed, COUNT].sum()),
        launches=int(table[phase == 0, COUNT].sum()),
        saved_bytes=int(saved),
        weight_bytes=int(weight),
        shared_bytes=int(shared),
        forward_live=int(live[phase == 0].max(initial=0)),
        backward_live=int(live[phase > 0].max(initial=0)),
    )


def exchange_time(machine: Machine, layout: Layout, kind: str, phase: str, num_bytes: float) -> float:
    """Time of one exchange of a tensor-parallel group; 0 where the layout does not need it."""
    degree = layout.tensor_parallel
    if degree == 1:
        return 0.0
    group = Group(size=degree, per_island=min(degree, machine.devices_per_island))
    collective: Collective
    if kind == "loss":
        # Largest logit, sum of exponentials and the target's logit, one after the other.
        return 3 * collective_ns(machine, "all_reduce", num_bytes / 3, group)
    if layout.sequence_parallel:
        gathers = (kind == "enter") == (phase != "I")
        collective = "all_gather" if gathers else "reduce_scatter"
    elif (kind, phase) in (("leave", "F"), ("enter", "I")):
        collective = "all_reduce"
    else:
        return 0.0
    return collective_ns(machine, collective, num_bytes, group)


def spread_bytes(rows: float, split: float, whole: float, layout: Layout) -> float:
    """Bytes on one device of tensors cut by rows, by columns, and not at all."""
    return whole + split / layout.tensor_parallel + rows / layout.row_cut


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


class _Plan(NamedTuple):
    numbers: _Numbers
    exchange_phase: Ints
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
    return _Plan(
        numbers=numbers,
        exchange_phase=np.array(["FIW".index(exchange.phase) for exchange in structure.exchanges], np.int64),
        guessed=unknown if machine.calibrated else np.ones(len(operators), np.bool_),
    )


@numba.njit(cache=True)
def _operators(table, factors, plan, degree, row_cut):  # type: ignore[no-untyped-def]
    """(time of all launches in ns, bytes held meanwhile) of every operator on one device."""
    size = len(table)
    found, live = np.zeros(size), np.zeros(size)
    for i in range(size):
        row = table[i]
        live[i] = row[LIVE_WHOLE] + row[LIVE_SPLIT] / degree + row[LIVE_ROWS] / row_cut
        if row_cut > 1:
            live[i] += row[GATHERED]
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
        found[i] = count * (max(each, plan.floor_ns) + plan.launch_ns[i])
    return found, live


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
