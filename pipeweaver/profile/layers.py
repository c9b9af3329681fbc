"""Measure the model's real layers on this worker: time and memory of every variant at a spread of part sizes.

A run of consecutive layers of one variant is timed as one stage, as a chunk would run it: later layers find
their weights out of the cache, and saved tensors wait for their backward. The cost of the stage itself,
measured on a chunk without layers, is taken off before the time is shared out over the layers.
Sizes and ways to run them (backward whole or split, memory strategies) take turns, repetition by repetition, so that
a disturbance hits all of them alike, and the median of the repetitions counts: stages of a step take what is usual,
not the least that was ever seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Batch, Item
from pipeweaver.model.build import materialise
from pipeweaver.model.graph import ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.profile.fit import Sizes
from pipeweaver.profile.measured import LayerProfile, StageProfile, StrategyProfile
from pipeweaver.profile.memory import LayerMemory, chunk_memory, layer_memory
from pipeweaver.profile.parts import SamplePart, choose_parts, records_of, sizes_of
from pipeweaver.profile.variants import Variant, variants
from pipeweaver.runtime.clock import Clock, make_clock
from pipeweaver.runtime.optimizer import OptimizerConfig, adamw
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer, StageState, run_backward, run_forward
from pipeweaver.schedule.ir import Chunk, Strategy

Load = Callable[[Sequence[Item], Mapping[str, int], Sequence[str]], Mapping[str, Any]]

SIZES = 12
MOST_LAYERS = 3
ROUNDS = (2, 15)
STRATEGY_ROUNDS = 3
"""Of all rounds, in so many memory strategies take their turns too: their extra time is the difference in a round."""
SECONDS_PER_VARIANT = 3.0


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


class _Way(NamedTuple):
    """A way to run a chunk's forward and backward."""

    strategy: Strategy = "keep"
    split: bool = False


class _Times(NamedTuple):
    """Nanoseconds of a chunk on a part."""

    forward: int
    backward: int
    weight: int = 0


KEEP, SPLIT = _Way(), _Way(split=True)


def _profile_variant(
    world: _World, run: Sequence[Variant], parts: Sequence[SamplePart], stage: StageProfile, seconds: float
) -> LayerProfile:
    modules = _build(world, run)
    chunk, first = _chunk(run, modules), run[0]
    cases = [_case(world, run[-1], part) for part in parts]
    _give_gradients(modules)
    kept = [_memory(world, run, modules, case, KEEP) for case in cases]
    split_up = [_memory(world, run, modules, case, SPLIT) for case in cases]
    saved = _strategy_bytes(world, run, modules, cases, kept) if first.backward else {}
    ways = [KEEP, SPLIT] if first.backward else [KEEP]
    ways += [_Way(strategy) for strategy in saved]
    for case in cases:  # nothing is timed before every size has run once, every way
        for way in ways:
            _run_once(world, chunk, first, case, way)
    started = time.perf_counter()
    times: dict[_Way, list[list[_Times]]] = {way: [[] for _ in cases] for way in ways}

    def take_turns(chosen: Sequence[_Way]) -> None:
        for i, case in enumerate(cases):
            for way in chosen:
                times[way][i].append(_run_once(world, chunk, first, case, way))

    take_turns(ways)
    fits = int(seconds / max(time.perf_counter() - started, 1e-6))
    rounds = min(max(fits, ROUNDS[0]), ROUNDS[1])
    for number in range(1, rounds):
        take_turns(ways if number < STRATEGY_ROUNDS else [way for way in ways if way.strategy == "keep"])

    def halves(of_case: int) -> tuple[int, int]:
        """Of a split backward, the time that the split costs the forward counted with the first half."""
        if not first.backward:
            return 0, 0
        split, whole = times[SPLIT][of_case], times[KEEP][of_case]
        before = [s.forward + s.backward - w.forward for s, w in zip(split, whole, strict=True)]
        weight = [s.weight for s in split]
        return _per_layer(before, stage.input_ns, len(run)), _per_layer(weight, stage.weight_ns, len(run))

    def extra(way: _Way, of_case: int) -> int:
        pairs = zip(times[way][of_case], times[KEEP][of_case], strict=False)
        more = [a.forward + a.backward - b.forward - b.backward for a, b in pairs]
        return max(0, round(median(more) / len(run)))

    both = [halves(i) for i in range(len(cases))]
    forward = [[t.forward for t in of_case] for of_case in times[KEEP]]
    backward = [[t.backward for t in of_case] for of_case in times[KEEP]]
    return LayerProfile(
        module=first.module.name,
        sizes=tuple(case.sizes for case in cases),
        forward_ns=tuple(_per_layer(of_case, stage.forward_ns, len(run)) for of_case in forward),
        backward_ns=tuple(
            _per_layer(of_case, stage.backward_ns, len(run)) if first.backward else 0 for of_case in backward
        ),
        input_ns=tuple(before for before, _ in both),
        weight_ns=tuple(weight for _, weight in both),
        load_ns=tuple(case.load_ns for case in cases),
        loaded_bytes=tuple(_loaded_bytes(case.loaded) for case in cases),
        saved_bytes=tuple(m.saved for m in kept),
        shared_bytes=tuple(m.shared for m in kept),
        carried_bytes=tuple(m.carried for m in kept),
        input_gradient_bytes=tuple(m.input_gradients for m in kept),
        forward_workspace_bytes=tuple(m.forward_workspace for m in kept),
        backward_workspace_bytes=tuple(m.backward_workspace for m in kept),
        weight_bytes=tuple(m.weight for m in split_up),
        weight_workspace_bytes=tuple(m.weight_workspace for m in split_up),
        strategies={
            strategy: StrategyProfile(
                extra_ns=tuple(extra(_Way(strategy), i) for i in range(len(cases))), saved_bytes=num_bytes
            )
            for strategy, num_bytes in saved.items()
        },
        optimizer_ns=_optimizer_ns(world, modules),
        rounds=rounds,
    )


def _strategy_bytes(
    world: _World,
    run: Sequence[Variant],
    modules: Mapping[str, nn.Module],
    cases: Sequence[_Case],
    kept: Sequence[LayerMemory],
) -> dict[Strategy, tuple[int, ...]]:
    """What is saved under the strategies that layers can follow, and that save less than keeping all does.

    Copies to the host are worth it only where a device has memory of its own.
    """
    strategies: list[Strategy] = ["recompute", "recompute-attention"]
    strategies += ["offload"] if world.device.type != "cpu" else []
    found: dict[Strategy, tuple[int, ...]] = {}
    for strategy in strategies:
        try:
            saved = tuple(_memory(world, run, modules, case, _Way(strategy)).saved for case in cases)
        except RuntimeError:
            continue  # a layer that torch cannot run this way, one with torch.func inside: it has no such strategy
        if any(less < memory.saved for less, memory in zip(saved, kept, strict=True)):
            found[strategy] = saved
    return found


def _profile_stage(world: _World) -> StageProfile:
    """A chunk without layers hands its input on."""
    spec = TensorSpec(name="x", width=64)
    chunk = BuiltChunk(layers=(), inputs={"x": spec}, loads=(), loss=None)
    item = Item(task="", draw=0, module="", position=0, sizes={"tokens": 16})
    part = SamplePart(items=(item,), links=((),))
    inputs, gradients = {"x": world.tensor(16, spec)}, {"x": world.tensor(16, spec)}

    def once(split: bool) -> _Times:
        view = world.view(part, {})
        return _timed(
            world,
            lambda: run_forward(chunk, inputs, view, outputs={"x"}, grad=True, needs_grad={"x"}, split=split),
            gradients,
            backward=True,
        )

    whole, split = [once(False) for _ in range(50)], [once(True) for _ in range(50)]
    return StageProfile(
        forward_ns=round(median(times.forward for times in whole)),
        backward_ns=round(median(times.backward for times in whole)),
        input_ns=round(median(times.backward for times in split)),
        weight_ns=round(median(times.weight for times in split)),
    )


def _run_once(world: _World, chunk: BuiltChunk, first: Variant, case: _Case, way: _Way) -> _Times:
    return _timed(world, lambda: _forward(world, chunk, first, case, way), case.gradients, backward=first.backward)


def _timed(
    world: _World, forward: Callable[[], StageState], gradients: Mapping[str, Tensor], *, backward: bool
) -> _Times:
    clock = world.clock()
    clock.mark()
    state = forward()
    clock.mark()
    if backward:
        run_backward(state, gradients)
    clock.mark()
    if state.later is not None:
        state.later.accumulate()
    clock.mark()
    marks = clock.times()
    return _Times(*(end - start for start, end in pairwise(marks)))


def _forward(world: _World, chunk: BuiltChunk, first: Variant, case: _Case, way: _Way) -> StageState:
    return run_forward(
        chunk,
        case.inputs,
        world.view(case.part, case.loaded),
        outputs=set(first.outputs),
        grad=first.backward,
        needs_grad=first.needs_grad,
        strategies=(way.strategy,) * len(chunk.layers),
        split=way.split,
    )


def _per_layer(times: Sequence[int], stage_ns: int, layers: int) -> int:
    return max(1, round((median(times) - stage_ns) / layers))


def _memory(
    world: _World, run: Sequence[Variant], modules: Mapping[str, nn.Module], case: _Case, way: _Way
) -> LayerMemory:
    """Of one layer on a part, from runs of one and of two."""

    def measured(count: int) -> LayerMemory:
        chunk, first = _chunk(run[:count], modules), run[0]
        carried = [spec.name for spec in first.spec.carries]
        return chunk_memory(
            lambda: _forward(world, chunk, first, case, way), case.gradients, carried, backward=first.backward
        )

    return layer_memory(measured(1), measured(2) if len(run) > 1 else None)


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
