"""The model graph: modules, their layers, and the data flows between them.

A module is a list of layers with what comes `before` the first and `after` the last. Any consecutive
range of layers is a chunk; `before` belongs to the chunk with layer 0, `after` to the one with the last.
All tensors that leave a layer are packed: the rows of all items of a part, one item below the other.

A layer is a plain `torch.nn.Module` with

    forward(state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]

where `state` holds what the layer before it carries plus what the layer `reads`, and the result holds
what it `carries` and `sends`. A layer with a loss returns the summed, unnormalised loss as "loss".
What a layer reads is always there: with no rows where no item is linked.

Example, a two-layer encoder whose features a language model takes in at its embedding:

    vision:   before(loads pixels) carries x | 0 | 1 | after sends features
    language: before(loads tokens, reads vision) carries x | 0 .. 7 | after(loads labels) loss
    Flow(source="vision", tensor="features", destination="language", name="vision")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from torch import nn


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A packed tensor of shape [sum of `rows` over the items of a part, width].

    `rows` names the item size that counts its rows ("tokens", "features"). `dtype` is a torch dtype
    name, or "model" for the dtype that the run computes in. Without `grad` no gradient flows back from whoever
    reads it.
    """

    name: str
    rows: str = "tokens"
    width: int
    dtype: str = "model"
    grad: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: how to build it, what goes in, what comes out.

    Layers of equal `kind` have equal structure: for equal sizes they cost the same. `build` returns
    the torch module; it is called on the meta device for shapes, and under a generator seeded by the
    layer's name where its parameters are to live. `loads` names tensors that the data set supplies
    ("pixels", "tokens", "labels"); `reads` names flows; `carries` goes to the next layer; `sends` may
    be read by other modules, or by later layers of this one.
    """

    kind: str
    build: Callable[[], nn.Module]
    loads: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    carries: tuple[TensorSpec, ...] = ()
    sends: tuple[TensorSpec, ...] = ()
    trainable: bool = True


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The loss that a module's `after` returns: a sum over its own units.

    `units` names the item size that counts them ("supervised"): the normaliser of a step is their sum
    over the whole batch, known before the step. A `joint` loss mixes items and takes the task's whole
    batch in one part. `weights` of the loss in each task, `weight` in all that are not named there.
    """

    units: str
    weight: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    joint: bool = False

    def weight_in(self, task: str) -> float:
        return self.weights.get(task, self.weight)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One modality module: an encoder, a backbone or a decoder.

    `tied` maps a parameter's name to the one it shares, both within the module:
    {"after.weight": "before.weight"}.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    before: LayerSpec | None = None
    after: LayerSpec | None = None
    tied: dict[str, str] = field(default_factory=dict)
    loss: LossSpec | None = None

    def range(self, start: int, stop: int) -> Iterator[tuple[str, LayerSpec]]:
        """(name, layer) of the chunk [start, stop): `vision.before`, `vision.layers.0`, … in order."""
        if start == 0 and self.before is not None:
            yield f"{self.name}.before", self.before
        for index in range(start, stop):
            yield f"{self.name}.layers.{index}", self.layers[index]
        if stop == len(self.layers) and self.after is not None:
            yield f"{self.name}.after", self.after


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Rows of a sent tensor of `source` that layers of `destination` read under `name`.

    Between two modules the rows follow the links of the samples: a destination item receives the rows
    of the items linked to it, in the order of the links. Within one module (a skip connection) every
    item receives its own rows.
    """

    source: str
    tensor: str
    destination: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a flow brings to a module: under which name, from which module, which tensor."""

    name: str
    source: str
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """Modules and flows, a DAG over modules (flows inside one module aside).

    `activated` are the modules of each task; one that is not named there activates those that it has items for.

    Raises ValueError, naming module and tensor, if names repeat, a flow leads nowhere, a layer reads
    what no flow brings, or the flows form a cycle.
    """

    modules: tuple[Module, ...]
    flows: tuple[Flow, ...] = ()
    activated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}

    def sent(self, flow: Flow) -> tuple[int, TensorSpec]:
        """(position, spec) of the tensor that a flow takes: position -1 is `before`, n is `after`."""
        module = self.by_name[flow.source]
        for position, layer in positions(module):
            for spec in layer.sends:
                if spec.name == flow.tensor:
                    return position, spec
        raise ValueError(f"flow {flow.source}.{flow.tensor} -> {flow.destination}: no layer of {flow.source} sends it")


def positions(module: Module) -> Iterator[tuple[int, LayerSpec]]:
    """(position, layer) of all layers: -1 for `before`, 0..n-1, n for `after`."""
    if module.before is not None:
        yield -1, module.before
    yield from enumerate(module.layers)
    if module.after is not None:
        yield len(module.layers), module.after


def topological(graph: ModelGraph) -> tuple[str, ...]:
    """Names of the modules, sources first, ties in the order of declaration."""
    order = {module.name: i for i, module in enumerate(graph.modules)}
    sorter: TopologicalSorter[str] = TopologicalSorter({name: set() for name in order})
    for flow in graph.flows:
        if flow.source != flow.destination:
            sorter.add(flow.destination, flow.source)
    sorter.prepare()
    names: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=order.__getitem__)
        names.append(ready.pop(0))
        sorter.done(names[-1])
    return tuple(names)


def _check(graph: ModelGraph) -> None:
    names = [module.name for module in graph.modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"module {name} is defined {names.count(name)} times; names must be unique")
    for module in graph.modules:
        if not module.layers:
            raise ValueError(f"module {module.name} has no layers")
        _check_names(module)
    brought: dict[tuple[str, str], Flow] = {}
    for flow in graph.flows:
        for end in (flow.source, flow.destination):
            if end not in names:
                raise ValueError(
                    f"flow {flow.source} -> {flow.destination}: there is no module {end}; there are {', '.join(names)}"
                )
        if (flow.destination, flow.name) in brought:
            raise ValueError(f"two flows bring {flow.name} to {flow.destination}; give them different names")
        brought[flow.destination, flow.name] = flow
        if flow.name in _carried(graph.by_name[flow.destination]):
            raise ValueError(
                f"flow {flow.source}.{flow.tensor} -> {flow.destination}: its name {flow.name} is also that of a tensor "
                f"that layers of {flow.destination} carry; give the flow another name"
            )
        position, _ = graph.sent(flow)
        readers = [p for p, layer in positions(graph.by_name[flow.destination]) if flow.name in layer.reads]
        if not readers:
            raise ValueError(
                f"flow {flow.source}.{flow.tensor} -> {flow.destination}: no layer of {flow.destination} reads {flow.name}"
            )
        if flow.source == flow.destination and min(readers) <= position:
            raise ValueError(
                f"{flow.source}: layer {min(readers)} reads {flow.name}, which layer {position} sends only later"
            )
    for module in graph.modules:
        for position, layer in positions(module):
            for name in layer.reads:
                if (module.name, name) not in brought:
                    raise ValueError(f"layer {position} of {module.name} reads {name}, but no flow brings it")
    try:
        topological(graph)
    except CycleError as error:
        raise ValueError(f"the flows form a cycle: {' -> '.join(error.args[1])}") from None


def _check_names(module: Module) -> None:
    """Tensors that leave a chunk go by name, so what a module carries and what its layers send must differ."""
    senders: dict[str, int] = {}
    for position, layer in positions(module):
        for spec in layer.sends:
            if spec.name in senders:
                raise ValueError(
                    f"layers {senders[spec.name]} and {position} of {module.name} both send {spec.name}; "
                    f"give them different names"
                )
            if spec.name in _carried(module):
                raise ValueError(
                    f"layer {position} of {module.name} sends {spec.name}, which layers of {module.name} also carry; "
                    f"give what is sent a name of its own"
                )
            senders[spec.name] = position


def _carried(module: Module) -> set[str]:
    return {spec.name for _, layer in positions(module) for spec in layer.carries}
