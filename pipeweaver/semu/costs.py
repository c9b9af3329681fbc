"""Costs of a model on a machine, as planner, compiler and emulator ask for them (`pipeweaver/costs.py`).

    costs = SemuCosts(graph, load_machine("H800"), tensor_parallel=8, widths={"pixels": 588})
    costs.stage(Chunk(task="main", module="language", start=0, stop=20, worker=0), items, links)

Every distinct layer is traced once or a few times; a stage is the sum over its layers. A worker of several devices
counts as one: its times are those of any of its devices, its bytes are the sum over them, so a memory budget for
a worker is devices times a device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pipeweaver.costs import StageCost
from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, positions
from pipeweaver.schedule.connect import Gradients
from pipeweaver.schedule.ir import ITEM_SIZES, Chunk
from pipeweaver.semu.kernels import Kernels
from pipeweaver.semu.latency import LayerCost, Layout, Rule, layer_cost
from pipeweaver.semu.layer import Input, LayerGraph, Parameters, sizes_key
from pipeweaver.semu.machine import Group, Machine, collective_ns, transfer_ns

EFFICIENT_ROWS = 32_768
"""Rows at which a module counts as running at its most efficient size: factors are within a percent of their limit."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What training keeps per parameter, in bytes: the gradient, and the state (float32 master copy and two
    moments of Adam in mixed precision, two moments in float32), which `shards` replicas share out."""

    gradient: int = 4
    state: int = 12
    shards: int = 1

    def bytes_per_parameter(self, parameter: int) -> float:
        return parameter + self.gradient + self.state / self.shards


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of what was asked rests on measurements: share of time from defaults, and operators that did."""

    total_ns: float
    guessed_ns: float
    num_guessed: int
    """Launches."""

    @property
    def guessed_share(self) -> float:
        return self.guessed_ns / self.total_ns if self.total_ns else 0.0


@dataclass(eq=False, kw_only=True)
class _Layers:
    """A module's layers by position: -1 for `before`, n for `after`."""

    module: Module
    graphs: dict[int, LayerGraph]
    backward: dict[int, bool]
    known: dict[tuple[int, object], LayerCost] = field(default_factory=dict)


class SemuCosts:
    """The Costs protocol, from traced layers on a machine. Equal questions have equal answers.

    `tensor_parallel` devices make up a worker. `widths` are the columns of loaded tensors ("pixels").
    `rules` override operators. `workers` is the number of workers of a replica: where they fill their
    islands, replicas are reached over the network between islands.
    """

    def __init__(
        self,
        graph: ModelGraph,
        machine: Machine,
        *,
        tensor_parallel: int = 1,
        sequence_parallel: bool = True,
        dtype: str = "bfloat16",
        widths: Mapping[str, int] | None = None,
        optimizer: Optimizer | None = None,
        workers: int = 1,
        rules: Sequence[Rule] = (),
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.layout = Layout(tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel, dtype=dtype)
        self.optimizer = optimizer or _OPTIMIZERS[dtype]
        self.workers = workers
        self.rules = tuple(rules)
        self.source = _source(machine, tensor_parallel)
        machine.peak(dtype)
        self._modules = _module_layers(graph, getattr(torch, dtype), widths or {}, machine.kernels)
        self._stages: dict[tuple[str, int, int, object], StageCost] = {}

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        sizes = sizes_key(items, links)
        key = (chunk.module, chunk.start, chunk.stop, sizes)
        if key not in self._stages:
            self._stages[key] = self._stage(chunk, items, links, sizes)
        return self._stages[key]

    def useful_ns(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> int:
        rows = sum(item.sizes["tokens"] for item in items)
        copies = max(1, -(-EFFICIENT_ROWS // max(1, rows)))
        many, many_links = [*items] * copies, [*links] * copies
        sizes = sizes_key(many, many_links)
        total = 0.0
        layers = self._modules[module]
        for position in layers.graphs:
            cost = self._layer(layers, position, many, many_links, sizes)
            total += cost.phase_ns["F"]
            if layers.backward[position]:
                total += cost.phase_ns["I"] + cost.phase_ns["W"]
        return round(total / copies)

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int:
        if sender == receiver:
            return 0
        per_island = max(1, self.machine.devices_per_island // self.layout.tensor_parallel)
        crosses = sender // per_island != receiver // per_island
        return round(transfer_ns(self.machine, num_bytes, crosses=crosses, devices=self.layout.tensor_parallel))

    def reduce_ns(self, holders: int, num_bytes: int) -> int:
        per_island = max(1, self.machine.devices_per_island // (self.layout.tensor_parallel * self.workers))
        group = Group(size=holders, per_island=min(holders, per_island))
        return round(collective_ns(self.machine, "all_reduce", num_bytes / self.layout.tensor_parallel, group))

    def parameter_bytes(self, layer: str) -> int:
        parameters = self._parameters(layer)
        return parameters.num_bytes if parameters.trainable else 0

    def static_bytes(self, layer: str) -> int:
        parameters = self._parameters(layer)
        num_bytes = parameters.on_device(self.layout.tensor_parallel) * self.layout.tensor_parallel
        item = ITEM_SIZES[self.layout.dtype]
        held = self.optimizer.bytes_per_parameter(item) if parameters.trainable else item
        return round(num_bytes / item * held)

    def optimizer_ns(self, layer: str) -> int:
        parameters = self._parameters(layer)
        if not parameters.trainable:
            return 0
        item = ITEM_SIZES[self.layout.dtype]
        count = parameters.on_device(self.layout.tensor_parallel) / item
        # The gradient is read twice (norm, step) and zeroed; states are read and written by who owns them.
        moved = count * (3 * self.optimizer.gradient + item + 2 * self.optimizer.state / self.optimizer.shards)
        memory = self.machine.memory
        return round(memory.access_ns + 1e9 * moved / (self.machine.memory_bandwidth * memory.factor))

    @property
    def coverage(self) -> Coverage:
        """Of all layers costed so far, the share of time that rests on defaults instead of measurements."""
        costs = [cost for layers in self._modules.values() for cost in layers.known.values()]
        return Coverage(
            total_ns=sum(sum(cost.phase_ns.values()) for cost in costs),
            guessed_ns=sum(cost.guessed_ns for cost in costs),
            num_guessed=sum(cost.num_guessed for cost in costs),
        )

    def layers(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> list[tuple[str, LayerCost, bool]]:
        """(name, cost, whether it takes part in the backward) of every layer of a stage, in order."""
        sizes = sizes_key(items, links)
        layers = self._modules[chunk.module]
        inside = _inside(layers.module, chunk.start, chunk.stop)
        return [
            (name, self._layer(layers, position, items, links, sizes), layers.backward[position])
            for position, (name, _) in zip(inside, layers.module.range(chunk.start, chunk.stop), strict=True)
        ]

    def _stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]], sizes: object) -> StageCost:
        costs = self.layers(chunk, items, links)
        degree = self.layout.tensor_parallel
        forward = sum(cost.phase_ns["F"] for _, cost, _ in costs)
        halves = {phase: sum(cost.phase_ns[phase] for _, cost, learns in costs if learns) for phase in ("I", "W")}
        held = [_held_bytes(costs, i, degree, self.layout) if costs[i][2] else 0 for i in range(len(costs))]
        loaded = sum(cost.counts.tensor_bytes[name] for _, cost, _ in costs for name in cost.counts.loaded)
        return StageCost(
            forward_ns=round(forward),
            backward_ns=round(halves["I"] + halves["W"]),
            load_ns=round(1e9 * loaded / degree / self.machine.host_bandwidth),
            input_ns=round(halves["I"]),
            weight_ns=round(halves["I"] + halves["W"]) - round(halves["I"]),
            loaded_bytes=loaded,
            saved_bytes=sum(held),
            forward_workspace_bytes=_workspace([c.forward_live * degree for _, c, _ in costs], held),
            backward_workspace_bytes=_workspace([c.backward_live * degree * learns for _, c, learns in costs], held),
            weight_bytes=sum(cost.weight_bytes * degree for _, cost, learns in costs if learns),
        )

    def _layer(
        self,
        layers: _Layers,
        position: int,
        items: Sequence[Item],
        links: Sequence[Sequence[Item]],
        sizes: object,
    ) -> LayerCost:
        graph = layers.graphs[position]
        key = (id(graph), sizes)
        if key not in layers.known:
            layers.known[key] = layer_cost(graph.counts(items, links), self.machine, self.layout, self.rules)
        return layers.known[key]

    def _parameters(self, layer: str) -> Parameters:
        name, _, rest = layer.partition(".")
        layers = self._modules[name]
        place = {"before": -1, "after": len(layers.module.layers)}
        return layers.graphs[place[rest] if rest in place else int(rest.removeprefix("layers."))].parameters


_OPTIMIZERS = {
    "bfloat16": Optimizer(gradient=4, state=12),
    "float16": Optimizer(gradient=4, state=12),
    "float32": Optimizer(gradient=4, state=8),
    "float64": Optimizer(gradient=8, state=16),
}


def _module_layers(
    graph: ModelGraph, dtype: torch.dtype, widths: Mapping[str, int], kernels: Kernels
) -> dict[str, _Layers]:
    """Layer graphs by module and position; layers of equal kind and inputs share one."""
    gradients = Gradients(graph)
    shared: dict[object, LayerGraph] = {}
    modules = {}
    for module in graph.modules:
        graphs: dict[int, LayerGraph] = {}
        for position, spec in positions(module):
            inputs = _inputs(graph, module, position, spec, gradients)
            key = (spec.kind, spec.trainable, inputs)
            if key not in shared:
                shared[key] = LayerGraph(spec, inputs, dtype=dtype, widths=widths, kernels=kernels)
            graphs[position] = shared[key]
        backward = {position: gradients.backward[module.name, position] for position, _ in positions(module)}
        modules[module.name] = _Layers(module=module, graphs=graphs, backward=backward)
    return modules


def _inputs(
    graph: ModelGraph, module: Module, position: int, spec: LayerSpec, gradients: Gradients
) -> tuple[Input, ...]:
    by_position = dict(positions(module))
    inputs = []
    if position - 1 in by_position:
        trained = gradients.trained[module.name, position - 1]
        inputs += [Input(spec=s, name=s.name, grad=s.grad and trained) for s in by_position[position - 1].carries]
    for flow in graph.flows:
        if flow.destination == module.name and flow.name in spec.reads:
            sent, tensor = graph.sent(flow)
            source = None if flow.source == module.name else flow.source
            grad = tensor.grad and gradients.trained[flow.source, sent]
            inputs.append(Input(spec=tensor, name=flow.name, source=source, grad=grad))
    return tuple(inputs)


def _inside(module: Module, start: int, stop: int) -> list[int]:
    before = [-1] if start == 0 and module.before is not None else []
    after = [len(module.layers)] if stop == len(module.layers) and module.after is not None else []
    return [*before, *range(start, stop), *after]


def _held_bytes(costs: Sequence[tuple[str, LayerCost, bool]], index: int, degree: int, layout: Layout) -> int:
    """Bytes on a worker that a layer holds for its backward, the tensors between it and the layer before included."""
    cost = costs[index][1]
    held = cost.saved_bytes * degree
    if index:
        before = costs[index - 1][1].counts
        for name in cost.counts.saved_inputs | before.saved_outputs:
            if f"out.{name}" in before.tensor_bytes and name in cost.counts.tensor_bytes:
                held += cost.counts.tensor_bytes[name] * degree // layout.row_cut
    return held


def _workspace(live: Sequence[int], held: Sequence[int]) -> int:
    """What a stage needs beyond all that it saves: the layer that peaks while the layers after it hold nothing."""
    after = sum(held)
    worst = 0
    for bytes_live, bytes_held in zip(live, held, strict=True):
        after -= bytes_held
        worst = max(worst, bytes_live - bytes_held - after)
    return worst


def _source(machine: Machine, tensor_parallel: int) -> str:
    how = machine.calibrated or "not calibrated, factors are defaults"
    devices = "" if tensor_parallel == 1 else f", {tensor_parallel} devices per worker"
    return f"emulated {machine.name}{devices}: {how}"
