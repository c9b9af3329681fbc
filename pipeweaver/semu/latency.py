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
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeweaver.semu.layer import (
    BATCH,
    BYTES_ROWS,
    BYTES_SPLIT,
    BYTES_WHOLE,
    COUNT,
    COUNTED_FLOPS,
    FLOPS,
    GATHERED,
    LIVE_ROWS,
    LIVE_SPLIT,
    LIVE_WHOLE,
    SAVED,
    WEIGHT,
    Counts,
    K,
    M,
    N,
    Operator,
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

    `operator_ns` [operators] and `exchange_ns` [exchanges] are in the order of the counts. `guessed_ns` is the
    part of the time that rests on no measurement of this machine. `saved_bytes` as in `Counts.memory`.
    `forward_live` and `backward_live` are peaks of what the layer holds while it runs, parameters and
    inputs aside.
    """

    counts: Counts
    operator_ns: Floats
    exchange_ns: Floats
    flops: float
    guessed_ns: float
    num_guessed: int
    saved_bytes: int
    weight_bytes: int
    forward_live: int
    backward_live: int

    @cached_property
    def phase_ns(self) -> dict[str, float]:
        """Time of each of the phases F, I and W, exchanges included."""
        found = {"F": 0.0, "I": 0.0, "W": 0.0}
        for operator, ns in zip(self.counts.operators, self.operator_ns.tolist(), strict=True):
            found[operator.phase] += ns
        for exchange, ns in zip(self.counts.exchanges, self.exchange_ns.tolist(), strict=True):
            found[exchange.phase] += ns
        return found


def layer_cost(counts: Counts, machine: Machine, layout: Layout, rules: tuple[Rule, ...] = ()) -> LayerCost:
    """Cost of a layer on one device of a worker laid out so.

    Raises ValueError if the machine has no peak for the layout's dtype.
    """
    table, degree = counts.table, layout.tensor_parallel
    launches = np.maximum(table[:, COUNT], 1)
    cut = np.array([_COLUMN[operator.divided] for operator in counts.operators], dtype=np.int64)
    divided = cut >= 0
    flops = table[:, COUNTED_FLOPS] / np.where(divided, degree, 1)
    shapes = table[:, [BATCH, M, K, N]] / launches[:, None]
    rows = np.nonzero(divided)[0]
    shapes[rows, cut[rows]] /= degree
    num_bytes = table[:, BYTES_WHOLE] + table[:, BYTES_SPLIT] / degree + table[:, BYTES_ROWS] / layout.row_cut
    operator_ns = np.empty(len(table))
    guessed, num_guessed = 0.0, 0
    calibrated = bool(machine.calibrated)
    peak = machine.peak(layout.dtype)
    memory = machine.memory
    for i, operator in enumerate(counts.operators):
        count = launches[i]
        each = Launch(
            flops=flops[i] / count,
            num_bytes=num_bytes[i] / count,
            shape=(shapes[i, 0], shapes[i, 1], shapes[i, 2], shapes[i, 3]),
        )
        ruled = next((ns for rule in rules if (ns := rule(operator, each)) is not None), None)
        if ruled is not None:
            operator_ns[i] = ruled * table[i, COUNT]
            continue
        share = memory.factors.get(operator.name, memory.factor)
        ns = memory.access_ns + 1e9 * each.num_bytes / (machine.memory_bandwidth * share)
        if operator.kind == "matmul" and each.flops:
            factor, _ = matmul_factor(machine, operator.phase, *each.shape[1:])
            ns = max(ns, 1e9 * each.flops / (peak * factor))
        elif operator.kind == "attention" and each.flops:
            factor = attention_factor(machine, operator.phase, each.flops)
            ns = max(ns, 1e9 * each.flops / (peak * factor))
        operator_ns[i] = max(ns, machine.floor_ns) * table[i, COUNT]
        if not calibrated:
            guessed += float(operator_ns[i])
            num_guessed += int(count)
    exchange_ns = np.array(
        [
            exchange_time(machine, layout, exchange.kind, exchange.phase, size)
            for exchange, size in zip(counts.exchanges, counts.exchanged_bytes.tolist(), strict=True)
        ]
    )
    forward = np.array([operator.phase == "F" for operator in counts.operators], dtype=bool)
    live = table[:, LIVE_WHOLE] + table[:, LIVE_SPLIT] / degree + table[:, LIVE_ROWS] / layout.row_cut
    if layout.sequence_parallel and degree > 1:
        live = live + table[:, GATHERED]
    saved = _spread(counts.memory, layout)
    return LayerCost(
        counts=counts,
        operator_ns=operator_ns,
        exchange_ns=exchange_ns,
        flops=float(table[:, FLOPS].sum()),
        guessed_ns=guessed + (0.0 if calibrated else float(exchange_ns.sum())),
        num_guessed=num_guessed,
        saved_bytes=int(saved[SAVED]),
        weight_bytes=int(saved[WEIGHT]),
        forward_live=int(live[forward].max(initial=0)),
        backward_live=int(live[~forward].max(initial=0)),
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


def _spread(memory: Floats, layout: Layout) -> list[float]:
    return [spread_bytes(rows, split, whole, layout) for rows, split, whole in memory.tolist()]


_COLUMN = {"batch": 0, "m": 1, "k": 2, "n": 3, "none": -1}
