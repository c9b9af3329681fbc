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

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
    N,
    Operator,
    Structure,
)
from pipeweaver.semu.machine import (
    Collective,
    Group,
    Machine,
    attention_factor,
    collective_ns,
    matmul_factor,
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
    `num_guessed` counts its launches. `saved_bytes`, `weight_bytes` and `shared_bytes` as in
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
    count = table[:, COUNT]
    launches = np.maximum(count, 1)
    flops = table[:, COUNTED_FLOPS] / (plan.divisor * launches)
    num_bytes = (
        table[:, BYTES_WHOLE] + table[:, BYTES_SPLIT] / degree + table[:, BYTES_ROWS] / layout.row_cut
    ) / launches
    shapes = table[:, BATCH : N + 1] / launches[:, None] / plan.shape_divisor
    each_ns = np.maximum(machine.memory.access_ns + num_bytes / plan.bytes_per_ns, machine.floor_ns)
    for rows, found in (
        (plan.matmuls, _matmul_ns(machine, plan, flops, shapes)),
        (plan.attentions, _attention_ns(machine, plan, flops)),
    ):
        each_ns[rows] = np.maximum(each_ns[rows], found)
    guessed = np.full(len(table), not machine.calibrated)
    for i in range(len(table) if rules else 0):
        launch = Launch(flops=flops[i], num_bytes=num_bytes[i], shape=tuple(shapes[i].tolist()))
        ruled = next((ns for rule in rules if (ns := rule(counts.operators[i], launch)) is not None), None)
        if ruled is not None:
            each_ns[i], guessed[i] = ruled, False
    operator_ns = each_ns * count
    exchange_ns = np.array(
        [
            exchange_time(machine, layout, exchange.kind, "F" if exchange.again else exchange.phase, size)
            for exchange, size in zip(counts.structure.exchanges, counts.exchanged_bytes.tolist(), strict=True)
        ]
    )
    sums = np.bincount(plan.phase, operator_ns, 3)
    if len(exchange_ns):
        sums += np.bincount(plan.exchange_phase, exchange_ns, 3)
    work = np.bincount(plan.phase, table[:, COUNTED_FLOPS], 3)
    live = table[:, LIVE_WHOLE] + table[:, LIVE_SPLIT] / degree + table[:, LIVE_ROWS] / layout.row_cut
    if layout.row_cut > 1:
        live = live + table[:, GATHERED]
    saved, weight, shared = (spread_bytes(rows, split, whole, layout) for rows, split, whole in counts.memory.tolist())
    return LayerCost(
        counts=counts,
        operator_ns=operator_ns,
        exchange_ns=exchange_ns,
        phase_ns={"F": float(sums[0]), "I": float(sums[1]), "W": float(sums[2])},
        phase_flops={"F": float(work[0]), "I": float(work[1]), "W": float(work[2])},
        guessed_ns=float(operator_ns[guessed].sum()) + (0.0 if machine.calibrated else float(exchange_ns.sum())),
        num_guessed=int(count[guessed].sum()),
        saved_bytes=int(saved),
        weight_bytes=int(weight),
        shared_bytes=int(shared),
        forward_live=int(live[plan.phase == 0].max(initial=0)),
        backward_live=int(live[plan.phase > 0].max(initial=0)),
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


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """All of a layer's cost that does not change with its sizes, as arrays over its operators.

    `divisor`: over how many devices FLOPs are spread; `shape_divisor` [operators, 4] likewise for each dimension.
    `phase` is 0 for F, 1 for I, 2 for W. `matmuls` and `attentions` are places of those operators, `peaks` the
    shares of the peak that the largest matmuls reach, `work` the phase that an operator works like.
    """

    divisor: Floats
    shape_divisor: Floats
    bytes_per_ns: Floats
    phase: Ints
    exchange_phase: Ints
    matmuls: Ints
    attentions: Ints
    peaks: Floats
    peak_flops: float
    work: tuple[str, ...]


@lru_cache(maxsize=4096)
def _plan(structure: Structure, machine: Machine, layout: Layout) -> _Plan:
    operators = structure.operators
    cut = [_DIMENSION[operator.divided] for operator in operators]
    shape_divisor = np.ones((len(operators), 4))
    for row, dimension in enumerate(cut):
        if dimension is not None:
            shape_divisor[row, dimension] = layout.tensor_parallel
    memory = machine.memory
    shares = np.array([memory.factors.get(operator.name, memory.factor) for operator in operators])
    matmuls = [row for row, operator in enumerate(operators) if operator.kind == "matmul"]
    best = {"F": machine.matmul.forward, "I": machine.matmul.input, "W": machine.matmul.weight}
    work = ["F" if operator.again else operator.phase for operator in operators]
    return _Plan(
        divisor=shape_divisor.prod(axis=1),
        shape_divisor=shape_divisor,
        bytes_per_ns=machine.memory_bandwidth * shares / 1e9,
        phase=np.array(["FIW".index(operator.phase) for operator in operators], np.int64),
        exchange_phase=np.array(["FIW".index(exchange.phase) for exchange in structure.exchanges], np.int64),
        matmuls=np.array(matmuls, np.int64),
        attentions=np.array([row for row, operator in enumerate(operators) if operator.kind == "attention"], np.int64),
        peaks=np.array([best[work[row]] for row in matmuls]),
        peak_flops=machine.peak(layout.dtype),
        work=tuple(work),
    )


def _matmul_ns(machine: Machine, plan: _Plan, flops: Floats, shapes: Floats) -> Floats:
    table = machine.matmul
    _, m, k, n = np.maximum(shapes[plan.matmuls], 1e-9).T
    factors = plan.peaks / (1 + table.half_m / m + table.half_n / n + table.half_k / k)
    if table.measured_forward or table.measured_input or table.measured_weight:
        for place, row in enumerate(plan.matmuls.tolist()):
            factors[place], _ = matmul_factor(machine, plan.work[row], m[place], k[place], n[place])
    return 1e9 * flops[plan.matmuls] / (plan.peak_flops * factors)


def _attention_ns(machine: Machine, plan: _Plan, flops: Floats) -> list[float]:
    rows = plan.attentions.tolist()
    factors = [attention_factor(machine, plan.work[row], flops[row]) if flops[row] else 1.0 for row in rows]
    return [1e9 * flops[row] / (plan.peak_flops * factor) for row, factor in zip(rows, factors, strict=True)]


_DIMENSION = {"batch": 0, "m": 1, "k": 2, "n": 3, "none": None}
