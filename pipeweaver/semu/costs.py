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
from dataclasses import dataclass
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
    BACKWARD_LIVE,
    FORWARD_LIVE,
    SAVED_BYTES,
    LayerCost,
    LayerCosts,
    Layout,
    Rule,
    add_covered,
    gathered,
    layer_costs,
)
from pipeweaver.semu.layer import LayerGraph, Parameters, Records, counts_by_length, sizes_key
from pipeweaver.semu.machine import Group, Machine, collective_ns, transfer_ns
from pipeweaver.semu.model_layers import inside, module_layers
from pipeweaver.semu.optimizer import USUAL, Optimizer
from pipeweaver.semu.stage import Run, num_items, stage_costs
from pipeweaver.semu.symbolic import Family, Sums, measure

EFFICIENT_ROWS = 32_768
"""Rows at which a module counts as running at its most efficient size: factors are within a percent of their limit."""

MOST_ITEMS = 100_000
"""Items whose sizes are kept for looking up."""

MOST_PARTS, MOST_KEYED = 4096, 256
"""Parts whose sums are kept, and items of those: to look for more takes as long as to sum them up again."""

MOST_LAYERS, MOST_STAGES = 20_000, 100_000
"""Costs of layers and of stages on parts that are kept."""


Options = tuple[dict[Strategy, StrategyCost], ...]
"""For every layer of a stage, what each memory strategy costs."""
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
        self._stages: dict[object, StageCost] = {}
        self._known: dict[tuple[LayerGraph, object, int], tuple[LayerCosts, int]] = {}
        self._covered = np.zeros(3)
        self._variants: dict[tuple[LayerGraph, Strategy], LayerGraph] = {}
        self._items: dict[int, int] = {}
        self._kept: list[Item] = []
        self._factors: Factors = {}
        self._numbers: dict[object, int] = {}
        self._sums: dict[tuple[object, int], Sums] = {}
        self._named: dict[str, Parameters] = {}

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        part = self._measured(items, links)
        (cost,) = self._answers(self._runs(chunk.module, chunk.start, chunk.stop), [part], lambda _: (items, links))
        return self._corrected(chunk, cost)

    def stages(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[StageCost]:
        if not self.reuse:
            return [self.stage(chunk, *_records(table, items)) for chunk, items in asked]
        found = self._together(table, asked, self._answers)
        return [self._corrected(chunk, cost) for (chunk, _), cost in zip(asked, found, strict=True)]

    def _together(
        self,
        table: ItemTable,
        asked: Sequence[tuple[Chunk, Sequence[int]]],
        answers: Callable[[tuple[Run, ...], list[Sums], Records], list[Answer]],
    ) -> list[Answer]:
        """Answers to all questions: equal chunks with the same items are asked for once, parts of one family together."""
        parts = list({id(items): items for _, items in asked}.values())
        sums = dict(zip(map(id, parts), measure(table, parts, by_length=self._by_length), strict=True))
        distinct: dict[tuple[int, int], tuple[tuple[Run, ...], Sequence[int]]] = {}
        keys = []
        for chunk, items in asked:
            runs = self._runs(chunk.module, chunk.start, chunk.stop)
            keys.append((id(runs), id(items)))
            distinct[keys[-1]] = (runs, items)
        together: dict[tuple[int, Family], list[tuple[int, int]]] = {}
        for key in distinct:
            together.setdefault((key[0], sums[key[1]].family), []).append(key)
        found: dict[tuple[int, int], Answer] = {}
        for of in together.values():
            chosen = [distinct[key][1] for key in of]
            of_family = [sums[id(items)] for items in chosen]
            runs = distinct[of[0]][0]
            costs = answers(runs, of_family, lambda i, chosen=chosen: _records(table, chosen[i]))  # type: ignore[misc]
            found |= zip(of, costs, strict=True)
        return [found[key] for key in keys]

    def useful_ns(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> int:
        rows = sum(item.sizes["tokens"] for item in items)
        copies = max(1, -(-EFFICIENT_ROWS // max(1, rows)))
        if len(items) > MOST_KEYED:
            table = ItemTable.of_part(items, links)
            (part,) = measure(table, [range(len(items))], copies, by_length=self._by_length)
        else:
            part = self._measured(items, links, copies)
        total = 0.0
        number = Counter[tuple[LayerGraph, bool]]()
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            number[run.layer, run.backward] += run.repeats
        for (layer, backward), repeats in number.items():
            total += repeats * _duration_ns(self._layer(layer, part, items, links, copies), backward)
        of_module = [factor for key, factor in self._factors.items() if key.startswith(f"{module}/")]
        return round(total / copies * (sum(of_module) / len(of_module) if of_module else 1.0))

    def flops(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> float:
        """Model FLOPs of forward and backward of the items over the whole module: what a causal kernel skips and what
        no loss needs left out."""
        part = self._measured(items, links)
        total = 0.0
        for run in self._runs(module, 0, len(self.graph.by_name[module].layers)):
            cost = self._layer(run.layer, part, items, links)
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
        part = self._measured(items, links)
        runs = [run for run in self._runs(chunk.module, chunk.start, chunk.stop) for _ in range(run.repeats)]
        keep: Strategy = "keep"
        found = []
        for run, strategy in zip(runs, strategies or [keep] * len(runs), strict=True):
            again = strategy in ("recompute", "recompute-attention") and run.backward
            layer = self._variant(run.layer, strategy) if again else run.layer
            found.append((self._layer(layer, part, items, links), run.backward))
        return found

    def strategies(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> Options:
        """For every layer of a stage, what each memory strategy costs; only "keep" where there is no backward.

        Recomputation is traced as the runtime does it, so it stops where nothing more is needed.
        """
        runs, part = self._runs(chunk.module, chunk.start, chunk.stop), self._measured(items, links)
        (found,) = self._options(runs, [part], lambda _: (items, links))
        return self._corrected_options(chunk, found)

    def strategies_of(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[Options]:
        if not self.reuse:
            return [self.strategies(chunk, *_records(table, items)) for chunk, items in asked]
        found = self._together(table, asked, self._options)
        return [self._corrected_options(chunk, options) for (chunk, _), options in zip(asked, found, strict=True)]

    def _options(self, runs: tuple[Run, ...], parts: list[Sums], records: Records) -> list[Options]:
        """For each part of one family what each strategy of each run's layers costs, before correction."""
        found: list[list[dict[Strategy, StrategyCost]]] = [[] for _ in parts]
        known: dict[tuple[LayerGraph, bool], list[dict[Strategy, StrategyCost]]] = {}
        for run in runs:
            key = (run.layer, run.backward)
            if key not in known:
                known[key] = self._layer_options(*key, parts, records)
            for part, options in zip(found, known[key], strict=True):
                part += [options] * run.repeats
        return [tuple(of) for of in found]

    def _layer_options(
        self, layer: LayerGraph, backward: bool, parts: list[Sums], records: Records
    ) -> list[dict[Strategy, StrategyCost]]:
        """For each part what each strategy of a layer costs."""
        kept = self._layers(layer, parts, records)
        recomputing: tuple[Strategy, ...] = ("recompute", "recompute-attention") if backward else ()
        others = {name: self._layers(self._variant(layer, name), parts, records) for name in recomputing}
        found = []
        for i, keep in enumerate(kept):
            options: dict[Strategy, StrategyCost] = {"keep": self._strategy(keep, keep, backward)}
            for name, of in others.items():
                options[name] = self._strategy(of[i], keep, True)
            if backward and self.machine.kernels != "cpu":  # a CPU's memory is the host's
                away = options["keep"].saved_bytes / self.layout.tensor_parallel
                offload_ns = round(1e9 * away / self.machine.host_bandwidth)
                options["offload"] = StrategyCost(saved_bytes=0, extra_ns=0, offload_ns=offload_ns)
            found.append(options)
        return found

    def _strategy(self, cost: tuple[LayerCosts, int], keep: tuple[LayerCosts, int], backward: bool) -> StrategyCost:
        costs, row = cost
        extra, degree = 0.0, self.layout.tensor_parallel
        if cost is not keep:
            before = keep[0].phase_ns[keep[1]].tolist()
            extra = sum(costs.phase_ns[row].tolist()) - sum(before) + self.machine.overheads.recompute_ns
        numbers = costs.numbers[row].tolist()
        saved = numbers[SAVED_BYTES] * degree if backward else 0
        return StrategyCost(
            saved_bytes=saved,
            extra_ns=max(0, round(extra)),
            forward_workspace_bytes=max(0, numbers[FORWARD_LIVE] * degree - saved),
            backward_workspace_bytes=max(0, numbers[BACKWARD_LIVE] * degree - saved) if backward else 0,
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

    def _corrected_options(self, chunk: Chunk, found: Options) -> Options:
        factor = self._factors.get(key_of(chunk.module, chunk.worker), 1.0)
        if factor == 1.0:
            return found
        distinct = {id(of): of for of in found}
        slowed: dict[int, dict[Strategy, StrategyCost]] = {
            key: {name: cost._replace(extra_ns=round(cost.extra_ns * factor)) for name, cost in of.items()}
            for key, of in distinct.items()
        }
        return tuple([slowed[id(of)] for of in found])  # equal layers stay one object

    def _corrected(self, chunk: Chunk, cost: StageCost) -> StageCost:
        factor = self._factors.get(key_of(chunk.module, chunk.worker), 1.0)
        return cost if factor == 1.0 else slower(cost, factor)

    def _answers(self, runs: tuple[Run, ...], parts: Sequence[Sums], records: Records) -> list[StageCost]:
        """Costs of a stage on parts of one family, those that are known looked up."""
        if not self.reuse:
            return self._evaluated(runs, parts, records)
        keys = self._keys(runs, parts, records)
        found = [self._stages.get(key) for key in keys]
        missing = [i for i, cost in enumerate(found) if cost is None]
        if missing:
            num_traces = sum(run.layer.num_traces for run in runs)
            costs = self._evaluated(runs, [parts[i] for i in missing], lambda i: records(missing[i]))
            for i, cost in zip(missing, costs, strict=True):
                found[i] = cost
            if len(self._stages) >= MOST_STAGES:
                self._stages.clear()
            if sum(run.layer.num_traces for run in runs) > num_traces:
                # Traces on the way may have shown that costs depend on more: keys are others then.
                keys = self._keys(runs, parts, records)
            self._stages.update(zip(keys, found, strict=True))  # type: ignore[arg-type]
        return found  # type: ignore[return-value]

    def _keys(self, runs: tuple[Run, ...], parts: Sequence[Sums], records: Records) -> list[object]:
        """All that the costs depend on: what each layer needs of the sums, and the number of items for what is loaded;
        or the very sizes where a layer is no function of sums."""
        layers = dict.fromkeys(run.layer for run in runs)  # attention and MLP take turns
        if any(layer.is_irregular(parts[0].family) for layer in layers):
            return [(runs, sizes_key(*records(i))) for i in range(len(parts))]
        return [(runs, num_items(part), *[layer.needed(part) for layer in layers]) for part in parts]

    def _evaluated(self, runs: tuple[Run, ...], parts: Sequence[Sums], records: Records) -> list[StageCost]:
        """The same from costs of layers."""
        known = {run.layer: self._layers(run.layer, parts, records) for run in runs}
        if any(of.structure is not rows[0][0].structure for rows in known.values() for of, _ in rows):
            return [
                stage_costs(runs, [gathered([known[run.layer][i]]) for run in runs], [part], self.machine, self.layout)[
                    0
                ]
                for i, part in enumerate(parts)
            ]
        all_of = {layer: gathered(rows) for layer, rows in known.items()}
        return stage_costs(runs, [all_of[run.layer] for run in runs], parts, self.machine, self.layout)

    def _layers(
        self, layer: LayerGraph, parts: Sequence[Sums], records: Records, copies: int = 1
    ) -> list[tuple[LayerCosts, int]]:
        """Costs of a layer on parts of one family: for each, among which and in which row."""
        kept = self.reuse and not layer.is_irregular(parts[0].family)
        found = [self._known.get((layer, layer.needed(part), copies)) if kept else None for part in parts]
        missing = [i for i, one in enumerate(found) if one is None]
        if missing:
            chosen = [parts[i] for i in missing]
            for block in layer.counts_of(chosen, lambda i: records(missing[i]), copies):
                costs = layer_costs(block.structure, block.values, self.machine, self.layout, self.rules)
                add_covered(self._covered, costs.phase_ns, costs.guessed_ns, costs.numbers)
                for row, i in enumerate(block.parts):
                    found[missing[i]] = (costs, row)
            if len(self._known) >= MOST_LAYERS:
                self._known.clear()
            for i in missing:
                one = found[i]
                assert one is not None
                self._known[layer, layer.needed(parts[i]), copies] = one
        return found  # type: ignore[return-value]

    def _layer(
        self, layer: LayerGraph, part: Sums, items: Sequence[Item], links: Sequence[Sequence[Item]], copies: int = 1
    ) -> LayerCost:
        ((costs, row),) = self._layers(layer, [part], lambda _: (items, links), copies)
        return costs.one(row)

    def _measured(self, items: Sequence[Item], links: Sequence[Sequence[Item]], copies: int = 1) -> Sums:
        """What costs of a part depend on."""
        key = (self._sizes(items, links), copies)
        if key not in self._sums or not self.reuse:
            if len(self._sums) >= MOST_PARTS:
                self._sums.clear()
            table = ItemTable.of_part(items, links)
            (self._sums[key],) = measure(table, [range(len(items))], copies, by_length=self._by_length)
        return self._sums[key]

    def _sizes(self, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> object:
        """All that the cost of a part may depend on, as something to look up by: a number per item."""
        return self._numbers_of(items), tuple([self._numbers_of(sources) if sources else () for sources in links])

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


def slower(cost: StageCost, factor: float) -> StageCost:
    """A stage that computes `factor` times as long."""
    return cost._replace(
        forward_ns=round(cost.forward_ns * factor),
        backward_ns=round(cost.backward_ns * factor),
        input_ns=round(cost.input_ns * factor),
        weight_ns=round(cost.weight_ns * factor),
    )


def _duration_ns(cost: LayerCost, backward: bool) -> float:
    return sum(cost.phase_ns.values()) if backward else cost.phase_ns["F"]


def _source(machine: Machine, tensor_parallel: int) -> str:
    how = machine.calibrated or "not calibrated, factors are defaults"
    devices = "" if tensor_parallel == 1 else f", {tensor_parallel} devices per worker"
    return f"emulated {machine.name}{devices}: {how}"
