"""Costs of a model on a machine, as planner, compiler and emulator ask for them (`pipeweaver/costs.py`).

    costs = SemuCosts(graph, load_machine("H800"), tensor_parallel=8, widths={"pixels": 588})
    costs.stage(Chunk(task="main", module="language", start=0, stop=20, worker=0), items, links)

Every distinct layer is traced once or a few times; a stage is the sum over its layers. A worker of several devices
counts as one: its times are those of any of its devices, its bytes are the sum over them, so a memory budget for
a worker is devices times a device's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from pipeweaver.costs import StageCost, StrategyCost
from pipeweaver.data.items import Item
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.ir import ITEM_SIZES, Chunk, Strategy
from pipeweaver.semu.correct import Factors, key_of
from pipeweaver.semu.latency import (
    LayerCost,
    LayerCosts,
    Layout,
    Rule,
    add_covered,
    gathered,
    layer_costs,
)
from pipeweaver.semu.layer import LayerGraph, Parameters, Records, counts_by_length
from pipeweaver.semu.machine import Group, Machine, collective_ns, transfer_ns
from pipeweaver.semu.model_layers import inside, module_layers
from pipeweaver.semu.optimizer import USUAL, Optimizer
from pipeweaver.semu.stage import Run, stage_costs
from pipeweaver.semu.strategies import Options, layer_options, slower, slower_options
from pipeweaver.semu.symbolic import Family, Sums, measure

EFFICIENT_ROWS = 32_768
"""Rows at which a module counts as running at its most efficient size: factors are within a percent of their limit."""

MOST_LAYERS = 20_000
"""Costs of layers on parts that are kept."""


Answer = TypeVar("Answer")


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


@dataclass
class Together:
    """Parts of one family that are asked about at once, and what has been found out about layers on them."""

    sums: Sequence[Sums]
    records: Records
    rows: dict[LayerGraph, list[tuple[LayerCosts, int]]] = field(default_factory=dict)
    costs: dict[LayerGraph, LayerCosts | None] = field(default_factory=dict)
    options: dict[tuple[LayerGraph, bool], list[dict[Strategy, StrategyCost]]] = field(default_factory=dict)


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
        self.optimizer = optimizer or USUAL[dtype]
        self.workers = workers
        self.rules = tuple(rules)
        self.widths = dict(widths or {})
        self.source = _source(machine, tensor_parallel)
        machine.peak(dtype)
        self._modules = module_layers(graph, getattr(torch, dtype), self.widths, machine.kernels, reuse)
        self._by_length = counts_by_length(machine.kernels)
        self._chunks: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        self._distinct_runs: dict[tuple[Run, ...], tuple[Run, ...]] = {}
        self._known: dict[tuple[LayerGraph, object, int], tuple[LayerCosts, int]] = {}
        self._covered = np.zeros(3)
        self._variants: dict[tuple[LayerGraph, Strategy], LayerGraph] = {}
        self._factors: Factors = {}
        self._named: dict[str, Parameters] = {}

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        asked = self._part(items, links)
        (cost,) = self._answers(self._runs(chunk.module, chunk.start, chunk.stop), asked)
        return slower(cost, self._factor(chunk))

    def stages(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[StageCost]:
        if not self.reuse:
            return [self.stage(chunk, *_records(table, items)) for chunk, items in asked]
        found = self._together(table, asked, self._answers)
        return [slower(cost, self._factor(chunk)) for (chunk, _), cost in zip(asked, found, strict=True)]

    def _together(
        self,
        table: ItemTable,
        asked: Sequence[tuple[Chunk, Sequence[int]]],
        answers: Callable[[tuple[Run, ...], Together], list[Answer]],
    ) -> list[Answer]:
        """Answers to all questions: equal chunks with the same items are asked for once, parts of one family together."""
        parts = list({id(items): items for _, items in asked}.values())
        sums = dict(zip(map(id, parts), measure(table, parts, by_length=self._by_length), strict=True))
        by_runs: dict[int, tuple[tuple[Run, ...], dict[int, Sequence[int]]]] = {}
        keys = []
        for chunk, items in asked:
            runs = self._runs(chunk.module, chunk.start, chunk.stop)
            by_runs.setdefault(id(runs), (runs, {}))[1][id(items)] = items
            keys.append((id(runs), id(items)))
        # All chunks of a module have the same parts: what its layers cost on them is looked up once.
        groups: dict[tuple[int, ...], Together] = {}
        found: dict[tuple[int, int], Answer] = {}
        for runs, of in by_runs.values():
            by_family: dict[Family, list[int]] = {}
            for one in of:
                by_family.setdefault(sums[one].family, []).append(one)
            for members in by_family.values():
                key = tuple(members)
                if key not in groups:
                    chosen = [of[one] for one in members]
                    groups[key] = Together([sums[one] for one in members], partial(_records_of, table, chosen))
                answered = answers(runs, groups[key])
                found |= zip([(id(runs), one) for one in members], answered, strict=True)
        return [found[key] for key in keys]

    def useful_ns(self, module: str, table: ItemTable, items: Sequence[int]) -> int:
        rows = int(table.sizes("tokens")[list(items)].sum())
        copies = max(1, -(-EFFICIENT_ROWS // max(1, rows)))
        asked = Together(
            measure(table, [items], copies, by_length=self._by_length), partial(_records_of, table, [items])
        )
        total = 0.0
        number = Counter[tuple[LayerGraph, bool]]()
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            number[run.layer, run.backward] += run.repeats
        for (layer, backward), repeats in number.items():
            ((costs, row),) = self._looked_up(layer, asked, copies)
            phases = costs.phase_ns[row].tolist()
            total += repeats * (sum(phases) if backward else phases[0])
        of_module = [factor for key, factor in self._factors.items() if key.startswith(f"{module}/")]
        return round(total / copies * (sum(of_module) / len(of_module) if of_module else 1.0))

    def flops(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> float:
        """Model FLOPs of forward and backward of the items over the whole module: what a causal kernel skips and what
        no loss needs left out."""
        part = self._part(items, links)
        total = 0.0
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            ((costs, row),) = self._layers(run.layer, part)
            cost = costs.one(row)
            total += run.repeats * sum(cost.phase_flops[phase] for phase in ("FIW" if run.backward else "F"))
        return total

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int:
        if sender == receiver:
            return 0
        per_island = max(1, self.machine.devices_per_island // self.layout.tensor_parallel)
        crosses = sender // per_island != receiver // per_island
        return round(transfer_ns(self.machine, num_bytes, crosses=crosses, devices=self.layout.tensor_parallel))

    def post_ns(self, num_bytes: int) -> int:
        overheads = self.machine.overheads
        return round(overheads.post_ns + num_bytes * overheads.post_byte_ns)

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
        total_ns, guessed_ns, num_guessed = self._covered.tolist()
        return Coverage(total_ns=total_ns, guessed_ns=guessed_ns, num_guessed=int(num_guessed))

    def layers(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]], strategies: Sequence[Strategy] = ()
    ) -> list[tuple[LayerCost, bool]]:
        """(cost, whether it takes part in the backward) of every layer of a stage, in order, under its memory strategy;
        without strategies, all keep what they save."""
        part = self._part(items, links)
        runs = [run for run in self._runs(chunk.module, chunk.start, chunk.stop) for _ in range(run.repeats)]
        keep: Strategy = "keep"
        found = []
        for run, strategy in zip(runs, strategies or [keep] * len(runs), strict=True):
            again = strategy in ("recompute", "recompute-attention") and run.backward
            layer = self._variant(run.layer, strategy) if again else run.layer
            ((costs, row),) = self._layers(layer, part)
            found.append((costs.one(row), run.backward))
        return found

    def strategies(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Options:
        """For every layer of a stage, what each memory strategy costs; only "keep" where there is no backward.

        Recomputation is traced as the runtime does it, so it stops where nothing more is needed.
        """
        asked = self._part(items, links)
        (found,) = self._options(self._runs(chunk.module, chunk.start, chunk.stop), asked)
        return slower_options(found, self._factor(chunk))

    def strategies_of(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[Options]:
        if not self.reuse:
            return [self.strategies(chunk, *_records(table, items)) for chunk, items in asked]
        found = self._together(table, asked, self._options)
        return [slower_options(options, self._factor(chunk)) for (chunk, _), options in zip(asked, found, strict=True)]

    def _options(self, runs: tuple[Run, ...], parts: Together) -> list[Options]:
        """For each part what each strategy of each run's layers costs, before correction."""
        found: list[list[dict[Strategy, StrategyCost]]] = [[] for _ in parts.sums]
        for run in runs:
            key = (run.layer, run.backward)
            if key not in parts.options:
                parts.options[key] = self._layer_options(*key, parts)
            for part, options in zip(found, parts.options[key], strict=True):
                part += [options] * run.repeats
        return [tuple(of) for of in found]

    def _layer_options(self, layer: LayerGraph, backward: bool, parts: Together) -> list[dict[Strategy, StrategyCost]]:
        """For each part what each strategy of a layer costs."""
        kept = self._layers(layer, parts)
        recomputing: tuple[Strategy, ...] = ("recompute", "recompute-attention") if backward else ()
        others = {name: self._layers(self._variant(layer, name), parts) for name in recomputing}
        return layer_options(kept, others, backward, self.machine, self.layout)

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
        """Layers of a chunk, equal neighbours together; the same object for equal ones."""
        key = (module, start, stop)
        if key not in self._chunks:
            layers = [self._modules[module][position] for position in inside(self.graph.by_name[module], start, stop)]
            runs = tuple(
                Run(layer=layer, backward=backward, repeats=len(list(same)))
                for (layer, backward), same in groupby(layers, key=lambda one: one)
            )
            self._chunks[key] = self._distinct_runs.setdefault(runs, runs)
        return self._chunks[key]

    def _factor(self, chunk: Chunk) -> float:
        return self._factors.get(key_of(chunk.module, chunk.worker), 1.0)

    def _answers(self, runs: tuple[Run, ...], parts: Together) -> list[StageCost]:
        """Costs of a stage on each part."""
        costs = [cost for run in runs if (cost := self._on_all(run.layer, parts)) is not None]
        if len(costs) == len(runs):
            return stage_costs(runs, costs, parts.sums, self.machine, self.layout)
        rows = [self._layers(run.layer, parts) for run in runs]
        return [
            stage_costs(runs, [gathered([of[i]]) for of in rows], [part], self.machine, self.layout)[0]
            for i, part in enumerate(parts.sums)
        ]

    def _on_all(self, layer: LayerGraph, parts: Together) -> LayerCosts | None:
        """Costs of a layer on all parts; None if they are of several structures."""
        if layer not in parts.costs:
            rows = self._layers(layer, parts)
            same = all(of.structure is rows[0][0].structure for of, _ in rows)
            parts.costs[layer] = gathered(rows) if same else None
        return parts.costs[layer]

    def _layers(self, layer: LayerGraph, parts: Together) -> list[tuple[LayerCosts, int]]:
        """Costs of a layer on each part: among which and in which row."""
        if layer not in parts.rows:
            parts.rows[layer] = self._looked_up(layer, parts)
        return parts.rows[layer]

    def _looked_up(self, layer: LayerGraph, parts: Together, copies: int = 1) -> list[tuple[LayerCosts, int]]:
        """The same, from what is known of equal parts where possible."""
        sums = parts.sums
        kept = self.reuse and not layer.is_irregular(sums[0].family)
        found = [self._known.get((layer, layer.needed(part), copies)) if kept else None for part in sums]
        missing = [i for i, one in enumerate(found) if one is None]
        if missing:
            chosen = [sums[i] for i in missing]
            for block in layer.counts_of(chosen, lambda i: parts.records(missing[i]), copies):
                costs = layer_costs(block.structure, block.values, self.machine, self.layout, self.rules)
                add_covered(self._covered, costs.phase_ns, costs.guessed_ns, costs.numbers)
                for row, i in enumerate(block.parts):
                    found[missing[i]] = (costs, row)
            if len(self._known) >= MOST_LAYERS:
                self._known.clear()
            for i in missing:
                one = found[i]
                assert one is not None
                self._known[layer, layer.needed(sums[i]), copies] = one
        return found  # type: ignore[return-value]

    def _part(self, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Together:
        """One part alone."""
        table = ItemTable.of_part(items, links)
        return Together(measure(table, [range(len(items))], by_length=self._by_length), lambda _: (items, links))

    def _parameters(self, name: str) -> Parameters:
        """Of a layer ("language.layers.3") or of one parameter of it ("language.before.embedding.weight")."""
        if name in self._named:
            return self._named[name]
        module, place, *rest = name.split(".")
        ends = {"before": -1, "after": len(self.graph.by_name[module].layers)}
        position = ends[place] if place in ends else int(rest.pop(0))
        self._named[name] = self._modules[module][position][0].parameters(".".join(rest))
        return self._named[name]


def _records(table: ItemTable, items: Sequence[int]) -> tuple[list[Item], list[Sequence[Item]]]:
    """The items of a part, and what is linked to each of them."""
    return [table.items[i] for i in items], [table.sources[i] for i in items]


def _records_of(
    table: ItemTable, parts: Sequence[Sequence[int]], number: int
) -> tuple[list[Item], list[Sequence[Item]]]:
    """The same of one of several parts."""
    return _records(table, parts[number])


def _source(machine: Machine, tensor_parallel: int) -> str:
    how = machine.calibrated or "not calibrated, factors are defaults"
    devices = "" if tensor_parallel == 1 else f", {tensor_parallel} devices per worker"
    return f"emulated {machine.name}{devices}: {how}"
