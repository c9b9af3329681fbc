"""What it takes to run layers of the model apart from it: built modules, content, inputs and gradients of a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Item
from pipeweaver.measure.grid import any_numbers
from pipeweaver.measure.parts import SamplePart
from pipeweaver.measure.records import LoadSample
from pipeweaver.measure.variants import Variant
from pipeweaver.model.build import materialise
from pipeweaver.model.graph import ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.runtime.clock import make_clock
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer
from pipeweaver.schedule.ir import Chunk

Load = Callable[[Sequence[Item], Mapping[str, int], Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class World:
    """What all cases have in common. `core_time`: time is that of the core alone, not what others take of it."""

    graph: ModelGraph
    load: Load
    records: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    core_time: bool

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
            return any_numbers((rows, spec.width), self.device, dtype)
        return torch.zeros((rows, spec.width), device=self.device, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A part with everything that running a chunk on it takes."""

    part: SamplePart
    loaded: Mapping[str, Any]
    loads: tuple[LoadSample, ...]
    inputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def build_layers(world: World, run: Sequence[Variant]) -> dict[str, nn.Module]:
    """The modules of layers that follow each other, by name, as a worker would build them."""
    module, last = run[0].module, len(run[0].module.layers) - 1
    inside = [min(max(variant.position, 0), last) for variant in run]
    chunk = Chunk(task="", module=module.name, start=inside[0], stop=inside[-1] + 1, worker=0)
    layers = materialise(world.graph, [chunk], seed=0, device=world.device, dtype=world.dtype)
    return {variant.layer: layers[variant.layer] for variant in run}


def chunk_of(run: Sequence[Variant], modules: Mapping[str, nn.Module]) -> BuiltChunk:
    """These layers as one chunk."""
    return BuiltChunk(
        layers=tuple(BuiltLayer(name=v.layer, spec=v.spec, module=modules[v.layer], inside={}) for v in run),
        inputs={**run[0].carried, **run[0].read},
        loads=run[0].spec.loads,
        loss=run[-1].module.loss if run[-1].loss else None,
    )


def make_case(world: World, variant: Variant, part: SamplePart) -> Case:
    """A part's content, as loaded now, with inputs and output gradients of any values for a layer of this variant."""
    loaded, loads = _load(world, variant, part)
    inputs = {name: world.tensor(_rows(part, spec), spec) for name, spec in variant.carried.items()}
    for name, spec in variant.read.items():
        inputs[name] = world.tensor(_read_rows(world.graph, variant.module, name, part, spec), spec)
    given = [*variant.spec.carries, *variant.spec.sends]
    gradients = {
        spec.name: world.tensor(_rows(part, spec), spec) for spec in given if spec.grad and spec.name in variant.outputs
    }
    return Case(part=part, loaded=loaded, loads=loads, inputs=inputs, gradients=gradients)


def _load(world: World, variant: Variant, part: SamplePart) -> tuple[dict[str, Any], tuple[LoadSample, ...]]:
    """Content of a part, timed once: a second time it might come out of a cache, which training does not have.

    Waiting for a disk counts. For a GPU content is loaded ahead by threads; what takes the device's time is the copy.
    """
    loaded: dict[str, Any] = {}
    samples = []
    for name in variant.spec.loads:
        marks = make_clock(world.device)
        marks.mark()
        content = world.load(part.items, world.records, (name,))
        if world.device.type == "cuda":
            content = {key: tensor.pin_memory() for key, tensor in content.items()}
            marks = make_clock(world.device)
            marks.mark()
        here = {key: _to_device(tensor, world) for key, tensor in content.items()}
        marks.mark()
        start, end = marks.times()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in here.values())
        samples.append(LoadSample(tensor=name, items=len(part.items), num_bytes=num_bytes, ns=end - start))
        loaded |= here
    return loaded, tuple(samples)


def _to_device(tensor: Tensor, world: World) -> Tensor:
    moved = tensor.to(world.device, non_blocking=True)
    return moved.to(world.dtype) if tensor.is_floating_point() else moved


def _rows(part: SamplePart, spec: TensorSpec) -> int:
    return sum(item.sizes[spec.rows] for item in part.items)


def _read_rows(graph: ModelGraph, module: Module, name: str, part: SamplePart, spec: TensorSpec) -> int:
    flow = next(flow for flow in graph.flows if flow.destination == module.name and flow.name == name)
    if flow.source == module.name:
        return _rows(part, spec)
    return sum(s.sizes[spec.rows] for sources in part.links for s in sources if s.module == flow.source)
