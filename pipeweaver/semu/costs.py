"""Costs of a model on a machine, as planner, compiler and emulator ask for them (`pipeweaver/costs.py`).

    costs = SemuCosts(graph, load_machine("H800"), tensor_parallel=8, widths={"pixels": 588})
    costs.stage(Chunk(task="main", module="language", start=0, stop=20, worker=0), items, links)

Every distinct layer is traced once or a few times; a stage is the sum over its layers. A worker of several devices
counts as one: its times are those of any of its devices, its bytes are the sum over them, so a memory budget for
a worker is devices times a device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from pipeweaver.costs import StageCost, StrategyCost
from pipeweaver.data.items import Item
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.ir import ITEM_SIZES, Chunk, Strategy
from pipeweaver.semu.correct import Factors, key_of
from pipeweaver.semu.latency import LayerCost, Layout, Rule, layer_cost
from pipeweaver.semu.layer import LayerGraph, Parameters
from pipeweaver.semu.machine import Group, Machine, collective_ns, transfer_ns
from pipeweaver.semu.model_layers import inside, module_layers
from pipeweaver.semu.symbolic import Sums, measure

EFFICIENT_ROWS = 32_768
"""Rows at which a module counts as running at its most efficient size: factors are within a percent of their limit."""

MOST_ITEMS = 100_000
"""Items whose sizes are kept for looking up."""

MOST_PARTS = 4096
"""Parts whose sums are kept: until all layers have been asked for them."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What training keeps per parameter, in bytes: the gradient, and the state (float32 master copy and two
    moments of Adam in mixed precision, two moments in float32), which `shards` replicas share out."""

    gradient: int = 4
    state: int = 12
    shards: int = 1

    def bytes_per_parameter(self, parameter: int) -> float:
        return parameter + self.gradient + self.state / self.shards

    def moved_bytes(self, parameter: int) -> float:
        """By a step, per parameter: the gradient is read twice (norm, step) and zeroed; states are read and written by
        who owns them."""
        return 3 * self.gradient + parameter + 2 * self.state / self.shards


def plain_optimizer(dtype: str) -> Optimizer:
    """What this runtime keeps: gradients and both moments of AdamW in the parameters' own dtype."""
    item = ITEM_SIZES[dtype]
    return Optimizer(gradient=item, state=2 * item)


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

    def __str__(self) -> str:
        return f"{self.guessed_share:.0%} of the time ({self.num_guessed} launches) rests on defaults"


class Run(NamedTuple):
    """`repeats` equal layers, one after the other; `backward`: they take part in the backward."""

    layer: LayerGraph
    backward: bool
    repeats: int


class SemuCosts:
    """The Costs protocol, from traced layers on a machine. Equal questions have equal answers.

    `tensor_parallel` devices make up a worker. `widths` are the columns of loaded tensors ("pixels").
    `rules` override operators. `workers` is the number of workers of a replica: where they fill their
    islands, replicas are reached over the network between islands. With `reuse=False` nothing is shared between
    equal layers, parts and workers, and every question is answered from the traces.
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
        reuse: bool = True,
    ) -> None:
        self.reuse = reuse
        self.graph = graph
        self.machine = machine
        self.layout = Layout(tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel, dtype=dtype)
        self.optimizer = optimizer or _OPTIMIZERS[dtype]
        self.workers = workers
        self.rules = tuple(rules)
        self.widths = dict(widths or {})
        self.source = _source(machine, tensor_parallel)
        machine.peak(dtype)
        self._modules = module_layers(graph, getattr(torch, dtype), self.widths, machine.kernels, reuse)
        self._chunks: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        self._stages: dict[tuple[tuple[Run, ...], object], StageCost] = {}
        self._known: dict[tuple[LayerGraph, object, int], LayerCost] = {}
        self._variants: dict[tuple[LayerGraph, Strategy], LayerGraph] = {}
        self._items: dict[int, int] = {}
        self._kept: list[Item] = []
        self._tuples: dict[int, tuple[Sequence[Item], tuple[int, ...]]] = {}
        self._factors: Factors = {}
        self._numbers: dict[object, int] = {}
        self._sums: dict[tuple[object, int], Sums] = {}

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        runs = self._runs(chunk.module, chunk.start, chunk.stop)
        key = (runs, self._sizes(items, links))
        if key not in self._stages or not self.reuse:
            self._stages[key] = self._stage(runs, items, links, key[1])
        factor = self._factors.get(key_of(chunk.module, chunk.worker), 1.0)
        return self._stages[key] if factor == 1.0 else slower(self._stages[key], factor)

    def useful_ns(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> int:
        rows = sum(item.sizes["tokens"] for item in items)
        copies = max(1, -(-EFFICIENT_ROWS // max(1, rows)))
        sizes = self._sizes(items, links)
        total = 0.0
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            total += run.repeats * _duration_ns(self._layer(run.layer, items, links, sizes, copies), run.backward)
        of_module = [factor for key, factor in self._factors.items() if key.startswith(f"{module}/")]
        return round(total / copies * (sum(of_module) / len(of_module) if of_module else 1.0))

    def flops(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> float:
        """Model FLOPs of forward and backward of the items over the whole module: what a causal kernel skips and what
        no loss needs left out."""
        sizes = self._sizes(items, links)
        total = 0.0
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            cost = self._layer(run.layer, items, links, sizes)
            total += run.repeats * sum(cost.phase_flops[phase] for phase in ("FIW" if run.backward else "F"))
        return total

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
        moved = count * self.optimizer.moved_bytes(item)
        memory, found = self.machine.memory, self.machine.optimizer
        if found is None:
            return round(memory.access_ns + 1e9 * moved / (self.machine.memory_bandwidth * memory.factor))
        beside = parameters.number * found.parameter_ns
        return round(beside + 1e9 * moved / (self.machine.memory_bandwidth * found.factor))

    def anew(self) -> SemuCosts:
        """The same costs with nothing known, nor reused."""
        found = SemuCosts(
            self.graph,
            self.machine,
            tensor_parallel=self.layout.tensor_parallel,
            sequence_parallel=self.layout.sequence_parallel,
            dtype=self.layout.dtype,
            widths=self.widths,
            optimizer=self.optimizer,
            workers=self.workers,
            rules=self.rules,
            reuse=False,
        )
        return found.corrected(self._factors) if self._factors else found

    def corrected(self, factors: Factors) -> SemuCosts:
        """The same costs with times of stages multiplied by a factor per module and worker (`correct.py`); 1 where there
        is none. What is known already is shared."""
        found = copy(self)
        found._factors = dict(factors)
        listed = ", ".join(f"{key} by {factor:.4g}" for key, factor in factors.items())
        found.source = f"{self.source}, corrected: {listed}" if listed else self.source
        return found

    @property
    def coverage(self) -> Coverage:
        """Of all layers costed so far, the share of time that rests on defaults instead of measurements."""
        return Coverage(
            total_ns=sum(sum(cost.phase_ns.values()) for cost in self._known.values()),
            guessed_ns=sum(cost.guessed_ns for cost in self._known.values()),
            num_guessed=sum(cost.num_guessed for cost in self._known.values()),
        )

    def layers(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]], strategies: Sequence[Strategy] = ()
    ) -> list[tuple[LayerCost, bool]]:
        """(cost, whether it takes part in the backward) of every layer of a stage, in order, under its memory strategy;
        without strategies, all keep what they save."""
        sizes = self._sizes(items, links)
        runs = [run for run in self._runs(chunk.module, chunk.start, chunk.stop) for _ in range(run.repeats)]
        keep: Strategy = "keep"
        found = []
        for run, strategy in zip(runs, strategies or [keep] * len(runs), strict=True):
            again = strategy in ("recompute", "recompute-attention") and run.backward
            layer = self._variant(run.layer, strategy) if again else run.layer
            found.append((self._layer(layer, items, links, sizes), run.backward))
        return found

    def strategies(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> tuple[dict[Strategy, StrategyCost], ...]:
        """For every layer of a stage, what each memory strategy costs; only "keep" where there is no backward.

        Recomputation is traced as the runtime does it, so it stops where nothing more is needed.
        """
        sizes = self._sizes(items, links)
        factor = self._factors.get(key_of(chunk.module, chunk.worker), 1.0)
        found: list[dict[Strategy, StrategyCost]] = []
        for run in self._runs(chunk.module, chunk.start, chunk.stop):
            keep = self._layer(run.layer, items, links, sizes)
            options: dict[Strategy, StrategyCost] = {"keep": self._strategy(keep, keep, run.backward, factor)}
            if run.backward:
                recomputing: tuple[Strategy, Strategy] = ("recompute", "recompute-attention")
                for strategy in recomputing:
                    other = self._layer(self._variant(run.layer, strategy), items, links, sizes)
                    options[strategy] = self._strategy(other, keep, True, factor)
            if run.backward and self.machine.kernels != "cpu":  # a CPU's memory is the host's
                away = options["keep"].saved_bytes / self.layout.tensor_parallel
                offload_ns = round(1e9 * away / self.machine.host_bandwidth)
                options["offload"] = StrategyCost(saved_bytes=0, extra_ns=0, offload_ns=offload_ns)
            found += [options] * run.repeats
        return tuple(found)

    def _strategy(self, cost: LayerCost, keep: LayerCost, backward: bool, factor: float) -> StrategyCost:
        extra, degree = 0.0, self.layout.tensor_parallel
        if cost is not keep:
            extra = sum(cost.phase_ns.values()) - sum(keep.phase_ns.values()) + self.machine.overheads.recompute_ns
        saved = cost.saved_bytes * degree if backward else 0
        return StrategyCost(
            saved_bytes=saved,
            extra_ns=max(0, round(extra * factor)),
            forward_workspace_bytes=max(0, cost.forward_live * degree - saved),
            backward_workspace_bytes=max(0, cost.backward_live * degree - saved) if backward else 0,
        )

    def _variant(self, layer: LayerGraph, strategy: Strategy) -> LayerGraph:
        key = (layer, strategy)
        if key not in self._variants:
            self._variants[key] = LayerGraph(
                layer.spec,
                layer.inputs,
                dtype=layer.dtype,
                widths=layer.widths,
                kernels=layer.kernels,
                strategy=strategy,
            )
        return self._variants[key]

    def _runs(self, module: str, start: int, stop: int) -> tuple[Run, ...]:
        """Layers of a chunk, equal neighbours together."""
        key = (module, start, stop)
        if key not in self._chunks:
            layers = [self._modules[module][position] for position in inside(self.graph.by_name[module], start, stop)]
            self._chunks[key] = tuple(
                Run(layer=layer, backward=backward, repeats=len(list(same)))
                for (layer, backward), same in groupby(layers, key=lambda one: one)
            )
        return self._chunks[key]

    def _stage(
        self, runs: Sequence[Run], items: Sequence[Item], links: Sequence[Sequence[Item]], sizes: object
    ) -> StageCost:
        costs = [self._layer(run.layer, items, links, sizes) for run in runs]
        degree = self.layout.tensor_parallel
        forward, first, second, load_ns, weight, loaded = 0.0, 0.0, 0.0, 0.0, 0, 0
        own: list[int] = []
        held: list[int] = []
        before = None
        for run, cost in zip(runs, costs, strict=True):
            # Whole nanoseconds, so that equal layers together take what they take one by one.
            forward += run.repeats * round(cost.phase_ns["F"])
            for name in cost.counts.structure.loaded:
                num_bytes = cost.counts.tensor_bytes(name)
                loaded += num_bytes
                load_ns += self._load_ns(name, len(items), num_bytes)
            own.append(0)
            held.append(0)
            if run.backward:
                first += run.repeats * round(cost.phase_ns["I"])
                second += run.repeats * round(cost.phase_ns["W"])
                weight += run.repeats * cost.weight_bytes * degree
                own[-1] = cost.saved_bytes * degree
                entering = _between_bytes(before, cost, self.layout) if before else 0
                between = _between_bytes(cost, cost, self.layout)
                held[-1] = run.repeats * own[-1] + entering + (run.repeats - 1) * between
            before = cost
        learns = [run.backward for run in runs]
        # Each kind of layer has the part make its own tables.
        shared = {run.layer.spec.kind: cost.shared_bytes for run, cost in zip(runs, costs, strict=True)}
        beside = self.machine.overheads
        forward += beside.stage_forward_ns
        backward = first + second + beside.stage_backward_ns if any(learns) else 0.0
        put_off = sum(run.repeats * cost.launches * run.backward for run, cost in zip(runs, costs, strict=True))
        input_ns = first + put_off * beside.split_ns + beside.stage_backward_ns if any(learns) else 0.0
        forward_live = [cost.forward_live * degree for cost in costs]
        backward_live = [cost.backward_live * degree * learns[i] for i, cost in enumerate(costs)]
        return StageCost(
            forward_ns=round(forward),
            backward_ns=round(backward),
            load_ns=round(load_ns),
            input_ns=round(input_ns),
            weight_ns=round(second * beside.split_weight),
            loaded_bytes=loaded,
            saved_bytes=sum(held) + sum(shared.values()) * degree * any(learns),
            forward_workspace_bytes=_workspace(forward_live, own, held),
            backward_workspace_bytes=_workspace(backward_live, own, held),
            weight_bytes=weight,
        )

    def _load_ns(self, name: str, num_items: int, num_bytes: int) -> float:
        found = self.machine.loads.get(name)
        if found is None:
            return 1e9 * num_bytes / self.layout.tensor_parallel / self.machine.host_bandwidth
        return found.part_ns + num_items * found.item_ns + num_bytes * found.byte_ns

    def _layer(
        self,
        layer: LayerGraph,
        items: Sequence[Item],
        links: Sequence[Sequence[Item]],
        sizes: object,
        copies: int = 1,
    ) -> LayerCost:
        key = (layer, sizes, copies)
        if key not in self._known or not self.reuse:
            # Layers of one part follow each other: they share its sums.
            part = (sizes, copies)
            if part not in self._sums:
                if len(self._sums) >= MOST_PARTS:
                    self._sums.clear()
                self._sums[part] = measure(items, links, copies, by_length=layer.by_length)
            counts = layer.counts(items, links, copies, self._sums[part])
            self._known[key] = layer_cost(counts, self.machine, self.layout, self.rules)
        return self._known[key]

    def _sizes(self, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> object:
        """All that the cost of a part may depend on, as something to look up by: a number per item."""
        return self._numbers_of(items), tuple([self._numbers_of_tuple(sources) for sources in links])

    def _numbers_of_tuple(self, items: Sequence[Item]) -> tuple[int, ...]:
        """The same, looked up where it is the very tuple that was asked for before: every layer asks for its links."""
        if not items:
            return ()
        found = self._tuples.get(id(items))
        if found is None or found[0] is not items:
            if len(self._tuples) >= MOST_ITEMS:
                self._tuples.clear()
            found = (items, self._numbers_of(items))
            if isinstance(items, tuple):
                self._tuples[id(items)] = found
        return found[1]

    def _numbers_of(self, items: Sequence[Item]) -> tuple[int, ...]:
        """One number for all items of equal module and sizes."""
        known = self._items.get
        found = [known(id(item)) for item in items]
        if None in found:
            if len(self._items) >= MOST_ITEMS:
                self._items.clear()
                self._kept.clear()
            for item in items:
                if id(item) not in self._items:
                    key = (item.module, *sorted(item.sizes.items()))
                    self._items[id(item)] = self._numbers.setdefault(key, len(self._numbers))
                    self._kept.append(item)  # so that no other item gets its id
            found = [known(id(item)) for item in items]
        return tuple(found)  # type: ignore[arg-type]

    def _parameters(self, name: str) -> Parameters:
        """Of a layer ("language.layers.3") or of one parameter of it ("language.before.embedding.weight")."""
        module, place, *rest = name.split(".")
        ends = {"before": -1, "after": len(self.graph.by_name[module].layers)}
        position = ends[place] if place in ends else int(rest.pop(0))
        return self._modules[module][position][0].parameters(".".join(rest))


def slower(cost: StageCost, factor: float) -> StageCost:
    """A stage that computes `factor` times as long."""
    return cost._replace(
        forward_ns=round(cost.forward_ns * factor),
        backward_ns=round(cost.backward_ns * factor),
        input_ns=round(cost.input_ns * factor),
        weight_ns=round(cost.weight_ns * factor),
    )


_OPTIMIZERS = {
    "bfloat16": Optimizer(gradient=4, state=12),
    "float16": Optimizer(gradient=4, state=12),
    "float32": Optimizer(gradient=4, state=8),
    "float64": Optimizer(gradient=8, state=16),
}


def _between_bytes(before: LayerCost, after: LayerCost, layout: Layout) -> int:
    """Bytes on a worker of the tensors between two layers that either of them holds for its backward."""
    names = after.counts.structure.saved_inputs | before.counts.structure.saved_outputs
    sent = [name for name in names if before.counts.tensor_bytes(f"out.{name}")]
    return sum(after.counts.tensor_bytes(name) * layout.tensor_parallel // layout.row_cut for name in sent)


def _duration_ns(cost: LayerCost, backward: bool) -> float:
    return sum(cost.phase_ns.values()) if backward else cost.phase_ns["F"]


def _workspace(live: Sequence[int], own: Sequence[int], held: Sequence[int]) -> int:
    """What a stage needs beyond all that it saves, `held` by runs of equal layers, of which the last one peaks.

    A layer that holds `live` while it runs keeps `own` of it; the layers after it hold nothing yet (forward) or
    nothing any more (backward).
    """
    after = sum(held)
    worst = 0
    for bytes_live, bytes_own, bytes_held in zip(live, own, held, strict=True):
        after -= bytes_held
        worst = max(worst, bytes_live - bytes_own - after)
    return worst


def _source(machine: Machine, tensor_parallel: int) -> str:
    how = machine.calibrated or "not calibrated, factors are defaults"
    devices = "" if tensor_parallel == 1 else f", {tensor_parallel} devices per worker"
    return f"emulated {machine.name}{devices}: {how}"
