"""A training run of equal blocks over tensor-parallel, pipeline and data-parallel devices: step time and memory.

    job = Job(layers=llama(...), num_layers=12, sequence=4096, tensor_parallel=2, data_parallel=4, ...)
    step = estimate_job(job, load_machine("B200"))
    step.step_ns, step.peak_bytes

A step is the pipeline (stages timed under 1F1B by the emulator of all plans), then what does not overlap with it:
gradients summed over replicas, gradients of tied embeddings over first and last stage, the optimizer. `Framework`
says what a training framework does beside the layers. Devices are numbered tensor-parallel first, then
data-parallel, then pipeline, as Megatron and DeepSpeed do: that decides which groups leave an island.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec
from pipeweaver.schedule.stages import graph_of
from pipeweaver.schedule.timing import time_stages
from pipeweaver.semu.counts import Counts
from pipeweaver.semu.latency import LayerCost, Layout, layer_cost
from pipeweaver.semu.layer import Input, LayerGraph
from pipeweaver.semu.machine import Group, Machine, collective_ns, transfer_ns
from pipeweaver.semu.published import Layers


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Habits of a training framework.

    `recompute`: run each layer's forward again before its backward, keeping its input only.
    `fused_accumulation`: weight gradients are added up inside their matmuls. `overlapped_transfers`: sends and
    receives between stages run beside compute. `gradient_bytes` and `state_bytes` per parameter; with
    `sharded_optimizer` replicas share out the state, and a reduction is a reduce-scatter before and an
    all-gather of parameters after the optimizer. `reduced_bytes` per gradient on the wire. `tied`: first and last
    stage share the embedding. `kept_weight_gradients`: one buffer per distinct weight shape stays allocated.
    `step_ns`: what a step costs beside all of that.
    """

    sequence_parallel: bool = False
    recompute: bool = False
    fused_accumulation: bool = True
    overlapped_transfers: bool = True
    sharded_optimizer: bool = False
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    state_bytes: int = 12
    tied: bool = False
    kept_weight_gradients: bool = False
    step_ns: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and over which devices. `num_microbatches` per replica and step."""

    layers: Layers
    num_layers: int
    sequence: int
    microbatch: int
    num_microbatches: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    dtype: str
    framework: Framework

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage on one device: times of a microbatch in ns, bytes."""

    forward_ns: float
    backward_ns: float
    parameter_bytes: int
    saved_bytes: int
    workspace_bytes: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Times in ns; `peak_bytes` of one device by pipeline rank, `memory` its parts by name."""

    step_ns: float
    pipeline_ns: float
    reduce_ns: float
    optimizer_ns: float
    stages: tuple[Stage, ...]
    memory: tuple[dict[str, int], ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(sum(parts.values()) for parts in self.memory)


Compose = Callable[[Sequence[float], Sequence[float], float, int], float]
"""Makespan from forward and backward of each stage, transfer time and number of microbatches."""

Known = dict[object, dict[str, LayerCost]]
"""Layer costs on one machine, by what they depend on: shared between the estimates of many jobs."""


def estimate_job(
    job: Job, machine: Machine, known: Known | None = None, *, compose: Compose | None = None
) -> StepEstimate:
    """Step time and memory; `compose` makes the pipeline of the stages' times (`pipeline_ns`).

    Raises ValueError if layers do not divide over the stages.
    """
    stages = job_stages(job, machine, {} if known is None else known)
    pipeline = (compose or pipeline_ns)(
        [stage.forward_ns for stage in stages],
        [stage.backward_ns for stage in stages],
        stage_transfer_ns(job, machine) if job.framework.overlapped_transfers else 0.0,
        job.num_microbatches,
    )
    reduce = max(_reduce_ns(job, machine, stage) for stage in stages) + _tied_ns(job, machine)
    optimizer = max(_optimizer_ns(job, machine, stage) for stage in stages)
    return StepEstimate(
        step_ns=pipeline + reduce + optimizer + job.framework.step_ns,
        pipeline_ns=pipeline,
        reduce_ns=reduce,
        optimizer_ns=optimizer,
        stages=stages,
        memory=tuple(_memory(job, rank, stage) for rank, stage in enumerate(stages)),
    )


def job_stages(job: Job, machine: Machine, known: Known) -> tuple[Stage, ...]:
    """Stages of a job; a microbatch's transfers are part of them where they do not overlap."""
    per_stage, rest = divmod(job.num_layers, job.pipeline_parallel)
    if rest:
        raise ValueError(f"{job.num_layers} layers do not divide over {job.pipeline_parallel} pipeline stages")
    layout = Layout(
        tensor_parallel=job.tensor_parallel,
        sequence_parallel=job.framework.sequence_parallel and job.tensor_parallel > 1,
        dtype=job.dtype,
    )
    key = (job.layers.block.kind, job.microbatch, job.sequence, layout)
    if key not in known:
        known[key] = {name: layer_cost(_counts(job, name), machine, layout) for name in ("before", "block", "after")}
    costs = known[key]
    stages = []
    for rank in range(job.pipeline_parallel):
        names = ["block"] * per_stage
        if rank == 0:
            names = ["before", *names]
        if rank == job.pipeline_parallel - 1:
            names = [*names, "after"]
        stages.append(_stage(job, machine, rank, names, costs, layout))
    return tuple(stages)


def pipeline_ns(
    forward_ns: Sequence[float], backward_ns: Sequence[float], transfer_ns: float, num_microbatches: int
) -> int:
    """Makespan of 1F1B over stages with these times, each activation and gradient `transfer_ns` on its way."""
    workers, lag = len(forward_ns), round(transfer_ns)
    duration = [round(ns) for ns in forward_ns for _ in range(num_microbatches)]
    duration += [round(ns) for ns in backward_ns for _ in range(num_microbatches)]
    half = workers * num_microbatches
    successors: list[list[tuple[int, int]]] = [[] for _ in duration]
    orders: list[list[int]] = []
    for worker in range(workers):
        for microbatch in range(num_microbatches):
            here = worker * num_microbatches + microbatch
            if worker + 1 < workers:
                successors[here].append((here + num_microbatches, lag))
                successors[half + here + num_microbatches].append((half + here, lag))
            else:
                successors[here].append((half + here, 0))
        base = worker * num_microbatches
        warmup = min(num_microbatches, workers - worker)
        order = [base + i for i in range(warmup)]
        for i in range(num_microbatches):
            order.append(half + base + i)
            if warmup + i < num_microbatches:
                order.append(base + warmup + i)
        orders.append(order)
    return int(time_stages(*graph_of(orders, duration, successors)).end_ns.max())


def balanced_pipeline_ns(
    forward_ns: Sequence[float], backward_ns: Sequence[float], transfer_ns: float, num_microbatches: int
) -> float:
    """The same in closed form, exact where all stages but first and last are equal and there is no transfer time:
    one microbatch through all stages and back, the others through the slowest."""
    both = [f + b for f, b in zip(forward_ns, backward_ns, strict=True)]
    return sum(both) + (num_microbatches - 1) * max(both) + 2 * (len(both) - 1) * transfer_ns


def stage_transfer_ns(job: Job, machine: Machine) -> float:
    """Time of one microbatch's activation (or gradient) from stage to stage, split over the tensor-parallel ranks."""
    if job.pipeline_parallel == 1:
        return 0.0
    num_bytes = job.microbatch * job.sequence * job.layers.block.carries[0].width * _BYTES[job.dtype]
    crosses = job.tensor_parallel * job.data_parallel >= machine.devices_per_island
    return transfer_ns(machine, num_bytes, crosses=crosses, devices=job.tensor_parallel)


def replicas(job: Job, machine: Machine) -> Group:
    """The group over which a parameter's gradient is summed."""
    per_island = max(1, machine.devices_per_island // job.tensor_parallel)
    return Group(size=job.data_parallel, per_island=min(job.data_parallel, per_island))


_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
Name = Literal["before", "block", "after"]


@lru_cache(maxsize=256)
def _graph(spec: LayerSpec, inputs: tuple[Input, ...], dtype: str, fused_accumulation: bool) -> LayerGraph:
    return LayerGraph(spec, inputs, dtype=getattr(torch, dtype), fused_accumulation=fused_accumulation)


def _layer(job: Job, name: str) -> LayerGraph:
    spec = getattr(job.layers, name)
    inputs = () if name == "before" else tuple(Input(spec=s, name=s.name) for s in job.layers.before.carries)
    return _graph(spec, inputs, job.dtype, job.framework.fused_accumulation)


def _counts(job: Job, name: str) -> Counts:
    item = Item(task="main", draw=0, module="language", position=0, sizes={"tokens": job.sequence})
    return _layer(job, name).counts([item] * job.microbatch, [()] * job.microbatch)


def _stage(
    job: Job, machine: Machine, rank: int, names: Sequence[str], costs: dict[str, LayerCost], layout: Layout
) -> Stage:
    forward = sum(costs[name].phase_ns["F"] for name in names)
    backward = sum(costs[name].phase_ns["I"] + costs[name].phase_ns["W"] for name in names)
    if job.framework.recompute:
        backward += sum(costs[name].phase_ns["F"] for name in names if name == "block")
    if not job.framework.overlapped_transfers:
        ends = (rank > 0) + (rank < job.pipeline_parallel - 1)
        forward += ends * stage_transfer_ns(job, machine)
        backward += ends * stage_transfer_ns(job, machine)
    parameters = {name: _layer(job, name).traced_parameters().on_device(job.tensor_parallel) for name in set(names)}
    held = [_held_bytes(job, costs[name], layout, first=i == 0 and rank == 0) for i, name in enumerate(names)]
    after = sum(held)
    workspace = 0
    for name, bytes_held in zip(names, held, strict=True):
        after -= bytes_held
        # While a layer runs, those behind it hold nothing yet (forward) or nothing any more (backward).
        live = max(costs[name].forward_live, costs[name].backward_live)
        recomputed = costs[name].saved_bytes if job.framework.recompute and name == "block" else 0
        workspace = max(workspace, live + recomputed - bytes_held - after)
    return Stage(
        forward_ns=forward,
        backward_ns=backward,
        parameter_bytes=sum(parameters[name] for name in names),
        saved_bytes=sum(held),
        workspace_bytes=workspace,
        kept_bytes=_kept_bytes(job, names) if job.framework.kept_weight_gradients else 0,
    )


def _held_bytes(job: Job, cost: LayerCost, layout: Layout, *, first: bool) -> int:
    """Bytes that a layer holds for its backward on one device, the activation that enters it included."""
    entering = cost.counts.tensor_bytes("x") / layout.row_cut
    if first or "x" not in cost.counts.structure.saved_inputs:
        entering = 0
    if job.framework.recompute:
        return int(entering)
    return int(entering) + cost.saved_bytes


def _kept_bytes(job: Job, names: Sequence[str]) -> int:
    """One buffer per distinct shape of a weight that a matmul takes part in."""
    shapes = {}
    for name in set(names):
        layer = _layer(job, name)
        for parameter, role in layer.roles.items():
            if role in ("column", "row"):
                tensor = layer.module.get_parameter(parameter)
                shapes[tensor.shape, role] = tensor.numel() * tensor.element_size() // job.tensor_parallel
    return sum(shapes.values())


def _reduce_ns(job: Job, machine: Machine, stage: Stage) -> float:
    count = stage.parameter_bytes / _BYTES[job.dtype]
    group = replicas(job, machine)
    if job.framework.sharded_optimizer:
        scattered = collective_ns(machine, "reduce_scatter", count * job.framework.reduced_bytes, group)
        return scattered + collective_ns(machine, "all_gather", stage.parameter_bytes, group)
    return collective_ns(machine, "all_reduce", count * job.framework.reduced_bytes, group)


def _tied_ns(job: Job, machine: Machine) -> float:
    """First and last stage sum the gradient of the embedding that they share."""
    if not job.framework.tied or job.pipeline_parallel == 1:
        return 0.0
    crosses = job.tensor_parallel * job.data_parallel >= machine.devices_per_island
    elements = _layer(job, "before").traced_parameters().on_device(job.tensor_parallel) / _BYTES[job.dtype]
    pair = Group(size=2, per_island=1 if crosses else 2)
    return collective_ns(machine, "all_reduce", elements * job.framework.reduced_bytes, pair)


def _optimizer_ns(job: Job, machine: Machine, stage: Stage) -> float:
    """The optimizer moves its state, gradients and parameters through memory once each way."""
    count = stage.parameter_bytes / _BYTES[job.dtype]
    framework = job.framework
    owned = count / job.data_parallel if framework.sharded_optimizer else count
    # Gradients: read for the norm, read for the step, zeroed afterwards.
    moved = count * 2 * framework.gradient_bytes + owned * (
        framework.gradient_bytes + 2 * framework.state_bytes + _BYTES[job.dtype]
    )
    return 1e9 * moved / (machine.memory_bandwidth * machine.memory.factor)


def _memory(job: Job, rank: int, stage: Stage) -> dict[str, int]:
    count = stage.parameter_bytes // _BYTES[job.dtype]
    framework = job.framework
    in_flight = min(job.num_microbatches, job.pipeline_parallel - rank)
    shards = job.data_parallel if framework.sharded_optimizer else 1
    return {
        "parameters": stage.parameter_bytes,
        "gradients": count * framework.gradient_bytes,
        "optimizer": count * framework.state_bytes // shards,
        "activations": in_flight * stage.saved_bytes,
        "workspace": stage.workspace_bytes,
        "kept weight gradients": stage.kept_bytes,
    }
