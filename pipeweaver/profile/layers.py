"""Measure the model's real layers on this worker: time and memory of every variant at a spread of part sizes.

A run of consecutive layers of one variant is timed as one stage, as a chunk would run it: later layers find
their weights out of the cache, and saved tensors wait for their backward. The cost of the stage itself,
measured on a chunk without layers, is taken off before the time is shared out over the layers.
Sizes take turns, repetition by repetition, so that a disturbance hits all of them alike, and the median of
the repetitions counts: stages of a step take what is usual, not the least that was ever seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Batch, Item
from pipeweaver.model.build import materialise
from pipeweaver.model.graph import ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.profile.fit import Sizes
from pipeweaver.profile.live import LiveBytes
from pipeweaver.profile.measured import LayerProfile, StageProfile
from pipeweaver.profile.parts import SamplePart, choose_parts, records_of, sizes_of
from pipeweaver.profile.variants import Variant, variants
from pipeweaver.runtime.clock import Clock, make_clock
from pipeweaver.runtime.optimizer import OptimizerConfig, adamw
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer, StageState, run_backward, run_forward
from pipeweaver.schedule.ir import Chunk

Load = Callable[[Sequence[Item], Mapping[str, int], Sequence[str]], Mapping[str, Any]]

SIZES = 12
MOST_LAYERS = 3
ROUNDS = (2, 15)
SECONDS_PER_VARIANT = 2.0


def profile_layers(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    device: torch.device,
    dtype: torch.dtype,
    barrier: Callable[[], None],
    seconds_per_variant: float = SECONDS_PER_VARIANT,
    own_cores: bool = True,
) -> tuple[dict[str, LayerProfile], StageProfile]:
    """Profiles by variant name, and of the stage itself. All workers call this at the same time.

    `load` brings content of items; `barrier` waits for all workers and is called before every variant, so that all
    measure the same at the same time. With `own_cores` the workers do not share cores, and on CPU time is
    counted only while a worker has its core: what other programs take from it is not a cost.
    Raises ValueError if a module has no item in `batches`.
    """
    core_time = own_cores and device.type == "cpu" and torch.get_num_threads() == 1
    world = _World(graph=graph, load=load, records=records_of(batches), device=device, dtype=dtype, core_time=core_time)
    by_name: dict[str, list[Variant]] = {}
    for variant in variants(graph).values():
        by_name.setdefault(variant.name, []).append(variant)
    parts = {module.name: choose_parts(graph, module, batches, SIZES) for module in graph.modules}
    barrier()
    stage = _profile_stage(world)
    found = {}
    for name, same in by_name.items():
        run = _consecutive(same)
        barrier()
        found[name] = _profile_variant(world, run, parts[run[0].module.name], stage, seconds_per_variant)
    return found, stage


@dataclass(frozen=True, kw_only=True)
class _World:
    graph: ModelGraph
    load: Load
    records: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    core_time: bool

    def clock(self) -> Clock | _ThreadClock:
        return _ThreadClock() if self.core_time else make_clock(self.device)

    def view(self, part: SamplePart, loaded: Mapping[str, Any]) -> PartView:
        return PartView(
            items=part.items,
            links=part.links,
            loaded=dict(loaded),
            step=0,
            seed=0,
            device=self.device,
            dtype=self.dtype,
        )

    def tensor(self, rows: int, spec: TensorSpec) -> Tensor:
        dtype = self.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn((rows, spec.width), device=self.device).to(dtype)
        return torch.zeros((rows, spec.width), device=self.device, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A part with everything that running a chunk on it takes."""

    part: SamplePart
    sizes: Sizes
    loaded: Mapping[str, Any]
    load_ns: int
    inputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class _ThreadClock:
    """Marks of the time that this thread has had a core."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(time.thread_time_ns())

    def times(self) -> list[int]:
        return self._marks


def _consecutive(same: Sequence[Variant]) -> list[Variant]:
    """The longest run of layers that follow each other in one module, at most MOST_LAYERS of it."""
    best: list[Variant] = []
    run: list[Variant] = []
    for variant in same:
        follows = run and run[-1].module is variant.module and run[-1].position + 1 == variant.position
        run = [*run, variant] if follows else [variant]
        best = max(best, run, key=len)
    return best[:MOST_LAYERS]


def _profile_variant(
    world: _World, run: Sequence[Variant], parts: Sequence[SamplePart], stage: StageProfile, seconds: float
) -> LayerProfile:
    modules = _build(world, run)
    chunk = _chunk(run, modules)
    cases = [_case(world, run[-1], part) for part in parts]
    _give_gradients(modules)
    for case in cases:  # nothing is timed before every size has run once
        _run_once(world, chunk, run[0], case)
    started = time.perf_counter()
    forward, backward = [], []
    for case in cases:
        f, b = _run_once(world, chunk, run[0], case)
        forward.append([f])
        backward.append([b])
    fits = int(seconds / max(time.perf_counter() - started, 1e-6))
    rounds = min(max(fits, ROUNDS[0]), ROUNDS[1])
    for _ in range(rounds - 1):
        for i, case in enumerate(cases):
            f, b = _run_once(world, chunk, run[0], case)
            forward[i].append(f)
            backward[i].append(b)
    memory = [_memory(world, run, modules, case) for case in cases]
    return LayerProfile(
        module=run[0].module.name,
        sizes=tuple(case.sizes for case in cases),
        forward_ns=tuple(_per_layer(times, stage.forward_ns, len(run)) for times in forward),
        backward_ns=tuple(
            _per_layer(times, stage.backward_ns, len(run)) if run[0].backward else 0 for times in backward
        ),
        load_ns=tuple(case.load_ns for case in cases),
        loaded_bytes=tuple(_loaded_bytes(case.loaded) for case in cases),
        saved_bytes=tuple(m.saved for m in memory),
        shared_bytes=tuple(m.shared for m in memory),
        carried_bytes=tuple(m.carried for m in memory),
        input_gradient_bytes=tuple(m.input_gradients for m in memory),
        forward_workspace_bytes=tuple(m.forward_workspace for m in memory),
        backward_workspace_bytes=tuple(m.backward_workspace for m in memory),
        optimizer_ns=_optimizer_ns(world, modules),
        rounds=rounds,
    )


def _profile_stage(world: _World) -> StageProfile:
    """A chunk without layers hands its input on."""
    spec = TensorSpec(name="x", width=64)
    chunk = BuiltChunk(layers=(), inputs={"x": spec}, loads=(), loss=None)
    item = Item(task="", draw=0, module="", position=0, sizes={"tokens": 16})
    part = SamplePart(items=(item,), links=((),))
    inputs, gradients = {"x": world.tensor(16, spec)}, {"x": world.tensor(16, spec)}
    forward, backward = [], []
    for _ in range(50):
        clock = world.clock()
        clock.mark()
        state = run_forward(chunk, inputs, world.view(part, {}), outputs={"x"}, grad=True, needs_grad={"x"})
        clock.mark()
        run_backward(state, gradients)
        clock.mark()
        start, middle, end = clock.times()
        forward.append(middle - start)
        backward.append(end - middle)
    return StageProfile(forward_ns=round(median(forward)), backward_ns=round(median(backward)))


def _run_once(world: _World, chunk: BuiltChunk, first: Variant, case: _Case) -> tuple[int, int]:
    """(forward, backward) of the chunk, nanoseconds."""
    clock = world.clock()
    clock.mark()
    state = _forward(world, chunk, first, case)
    clock.mark()
    if first.backward:
        run_backward(state, case.gradients)
    clock.mark()
    start, middle, end = clock.times()
    return middle - start, end - middle


def _forward(world: _World, chunk: BuiltChunk, first: Variant, case: _Case) -> StageState:
    return run_forward(
        chunk,
        case.inputs,
        world.view(case.part, case.loaded),
        outputs=set(first.outputs),
        grad=first.backward,
        needs_grad=first.needs_grad,
    )


def _per_layer(times: Sequence[int], stage_ns: int, layers: int) -> int:
    return max(1, round((median(times) - stage_ns) / layers))


@dataclass(frozen=True, kw_only=True)
class _Memory:
    saved: int
    shared: int
    carried: int
    input_gradients: int
    forward_workspace: int
    backward_workspace: int


def _memory(world: _World, run: Sequence[Variant], modules: Mapping[str, nn.Module], case: _Case) -> _Memory:
    """Bytes of one layer on a part. Two layers in a row tell what each saves from what they share."""
    one = _live(world, run[:1], modules, case)
    if len(run) == 1:
        return one
    two = _live(world, run[:2], modules, case)
    saved = two.saved - one.saved - one.carried
    return _Memory(
        saved=saved,
        shared=one.saved - saved,
        carried=one.carried,
        input_gradients=one.input_gradients,
        forward_workspace=one.forward_workspace,
        backward_workspace=one.backward_workspace,
    )


def _live(world: _World, run: Sequence[Variant], modules: Mapping[str, nn.Module], case: _Case) -> _Memory:
    chunk, first = _chunk(run, modules), run[0]
    with LiveBytes() as live:
        state = _forward(world, chunk, first, case)
        held, peak = live.now, live.peak
        carried = live.bytes_of(state.outputs[spec.name] for spec in first.spec.carries if spec.name in state.outputs)
        saved = held - live.bytes_of(state.outputs.values())
        live.reset_peak()
        returned = run_backward(state, case.gradients) if first.backward else {}
        input_gradients = live.bytes_of(returned.values())
        backward_peak = live.peak
    return _Memory(
        saved=saved if first.backward else 0,
        shared=0,
        carried=carried,
        input_gradients=input_gradients,
        forward_workspace=peak - held,
        backward_workspace=max(0, backward_peak - held - input_gradients),
    )


def _build(world: _World, run: Sequence[Variant]) -> dict[str, nn.Module]:
    module, last = run[0].module, len(run[0].module.layers) - 1
    inside = [min(max(variant.position, 0), last) for variant in run]
    chunk = Chunk(task="", module=module.name, start=inside[0], stop=inside[-1] + 1, worker=0)
    layers = materialise(world.graph, [chunk], seed=0, device=world.device, dtype=world.dtype)
    return {variant.layer: layers[variant.layer] for variant in run}


def _chunk(run: Sequence[Variant], modules: Mapping[str, nn.Module]) -> BuiltChunk:
    return BuiltChunk(
        layers=tuple(BuiltLayer(name=v.layer, spec=v.spec, module=modules[v.layer], inside={}) for v in run),
        inputs={**run[0].carried, **run[0].read},
        loads=run[0].spec.loads,
        loss=run[-1].module.loss if run[-1].loss else None,
    )


def _case(world: _World, variant: Variant, part: SamplePart) -> _Case:
    loaded, load_ns = _load(world, variant, part)
    sizes = sizes_of(world.graph, variant.module, variant.spec.reads, part.items, part.links)
    inputs = {name: world.tensor(_rows(part, spec), spec) for name, spec in variant.carried.items()}
    for name, spec in variant.read.items():
        inputs[name] = world.tensor(_read_rows(world.graph, variant.module, name, part, spec), spec)
    given = [*variant.spec.carries, *variant.spec.sends]
    gradients = {
        spec.name: world.tensor(_rows(part, spec), spec) for spec in given if spec.grad and spec.name in variant.outputs
    }
    return _Case(part=part, sizes=sizes, loaded=loaded, load_ns=load_ns, inputs=inputs, gradients=gradients)


def _load(world: _World, variant: Variant, part: SamplePart) -> tuple[dict[str, Any], int]:
    """Content of a part, timed once: a second time it might come out of a cache, which training does not have.

    Waiting for a disk counts. For a GPU content is loaded ahead by threads; what takes the device's time is the copy.
    """
    if not variant.spec.loads:
        return {}, 0
    clock = make_clock(world.device)
    clock.mark()
    content = world.load(part.items, world.records, variant.spec.loads)
    if world.device.type == "cuda":
        content = {name: tensor.pin_memory() for name, tensor in content.items()}
        clock = make_clock(world.device)
        clock.mark()
    loaded = {name: _to_device(tensor, world) for name, tensor in content.items()}
    clock.mark()
    start, end = clock.times()
    return loaded, end - start


def _to_device(tensor: Tensor, world: _World) -> Tensor:
    moved = tensor.to(world.device, non_blocking=True)
    return moved.to(world.dtype) if tensor.is_floating_point() else moved


def _loaded_bytes(loaded: Mapping[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())


def _rows(part: SamplePart, spec: TensorSpec) -> int:
    return sum(item.sizes[spec.rows] for item in part.items)


def _read_rows(graph: ModelGraph, module: Module, name: str, part: SamplePart, spec: TensorSpec) -> int:
    flow = next(flow for flow in graph.flows if flow.destination == module.name and flow.name == name)
    if flow.source == module.name:
        return _rows(part, spec)
    return sum(s.sizes[spec.rows] for sources in part.links for s in sources if s.module == flow.source)


def _give_gradients(modules: Mapping[str, nn.Module]) -> None:
    """In a step gradients are there before the first backward, which adds to them."""
    for module in modules.values():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def _optimizer_ns(world: _World, modules: Mapping[str, nn.Module]) -> int:
    """Norm, clipping and step of one layer's parameters."""
    trained = {
        f"{layer}.{name}": parameter
        for layer, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    if not trained:
        return 0
    optimizer = adamw(OptimizerConfig(), trained)
    gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
    times = []
    for _ in range(4):
        clock = world.clock()
        clock.mark()
        for gradient in gradients:
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            gradient.mul_(0.5)
        optimizer.step()
        clock.mark()
        start, end = clock.times()
        times.append(end - start)
    return round(median(times[1:]) / len(modules))  # the first one makes the optimizer's state
