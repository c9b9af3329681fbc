"""Measure the model's real layers on this worker: their operators where they stand, and what layers take in a stage.

    layers = measure_layers(graph, batches, load, device=device, dtype=torch.float32, barrier=barrier)

Every kind of layer runs on a spread of parts: traced with a stopwatch, which says what each of its operators takes with
the caches as its neighbours leave them; and in a chunk as a stage runs it, several layers of the kind in a row, so that
later ones find their weights out of the cache and saved tensors wait for their backward. What the chunk takes longer
than its operators is Python and autograd. Sizes and ways to run them (backward whole or split, recomputed) take turns,
repetition by repetition, so that a disturbance hits all of them alike, and the median of the repetitions counts: stages
of a step take what is usual, not the least that was ever seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Batch, Item
from pipeweaver.measure.cases import Case, Load, World, build_layers, chunk_of, make_case
from pipeweaver.measure.parts import SamplePart, choose_parts, records_of
from pipeweaver.measure.records import LayerSample, LoadSample, OperatorSample, OptimizerSample, StageSample
from pipeweaver.measure.stopwatch import clock, stopwatch
from pipeweaver.measure.variants import Variant, variants
from pipeweaver.model.graph import ModelGraph, TensorSpec
from pipeweaver.runtime.optimizer import OptimizerConfig, adamw
from pipeweaver.runtime.stage import BuiltChunk, StageState, run_backward, run_forward
from pipeweaver.schedule.ir import Strategy
from pipeweaver.semu.calls import Call, Trace
from pipeweaver.semu.trace import trace

SIZES = 12
MOST_LAYERS = 3
ROUNDS = (3, 15)
TRACES = 3
STRATEGY_ROUNDS = 3
"""Of all rounds, in so many recomputation takes its turn too: its extra time is the difference in a round."""
SECONDS_PER_VARIANT = 3.0


class LayerMeasurements(NamedTuple):
    layers: tuple[LayerSample, ...]
    stage: StageSample
    loads: tuple[LoadSample, ...]
    optimizer: tuple[OptimizerSample, ...]


def measure_layers(
    graph: ModelGraph,
    batches: Sequence[Batch],
    load: Load,
    *,
    device: torch.device,
    dtype: torch.dtype,
    barrier: Callable[[], None],
    seconds_per_variant: float = SECONDS_PER_VARIANT,
    core_time: bool = False,
) -> LayerMeasurements:
    """All kinds of layers of the model. All workers call this at the same time.

    `load` brings content of items; `barrier` waits for all workers and is called before every kind, so that all
    measure the same at the same time. With `core_time` time counts only while a worker has its core. A module without items in `batches` is left out.
    """
    world = World(graph=graph, load=load, records=records_of(batches), device=device, dtype=dtype, core_time=core_time)
    by_name: dict[str, list[Variant]] = {}
    for variant in variants(graph).values():
        by_name.setdefault(variant.name, []).append(variant)
    parts = {module.name: choose_parts(graph, module, batches, SIZES) for module in graph.modules}
    barrier()
    stage = _measure_stage(world)
    layers: list[LayerSample] = []
    loads: list[LoadSample] = []
    optimizer: list[OptimizerSample] = []
    for same in by_name.values():
        run = _consecutive(same)
        barrier()
        if parts[run[0].module.name]:
            modules = build_layers(world, run)
            cases = [make_case(world, run[-1], part) for part in parts[run[0].module.name]]
            layers += _measure_variant(world, run, modules, cases, stage, seconds_per_variant)
            loads += [sample for case in cases for sample in case.loads]
            optimizer += _measure_optimizer(world, modules)
    return LayerMeasurements(tuple(layers), stage, tuple(loads), tuple(optimizer))


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


KEEP, SPLIT, RECOMPUTE = _Way(), _Way(split=True), _Way(strategy="recompute")


def _measure_variant(
    world: World,
    run: Sequence[Variant],
    modules: Mapping[str, nn.Module],
    cases: Sequence[Case],
    stage: StageSample,
    seconds: float,
) -> list[LayerSample]:
    chunk, first = chunk_of(run, modules), run[0]
    _give_gradients(modules)
    ways = [KEEP, SPLIT, RECOMPUTE] if first.backward else [KEEP]
    if first.backward and not _runs(world, chunk, first, cases[0], RECOMPUTE):
        ways.remove(RECOMPUTE)
    for case in cases:  # nothing is timed before every size has run once, every way
        for way in ways:
            _run_once(world, chunk, first, case, way)
    traced = [[_traced(world, first, modules[v.layer], case) for v in _in_turn(run, TRACES)] for case in cases]
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

    found = []
    for i in range(len(cases)):
        keep = times[KEEP][i]
        input_ns = weight_ns = recompute_ns = 0.0
        if first.backward:
            split = times[SPLIT][i]
            pairs = zip(split, keep, strict=True)
            input_ns = _per_layer([s.forward + s.backward - k.forward for s, k in pairs], stage.backward_ns, run)
            weight_ns = _per_layer([s.weight for s in split], 0.0, run)
        if RECOMPUTE in times:
            pairs = zip(times[RECOMPUTE][i], keep, strict=False)
            more = [a.forward + a.backward - b.forward - b.backward for a, b in pairs]
            recompute_ns = max(0.0, median(more) / len(run))
        found.append(
            LayerSample(
                layer=first.name,
                operators=_operators(traced[i]),
                forward_ns=_per_layer([t.forward for t in keep], stage.forward_ns, run),
                backward_ns=_per_layer([t.backward for t in keep], stage.backward_ns, run) if first.backward else 0.0,
                input_ns=input_ns,
                weight_ns=weight_ns,
                recompute_ns=recompute_ns,
            )
        )
    return found


def _in_turn(run: Sequence[Variant], count: int) -> list[Variant]:
    return [run[i % len(run)] for i in range(count)]


def _traced(world: World, variant: Variant, module: nn.Module, case: Case) -> Trace:
    """Every operator of the layer's forward and backward on a part, with the time that it took."""
    view = world.view(case.part, case.loaded)
    state = {name: tensor.detach().requires_grad_(name in variant.needs_grad) for name, tensor in case.inputs.items()}
    with torch.no_grad():
        module(dict(state), view)  # what all layers of a chunk share is made before
    loaded = {name: tensor for name, tensor in case.loaded.items() if isinstance(tensor, Tensor)}

    def forward() -> dict[str, Tensor]:
        with torch.set_grad_enabled(variant.backward):
            outputs: dict[str, Tensor] = module(dict(state), view)
        return outputs

    parameters = dict(module.named_parameters())
    found = trace(
        forward, inputs={**state, **loaded}, parameters=parameters, stopwatch=stopwatch(world.device, world.core_time)
    )
    return found


def _operators(traces: Sequence[Trace]) -> tuple[OperatorSample, ...]:
    """Launches that do the same together; of each the median over the traces, which are of equal layers."""
    calls = [trace.calls for trace in traces]
    assert len({len(of) for of in calls}) == 1, "equal layers make equal calls"
    found: dict[tuple[object, ...], tuple[Call, float, int]] = {}
    for same in zip(*calls, strict=True):
        call = same[0]
        num_bytes = sum(touched for _, touched in (*call.reads, *call.writes))
        key = (call.name, call.phase, call.shape, call.counted_flops, num_bytes)
        _, ns, count = found.get(key, (call, 0.0, 0))
        found[key] = call, ns + median(one.duration_ns for one in same), count + 1
    return tuple(
        OperatorSample(
            name=call.name,
            kind=call.kind,
            phase=call.phase,
            shape=call.shape,
            flops=call.counted_flops,
            num_bytes=sum(touched for _, touched in (*call.reads, *call.writes)),
            count=count,
            ns=ns,
        )
        for call, ns, count in found.values()
    )


def _runs(world: World, chunk: BuiltChunk, first: Variant, case: Case, way: _Way) -> bool:
    """Whether torch can run a layer this way: one with torch.func inside cannot be recomputed."""
    try:
        _run_once(world, chunk, first, case, way)
    except RuntimeError:
        return False
    return True


def _measure_stage(world: World) -> StageSample:
    """A chunk without layers hands its input on."""
    spec = TensorSpec(name="x", width=64)
    chunk = BuiltChunk(layers=(), inputs={"x": spec}, loads=(), loss=None)
    item = Item(task="", draw=0, module="", position=0, sizes={"tokens": 16})
    part = SamplePart(items=(item,), links=((),))
    inputs, gradients = {"x": world.tensor(16, spec)}, {"x": world.tensor(16, spec)}

    def once() -> _Times:
        view = world.view(part, {})
        return _timed(
            world,
            lambda: run_forward(chunk, inputs, view, outputs={"x"}, grad=True, needs_grad={"x"}),
            gradients,
            backward=True,
        )

    times = [once() for _ in range(50)]
    return StageSample(
        forward_ns=median(one.forward for one in times),
        backward_ns=median(one.backward for one in times),
    )


def _run_once(world: World, chunk: BuiltChunk, first: Variant, case: Case, way: _Way) -> _Times:
    return _timed(world, lambda: _forward(world, chunk, first, case, way), case.gradients, backward=first.backward)


def _timed(
    world: World, forward: Callable[[], StageState], gradients: Mapping[str, Tensor], *, backward: bool
) -> _Times:
    marks = clock(world.device, world.core_time)
    marks.mark()
    state = forward()
    marks.mark()
    if backward:
        run_backward(state, gradients)
    marks.mark()
    if state.later is not None:
        state.later.accumulate()
    marks.mark()
    found = marks.times()
    return _Times(*(end - start for start, end in pairwise(found)))


def _forward(world: World, chunk: BuiltChunk, first: Variant, case: Case, way: _Way) -> StageState:
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


def _per_layer(times: Sequence[int], stage_ns: float, run: Sequence[Variant]) -> float:
    return max(1.0, (median(times) - stage_ns) / len(run))


def _give_gradients(modules: Mapping[str, nn.Module]) -> None:
    """In a step gradients are there before the first backward, which adds to them."""
    for module in modules.values():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def _measure_optimizer(world: World, modules: Mapping[str, nn.Module]) -> list[OptimizerSample]:
    """Norm, clipping and step of these layers' parameters; nothing where none learns."""
    trained = {
        f"{layer}.{name}": parameter
        for layer, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    if not trained:
        return []
    optimizer = adamw(OptimizerConfig(), trained)
    gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
    times = []
    for _ in range(4):
        marks = clock(world.device, world.core_time)
        marks.mark()
        for gradient in gradients:
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            gradient.mul_(0.5)
        optimizer.step()
        marks.mark()
        start, end = marks.times()
        times.append(end - start)
    elements = sum(parameter.numel() for parameter in trained.values())
    # The first one makes the optimizer's state.
    return [OptimizerSample(parameters=len(trained), elements=elements, ns=median(times[1:]))]
