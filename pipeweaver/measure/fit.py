"""From what workers measured to a machine file: peaks, factors by kind and size, overheads, links.

    machine = fit_machine(measured, name="Xeon, one core", ..., dtype="float32")

1. What a layer takes in a stage is, in the mean over all layers and sizes, `a` per launch plus its operators `s` times.
   Both are fitted, forward and backward each; `a` is the machine's overhead per launch.
2. Operators are then billed with all that their layer takes beside launches, each in proportion to its stopwatch: so
   layers that were measured cost what they were measured to cost.
3. Launches of one kind and about one size make a row of the kind's curve, total work over total time: attention by
   FLOPs, everything but matmuls by name and bytes. What no layer has follows the grid.
4. Matmuls, by weight and rows, take what is left of their layer: curves by name mix layers, weights are each layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean, median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeweaver.measure.records import LayerSample, LoadSample, Measured, OperatorSample
from pipeweaver.schedule.ir import ITEM_SIZES
from pipeweaver.semu.calls import OperatorPhase
from pipeweaver.semu.kernels import Kernels
from pipeweaver.semu.machine import (
    AttentionFactors,
    CollectiveFactors,
    Curve,
    Link,
    Links,
    LoadFactors,
    Machine,
    MatmulCurve,
    MatmulFactors,
    MemoryFactors,
    OptimizerFactors,
    Overheads,
)
from pipeweaver.semu.optimizer import plain_optimizer

Floats = NDArray[np.float64]

FEWEST, MOST = 0.3, 4.0
"""A layer counts as at most this much faster or slower than its operators: more is a disturbance."""

MOST_MOVED = 1.5
"""Nor do matmuls take more than so many times what their stopwatch said, or less, for the sake of others."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a machine file says beside factors."""

    name: str
    source: str
    calibrated: str
    memory_bytes: int
    devices_per_island: int
    kernels: Kernels
    dtype: str


def fit_machine(measured: Sequence[Measured], named: Named) -> Machine:
    """One machine of what all workers measured at the same time."""
    samples = [sample for one in measured for sample in one.layers]
    beside = {direction: launch_ns(samples, direction) for direction in ("F", "B")}
    layers = [billed(sample, beside) for sample in samples]
    operators = [operator for layer in layers for operator in layer]
    grid = [operator for one in measured for operator in one.grid]
    copies = [operator for operator in grid if operator.kind == "memory"]
    matmuls = [operator for operator in (*operators, *grid) if operator.kind == "matmul"]
    peak = max(operator.flops * operator.count / operator.ns for operator in matmuls)
    largest = max(operator.num_bytes for operator in copies)
    bandwidth = fmean(operator.num_bytes / operator.ns for operator in copies if operator.num_bytes == largest)
    attention = _attention_factors(operators, grid, peak)
    memory = _memory_factors(operators, copies, bandwidth)
    layers = [_rest_to_matmuls(layer, attention, memory, peak, bandwidth) for layer in layers]
    return Machine(
        name=named.name,
        source=named.source,
        calibrated=named.calibrated,
        memory_bytes=named.memory_bytes,
        memory_bandwidth=bandwidth * 1e9,
        host_bandwidth=_host_bandwidth(measured, bandwidth),
        devices_per_island=named.devices_per_island,
        floor_ns=fmean(one.floor_ns for one in measured),
        kernels=named.kernels,
        peak_flops={named.dtype: peak * 1e9},
        matmul=_matmul_factors([operator for layer in layers for operator in layer], grid, peak),
        attention=attention,
        memory=memory,
        links=Links(island=_link(measured, crosses=False), cluster=_link(measured, crosses=True)),
        overheads=_overheads(measured, samples, operators, beside),
        optimizer=_optimizer_factors(measured, named.dtype, bandwidth),
        loads=_load_factors([sample for one in measured for sample in one.loads]),
    )


def launch_ns(samples: Sequence[LayerSample], direction: str) -> float:
    """What a launch costs beside its kernel: layers take `a` per launch and `s` times their operators, fitted on
    relative errors, neither below zero."""
    rows, times = [], []
    for sample in samples:
        whole = sample.forward_ns if direction == "F" else sample.backward_ns
        launches, operators = _sums(sample, direction)
        if whole and operators:
            rows.append([launches / whole, operators / whole])
            times.append(1.0)
    return float(non_negative(np.array(rows).reshape(-1, 2), np.array(times))[0]) if rows else 0.0


def billed(sample: LayerSample, beside: dict[str, float]) -> list[OperatorSample]:
    """A layer's operators, scaled to what the layer takes beside its launches."""
    scale = {}
    for direction, whole in (("F", sample.forward_ns), ("B", sample.backward_ns)):
        launches, operators = _sums(sample, direction)
        share = (whole - launches * beside[direction]) / operators if operators else 1.0
        scale[direction] = min(max(share, FEWEST), MOST)
    return [_scaled(operator, scale["F" if operator.phase == "F" else "B"]) for operator in sample.operators]


def curve(points: Iterable[tuple[float, float, float]], per_octave: int = 2) -> Curve:
    """Rows [size, work per time] from (size, work, time): of sizes close to each other, all work over all time."""
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for point in points:
        if point[0] > 0 and point[2] > 0:
            bins.setdefault(round(log2(point[0]) * per_octave), []).append(point)
    rows = []
    for _, found in sorted(bins.items()):
        size = 2 ** fmean(log2(point[0]) for point in found)
        rows.append((size, sum(point[1] for point in found) / sum(point[2] for point in found)))
    return tuple(rows)


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with no unknown below zero, by leaving out those that would be: for a few unknowns."""
    columns = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while columns:
        solution = np.linalg.lstsq(matrix[:, columns], target, rcond=1e-9)[0]
        if (solution >= 0).all():
            found[columns] = solution
            return found
        del columns[int(solution.argmin())]
    return found


def _sums(sample: LayerSample, direction: str) -> tuple[int, float]:
    """(launches, ns) of a layer's operators in forward (F) or backward (B)."""
    chosen = [operator for operator in sample.operators if (operator.phase == "F") == (direction == "F")]
    return sum(operator.count for operator in chosen), sum(operator.ns for operator in chosen)


def _scaled(sample: OperatorSample, factor: float) -> OperatorSample:
    return OperatorSample(
        name=sample.name,
        kind=sample.kind,
        phase=sample.phase,
        shape=sample.shape,
        flops=sample.flops,
        num_bytes=sample.num_bytes,
        count=sample.count,
        ns=sample.ns * factor,
    )


Key = TypeVar("Key")


def _grouped(
    samples: Iterable[OperatorSample], key: Callable[[OperatorSample], Key]
) -> dict[Key, list[OperatorSample]]:
    groups: dict[Key, list[OperatorSample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups


def _matmul_factors(operators: Sequence[OperatorSample], grid: Sequence[OperatorSample], peak: float) -> MatmulFactors:
    """Curves by weight, and the general curve 1 / (1 + a/m + b/n + c/k) through the grid."""
    curves = []
    by_weight = _grouped((o for o in operators if o.kind == "matmul" and o.shape[0] == 1), _weight)
    for (phase, fixed), same in by_weight.items():
        points = [(_rows(o), o.flops * o.count, o.ns * peak) for o in same]
        rows = tuple((size, round(share, 5)) for size, share in curve(points) if share > 0)
        if rows and min(fixed) > 0:
            curves.append(MatmulCurve(phase=phase, fixed=fixed, factors=_rounded(rows)))
    alone = [o for o in grid if o.kind == "matmul"]
    inverse = np.array([[1.0, 1 / o.shape[1], 1 / o.shape[3], 1 / o.shape[2]] for o in alone])
    lost = np.array([o.ns * peak / o.flops for o in alone])
    best, *halves = non_negative(inverse / lost[:, None], np.ones(len(lost)))
    best = max(best, 1.0)
    return MatmulFactors(
        forward=_round(1 / best),
        input=_round(1 / best),
        weight=_round(1 / best),
        half_m=_round(halves[0] / best),
        half_n=_round(halves[1] / best),
        half_k=_round(halves[2] / best),
        curves=tuple(curves),
    )


def _weight(sample: OperatorSample) -> tuple[OperatorPhase, tuple[int, int]]:
    _, m, k, n = sample.shape
    return sample.phase, (m, n) if sample.phase == "W" else (k, n)


def _rows(sample: OperatorSample) -> int:
    return sample.shape[2] if sample.phase == "W" else sample.shape[1]


def _attention_factors(
    operators: Sequence[OperatorSample], grid: Sequence[OperatorSample], peak: float
) -> AttentionFactors:
    """By FLOPs of a launch; the grid where the model has no attention."""
    found = {}
    for name, forward in (("forward", True), ("backward", False)):
        for source in (operators, grid):
            chosen = [o for o in source if o.kind == "attention" and (o.phase == "F") == forward]
            rows = curve([(o.flops, o.flops * o.count, o.ns * peak) for o in chosen])
            if rows:
                found[name] = _rounded(rows)
                break
    return AttentionFactors(**found)


def _memory_factors(
    operators: Sequence[OperatorSample], copies: Sequence[OperatorSample], bandwidth: float
) -> MemoryFactors:
    """By name and bytes of a launch. Any other operator moves its bytes as copies of medium size do."""
    curves = {}
    for name, same in sorted(_grouped((o for o in operators if o.kind == "memory"), lambda o: o.name).items()):
        rows = curve([(o.num_bytes, o.num_bytes * o.count, o.ns * bandwidth) for o in same])
        if rows:
            curves[name] = _rounded(rows)
    other = median(o.num_bytes / o.ns / bandwidth for o in copies)
    return MemoryFactors(factor=_round(min(max(other, 0.01), 2.0)), curves=curves)


def _rest_to_matmuls(
    layer: Sequence[OperatorSample], attention: AttentionFactors, memory: MemoryFactors, peak: float, bandwidth: float
) -> list[OperatorSample]:
    """A layer whose matmuls take what the curves of all other operators leave of its time."""
    found = list(layer)
    for forward in (True, False):
        chosen = [o for o in layer if (o.phase == "F") == forward]
        others = sum(_curve_ns(o, attention, memory, peak, bandwidth) for o in chosen if o.kind != "matmul")
        matmuls = sum(o.ns for o in chosen if o.kind == "matmul")
        if matmuls:
            scale = min(max((sum(o.ns for o in chosen) - others) / matmuls, 1 / MOST_MOVED), MOST_MOVED)
            found = [_scaled(o, scale) if o.kind == "matmul" and (o.phase == "F") == forward else o for o in found]
    return found


def _curve_ns(
    sample: OperatorSample, attention: AttentionFactors, memory: MemoryFactors, peak: float, bandwidth: float
) -> float:
    """What the curves say that a launch takes, times launches."""
    if sample.kind == "attention":
        rows, size, rate = attention.forward if sample.phase == "F" else attention.backward, sample.flops, peak
    else:
        rows, size, rate = memory.curves.get(sample.name, ()), sample.num_bytes, bandwidth
    if not rows or size <= 0:
        return sample.ns
    sizes, shares = np.array(rows).T
    return float(sample.count * size / (rate * np.interp(np.log(size), np.log(sizes), shares)))


def _overheads(
    measured: Sequence[Measured],
    samples: Sequence[LayerSample],
    operators: Sequence[OperatorSample],
    beside: dict[str, float],
) -> Overheads:
    """What a split costs is compared with the same halves in a whole backward, over all layers."""
    halves = {"I": 0.0, "W": 0.0}
    split = {"I": 0.0, "W": 0.0}
    launches = 0
    again, forward = [], []
    for sample in samples:
        if not sample.backward_ns:
            continue
        scaled = billed(sample, beside)
        for phase in halves:
            chosen = [o for o in scaled if o.phase == phase]
            halves[phase] += sum(o.ns + o.count * beside["B"] for o in chosen)
        launches += _sums(sample, "F")[0]
        split["I"] += sample.input_ns
        split["W"] += sample.weight_ns
        if sample.recompute_ns:
            again.append(sample.recompute_ns)
            forward.append(sample.forward_ns)
    sent = [s for one in measured for s in one.transfers if s.core_ns]
    post_ns, post_byte_ns = _line([(1.0, s.num_bytes) for s in sent], [s.core_ns for s in sent])
    return Overheads(
        forward_ns=_round(beside["F"]),
        backward_ns=_round(beside["B"]),
        stage_forward_ns=_round(fmean(one.stage.forward_ns for one in measured)),
        stage_backward_ns=_round(fmean(one.stage.backward_ns for one in measured)),
        split_ns=_round(max(0.0, split["I"] - halves["I"]) / launches) if launches else 0.0,
        split_weight=_round(split["W"] / halves["W"]) if split["W"] and halves["W"] else 1.0,
        recompute_ns=_round(max(0.0, fmean(again) - fmean(forward))) if again else 0.0,
        post_ns=_round(post_ns),
        post_byte_ns=_round(post_byte_ns),
    )


def _optimizer_factors(measured: Sequence[Measured], dtype: str, bandwidth: float) -> OptimizerFactors | None:
    samples = [sample for one in measured for sample in one.optimizer]
    if not samples:
        return None
    each = plain_optimizer(dtype).moved_bytes(ITEM_SIZES[dtype])
    moved = [sample.elements * each for sample in samples]
    rows = [[s.parameters / s.ns, num_bytes / s.ns] for s, num_bytes in zip(samples, moved, strict=True)]
    parameter_ns, byte_ns = non_negative(np.array(rows), np.ones(len(rows)))
    fastest = 1 / (100 * bandwidth)  # nothing is moved a hundred times faster than memory can
    return OptimizerFactors(factor=_round(1 / (max(byte_ns, fastest) * bandwidth)), parameter_ns=_round(parameter_ns))


def _load_factors(samples: Sequence[LoadSample]) -> dict[str, LoadFactors]:
    found = {}
    for name in sorted({sample.tensor for sample in samples}):
        same = [sample for sample in samples if sample.tensor == name and sample.ns > 0]
        rows = np.array([[1 / s.ns, s.items / s.ns, s.num_bytes / s.ns] for s in same]).reshape(-1, 3)
        part_ns, item_ns, byte_ns = map(float, non_negative(rows, np.ones(len(rows))))
        found[name] = LoadFactors(part_ns=_round(part_ns), item_ns=_round(item_ns), byte_ns=_round(byte_ns))
    return found


def _host_bandwidth(measured: Sequence[Measured], bandwidth: float) -> float:
    samples = [sample for one in measured for sample in one.host]
    if not samples:
        return bandwidth * 1e9 / 2  # reading and writing the same memory
    largest = max(sample.num_bytes for sample in samples)
    return fmean(1e9 * s.num_bytes / s.duration_ns for s in samples if s.num_bytes == largest)


def _link(measured: Sequence[Measured], *, crosses: bool) -> Link:
    """Links of one kind; where none was there to measure, those of the other kind."""
    transfers = [s for one in measured for s in one.transfers]
    reductions = [s for one in measured for s in one.reductions]
    transfers = [s for s in transfers if s.crosses == crosses] or transfers
    reductions = [s for s in reductions if s.crosses == crosses] or reductions
    latency, byte_ns = _line([(1.0, s.num_bytes) for s in transfers], [s.duration_ns for s in transfers])
    bandwidth = 1e9 / byte_ns if byte_ns else 1e12
    moved = [2 * s.num_bytes * (s.ends[0] - 1) / s.ends[0] for s in reductions]
    rows = [(2.0 * (s.ends[0] - 1), m) for s, m in zip(reductions, moved, strict=True)]
    hop_ns, moved_ns = _line(rows, [s.duration_ns for s in reductions])
    share = min(max(1 / (moved_ns * bandwidth / 1e9), 0.01), 2.0) if moved_ns else 1.0
    collective = CollectiveFactors(factor=_round(share), hop_ns=_round(hop_ns))
    return Link(
        bandwidth=_round(bandwidth),
        all_reduce=collective,
        all_gather=collective,
        reduce_scatter=collective,
        point_to_point=CollectiveFactors(hop_ns=_round(latency)),
    )


def _line(rows: Sequence[tuple[float, float]], times_ns: Sequence[int]) -> tuple[float, float]:
    if not times_ns:
        return 0.0, 0.0
    times = np.array(times_ns, np.float64)
    first, second = non_negative(np.array(rows) / times[:, None], np.ones(len(times)))
    return float(first), float(second)


def _rounded(rows: Curve) -> Curve:
    """Sizes that rounding makes equal are one."""
    return tuple({_round(size): _round(share) for size, share in rows}.items())


def _round(value: float) -> float:
    return float(f"{value:.6g}")
