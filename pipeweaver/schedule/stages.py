"""The stages of a step: its units with their costs, the edges between them, and what must run before what.

A *unit* is a (chunk, part). Stages are numbered phase by phase, so that unit u of U has

    u          its forward F
    U + u      its backward B, or the input half I of a split one
    2U + u     the weight half W of a split backward

F precedes F along every edge, gradients go back along those that carry them, and a unit's F precedes its B or I,
its I its W. A successor comes with a lag: the time that the tensor travels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.costs import Costs, LayerStrategies, StageCost
from pipeweaver.data.items import Item, Share
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.connect import EdgeArrays, Ints, Parts, Units, edge_arrays
from pipeweaver.schedule.ir import Draft, Placement, Stage
from pipeweaver.schedule.wiring import Wiring, wiring

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Which third of the stages: F, B or I, W."""


class StageGraph(NamedTuple):
    """S stages with their workers, durations and successors: those of stage s, with lags, from `start[s]` on."""

    worker: Ints
    duration_ns: Ints
    start: Ints
    successor: Ints
    lag_ns: Ints


class Orders(NamedTuple):
    """Stage numbers of worker w in order, from `start[w]` on; `split` [U]: whose backward is split."""

    start: Ints
    stage: Ints
    split: Ints


def graph_of(
    orders: Sequence[Sequence[int]], duration_ns: Sequence[int], successors: Sequence[Sequence[tuple[int, int]]]
) -> tuple[StageGraph, Orders]:
    """Graph and orders of stages 0..S-1, from the stages of each worker in order, and of each stage (successor, lag)."""
    worker = np.zeros(len(duration_ns), np.int64)
    for number, order in enumerate(orders):
        worker[np.array(order, np.int64)] = number
    pairs = np.array([pair for of in successors for pair in of], np.int64).reshape(-1, 2)
    graph = StageGraph(
        worker, np.array(duration_ns, np.int64), _starts([len(of) for of in successors]), *pairs.T.copy()
    )
    listed = np.array([stage for order in orders for stage in order], np.int64)
    return graph, Orders(_starts([len(order) for order in orders]), listed, np.zeros(0, np.int64))


class UnitCosts(NamedTuple):
    """`StageCost` of every unit, [U] each."""

    forward_ns: Ints
    backward_ns: Ints
    load_ns: Ints
    input_ns: Ints
    weight_ns: Ints
    loaded_bytes: Ints
    saved_bytes: Ints
    forward_workspace_bytes: Ints
    backward_workspace_bytes: Ints
    weight_bytes: Ints
    weight_workspace_bytes: Ints
    offloaded_bytes: Ints
    offload_ns: Ints


class StepStages:
    """Units and edges of a step, whatever order its stages run in.

    [U]: `worker`, `microbatch`, `learns` (has a backward), `output_bytes` (of the distinct tensors that leave the
    unit, whole), `costs`. [E]: `is_local` (stays on its worker), `edge_bytes`, `lag_ns`, `post_ns` (of each
    end's time), `grad`, and `is_whole`:
    an edge alone brings an input, its rows in order; else the input is assembled in memory of its own.
    `work` is what `useful_ns` says of the share, `table` that of its items, where they are known already.
    """

    def __init__(
        self,
        graph: ModelGraph,
        placement: Placement,
        share: Share,
        parts: Parts,
        costs: Costs,
        *,
        dtype: str,
        forward_only: bool = False,
        work: Mapping[str, int] | None = None,
        table: ItemTable | None = None,
    ) -> None:
        self.graph, self.placement, self.share, self.parts = graph, placement, share, parts
        self.pricing, self.dtype, self.forward_only = costs, dtype, forward_only
        self.wiring: Wiring = wiring(graph, placement, dtype)
        self.units = Units(parts)
        workers = np.array([chunk.worker for chunk in placement.chunks], np.int64)
        self.worker: Ints = workers[self.units.chunk]
        self.microbatch: Ints = np.array([part.microbatch for of in parts for part in of], np.int64)
        learns = np.array(self.wiring.backward, np.bool_)[self.units.chunk]
        self.learns = np.zeros_like(learns) if forward_only else learns
        self.table = ItemTable(share.items, share.links) if table is None else table
        self.work = useful_ns(graph, self.table, costs) if work is None else work
        self._strategies: dict[int, Sequence[LayerStrategies]] = {}
        chunks = placement.chunks
        asked = [(chunks[chunk], part.items) for chunk, of in enumerate(parts) for part in of]
        self.stage_costs = costs.stages(self.table, asked)
        self.costs = unit_costs(self.stage_costs)
        self.edges: EdgeArrays = edge_arrays(placement, self.wiring, self.table, parts)
        self._measure_edges()

    def __len__(self) -> int:
        """Number of units."""
        return len(self.units)

    @cached_property
    def alike(self) -> list[int]:
        """[U] equal numbers cost the same."""
        return _alike(self.share, self.wiring, self.parts, self.table.sources)

    def layer_strategies(self, unit: int) -> Sequence[LayerStrategies]:
        """What each memory strategy costs, for every layer of a unit that has a backward."""
        if not self._strategies:
            # Whoever asks for one asks for others.
            distinct = {number: u for u, number in enumerate(self.alike) if self.learns[u]}
            pairs = [self.units.pairs[u] for u in distinct.values()]
            asked = [(self.placement.chunks[chunk], self.parts[chunk][part].items) for chunk, part in pairs]
            self._strategies = dict(zip(distinct, self.pricing.strategies_of(self.table, asked), strict=True))
        return self._strategies[self.alike[unit]]

    def _measure_edges(self) -> None:
        edges, inlets = self.edges, [inlet for of in self.wiring.inlets for inlet in of]
        grad = np.array([inlet.grad for inlet in inlets], np.bool_)[edges.inlet]
        self.grad = np.zeros_like(grad) if self.forward_only else grad
        row_bytes = np.array([inlet.row_bytes for inlet in inlets], np.int64)
        self.edge_bytes: Ints = edges.num_rows * row_bytes[edges.inlet]
        sender, receiver = self.worker[edges.source], self.worker[edges.destination]
        self.is_local = sender == receiver
        workers = self.placement.workers
        crossing = np.nonzero(~self.is_local)[0]
        link = sender[crossing] * workers + receiver[crossing]
        distinct, inverse = np.unique(np.stack([link, self.edge_bytes[crossing]], axis=1), axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        lags = [self.pricing.transfer_ns(at // workers, at % workers, size) for at, size in distinct.tolist()]
        posts = [self.pricing.post_ns(size) for size in distinct[:, 1].tolist()]
        self.lag_ns: Ints = np.zeros(len(edges.source), np.int64)
        self.lag_ns[crossing] = np.array(lags, np.int64)[inverse]
        self.post_ns: Ints = np.zeros(len(edges.source), np.int64)
        self.post_ns[crossing] = np.array(posts, np.int64)[inverse]
        # Edges into one input of one unit follow each other.
        same = np.zeros(len(edges.source) + 1, np.bool_)
        same[1:-1] = (edges.inlet[1:] == edges.inlet[:-1]) & (edges.destination[1:] == edges.destination[:-1])
        self.is_whole = (np.diff(edges.run_start) == 1) & ~same[:-1] & ~same[1:]
        self.output_bytes: Ints = self._output_bytes(inlets)

    def _output_bytes(self, inlets: Sequence[object]) -> Ints:
        edges = self.edges
        names = [inlet.output for inlet in inlets]  # type: ignore[attr-defined]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        output = np.array([numbers[name] for name in names], np.int64)[edges.inlet]
        total = np.zeros(len(self), np.int64)
        sums: dict[tuple[int, str], Ints] = {}
        for name, number in numbers.items():
            takers = np.unique(edges.source[output == number])
            for chunk in np.unique(self.units.chunk[takers]).tolist():
                rows, row_bytes = self.wiring.outputs[chunk][name]
                here = takers[self.units.chunk[takers] == chunk]
                key = (id(self.parts[chunk]), rows)
                if key not in sums:
                    sums[key] = self.table.sums(rows, [part.items for part in self.parts[chunk]])
                total[here] += sums[key][self.units.part[here]] * row_bytes
        return total


def useful_ns(graph: ModelGraph, table: ItemTable, costs: Costs) -> dict[str, int]:
    """W of a share by module: forward and backward of all items at the module's most efficient size. `table`: its items."""
    by_module: dict[str, list[int]] = {}
    for i, item in enumerate(table.items):
        by_module.setdefault(item.module, []).append(i)
    chosen = [(module.name, by_module[module.name]) for module in graph.modules if module.name in by_module]
    return {name: costs.useful_ns(name, table, items) for name, items in chosen}


def unit_costs(costs: Sequence[StageCost]) -> UnitCosts:
    """Costs of units as columns."""
    columns = np.array([cost[: len(UnitCosts._fields)] for cost in costs], np.int64)
    return UnitCosts(*(np.ascontiguousarray(c) for c in columns.reshape(-1, len(UnitCosts._fields)).T))


def stage_graph(step: StepStages, costs: UnitCosts, split: Ints) -> StageGraph:
    """The graph of all 3U numbers. `split` [U] says which units have their backward split; stages that do not exist
    have no successors."""
    edges = step.edges
    return StageGraph(
        *_graph(step.worker, step.learns, costs, split, edges.source, edges.destination, step.grad, step.lag_ns)
    )


@numba.njit(cache=True)
def _graph(worker, learns, costs, split, source, destination, grad, lag_ns):  # type: ignore[no-untyped-def]
    size, num_edges = len(worker), len(source)
    workers, duration = np.empty(3 * size, np.int64), np.zeros(3 * size, np.int64)
    start = np.zeros(3 * size + 1, np.int64)
    for e in range(num_edges):
        start[source[e] + 1] += 1
        if grad[e]:
            start[size + destination[e] + 1] += 1
    for u in range(size):
        workers[u] = workers[size + u] = workers[2 * size + u] = worker[u]
        duration[u] = costs.forward_ns[u]
        if learns[u]:
            duration[size + u] = costs.input_ns[u] if split[u] else costs.backward_ns[u]
            start[u + 1] += 1
        if split[u]:
            duration[2 * size + u] = costs.weight_ns[u]
            start[size + u + 1] += 1
    for s in range(3 * size):
        start[s + 1] += start[s]
    filled = start[:-1].copy()
    successor, lag = np.empty(start[-1], np.int64), np.zeros(start[-1], np.int64)
    for e in range(num_edges):
        at = filled[source[e]]
        successor[at], lag[at] = destination[e], lag_ns[e]
        filled[source[e]] += 1
    for e in range(num_edges):
        if grad[e]:
            at = filled[size + destination[e]]
            successor[at], lag[at] = size + source[e], lag_ns[e]
            filled[size + destination[e]] += 1
    for u in range(size):
        if learns[u]:
            successor[filled[u]] = size + u
        if split[u]:
            successor[filled[size + u]] = 2 * size + u
    return workers, duration, start, successor, lag


def orders_of(step: StepStages, draft: Draft) -> Orders:
    """A draft's orders as stage numbers.

    Raises ValueError if a stage is missing, surplus, repeated or on another worker than its chunk.
    """
    listed = [stage for order in draft.order for stage in order]
    size, chunks = len(step), draft.placement.chunks
    chunk = np.array([stage[0] for stage in listed], np.int64)
    part = np.array([stage[1] for stage in listed], np.int64)
    phase = np.array([_PHASE[stage[2]] for stage in listed], np.int64)
    known = (chunk >= 0) & (chunk < len(chunks)) & (part >= 0)
    counts = np.diff(step.units.start)
    known[known] = part[known] < counts[chunk[known]]
    unit = np.where(known, step.units.start[np.where(known, chunk, 0)] + part, 0)
    seen = np.bincount((unit * 4 + phase)[known], minlength=4 * size).reshape(size, 4)
    split = seen[:, 2] > 0
    expected = np.zeros_like(seen)
    expected[:, 0] = 1
    expected[:, 1] = step.learns & ~split
    expected[:, 2] = expected[:, 3] = step.learns & split
    if not known.all() or (seen != expected).any():
        raise ValueError(_what_is_wrong(step, draft, listed))
    worker = np.repeat(np.arange(len(draft.order)), [len(order) for order in draft.order])
    wrong = np.nonzero(step.worker[unit] != worker)[0]
    if len(wrong):
        stage = listed[wrong[0]]
        raise ValueError(
            f"stage {stage} is in the order of worker {worker[wrong[0]]}, but {chunks[stage.chunk]} is not there"
        )
    start = _starts([len(order) for order in draft.order])
    third = np.array([FORWARD, BACKWARD, BACKWARD, WEIGHTS], np.int64)[phase]
    return Orders(start, third * size + unit, (split & step.learns).astype(np.int64))


def stage_of(step: StepStages, number: int, split: Ints) -> Stage:
    """A stage by its number."""
    third, unit = divmod(number, len(step))
    chunk, part = step.units.pairs[unit]
    return Stage(chunk, part, "F" if third == FORWARD else "W" if third == WEIGHTS else "I" if split[unit] else "B")


def stage_text(stages: set[Stage]) -> str:
    """The first few stages, for messages."""
    return " ".join(str(stage) for stage in sorted(stages)[:8]) + (" …" if len(stages) > 8 else "")


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])


_PHASE = {"F": 0, "B": 1, "I": 2, "W": 3}


def _what_is_wrong(step: StepStages, draft: Draft, listed: Sequence[Stage]) -> str:
    found = set(listed)
    expected = set()
    for unit, (chunk, part) in enumerate(step.units.pairs):
        expected.add(Stage(chunk, part, "F"))
        if step.learns[unit]:
            split = Stage(chunk, part, "I") in found
            expected |= {Stage(chunk, part, "I"), Stage(chunk, part, "W")} if split else {Stage(chunk, part, "B")}
    missing, surplus = expected - found, found - expected
    repeated = {stage for stage in found if listed.count(stage) > 1} if not (missing or surplus) else set()
    return (
        f"the order of policy {draft.policy or '(unnamed)'} lacks stages [{stage_text(missing)}], "
        f"has stages that do not belong [{stage_text(surplus)}], repeats [{stage_text(repeated)}]"
    )


def _alike(share: Share, wired: Wiring, parts: Parts, sources: Sequence[Sequence[Item]]) -> list[int]:
    """A number for each unit: equal ones have parts that look alike, on chunks of one kind."""
    looks: dict[Hashable, int] = {}
    look = [
        looks.setdefault(
            (*one.sizes, *one.sizes.values(), *((s.module, *s.sizes, *s.sizes.values()) for s in linked_to)), len(looks)
        )
        for one, linked_to in zip(share.items, sources, strict=True)
    ]
    described: dict[int, list[Hashable]] = {}
    numbers: dict[Hashable, int] = {}
    found = []
    for kind, of in zip(wired.kinds, parts, strict=True):
        if id(of) not in described:
            described[id(of)] = [tuple([look[i] for i in part.items]) for part in of]
        found += [numbers.setdefault((kind, description), len(numbers)) for description in described[id(of)]]
    return found
