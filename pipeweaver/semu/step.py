"""Emulate steps of one placement again and again, computing anew only what changed.

    emulator = StepEmulator(graph, placement, costs, dtype="bfloat16")
    emulator.emulate(share, parts, orders).step_ns        # a batch never seen
    emulator.emulate(share, parts, other).step_ns         # another order: stages, costs and edges stay
    emulator.emulate(resized, parts, orders).step_ns      # items of one part changed: so do its stages and edges alone

In space: equal layers, equal parts and workers that do the same are costed once (`SemuCosts`). In time: what is known of
the step before is kept where it holds. `reuse=False` computes everything anew; results are the same, bit for bit.
PipeWeaver section 4 calls this spatial-temporal subgraph reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import chain, compress, count
from operator import is_not

from pipeweaver.data.items import Item, Share
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.compile import Emulated, Strategies, emulate_orders
from pipeweaver.schedule.connect import Parts
from pipeweaver.schedule.emulate import Queue
from pipeweaver.schedule.ir import Placement
from pipeweaver.schedule.stages import Orders, StepStages, unit_costs
from pipeweaver.semu.costs import SemuCosts

NO_WORK: dict[str, int] = {}
"""Useful work is no part of a step's time."""


class StepEmulator:
    """Time and memory of steps whose chunks lie on the same workers."""

    def __init__(
        self, graph: ModelGraph, placement: Placement, costs: SemuCosts, *, dtype: str, reuse: bool = True
    ) -> None:
        self.graph, self.placement, self.dtype, self.reuse = graph, placement, dtype, reuse
        self.costs = costs
        self._last: StepStages | None = None
        self._where: Where | None = None
        self.resized = 0
        """How often a step was made from the one before."""

    def emulate(
        self, share: Share, parts: Parts, orders: Orders, *, strategies: Strategies = (), queue: Queue = "pair"
    ) -> Emulated:
        """What `compile_plan` predicts of a draft with these parts, orders and strategies.

        Raises ValueError if the orders wait for each other in a circle.
        """
        return emulate_orders(self.stages(share, parts), orders, strategies=strategies, queue=queue)

    def stages(self, share: Share, parts: Parts) -> StepStages:
        """Units and edges of a step; without the rows of edges, which no emulation asks for."""
        last = self._last if self.reuse else None
        if last is not None and last.parts is parts:
            if last.share is share:
                return last
            self._where = self._where or Where(last)
            found = resized(last, share, self._where)
            if found is not None:
                self.resized += 1
                self._last = found
                return found
        costs = self.costs if self.reuse else self.costs.anew()
        self._where = None
        self._last = StepStages(self.graph, self.placement, share, parts, costs, dtype=self.dtype, work=NO_WORK)
        return self._last


def resized(step: StepStages, share: Share, where: Where) -> StepStages | None:
    """The stages of a step whose items have other sizes, in the same parts: from a step with all else equal, of which
    `where` says what is where.

    None where edges come, go or are cut otherwise: items with or without rows of some kind, other links or modules, or
    several chunks that could supply an item.
    """
    before = step.share.items
    if len(before) != len(share.items) or not where.is_plain:
        return None
    if step.share.links is not share.links and step.share.links != share.links:
        return None
    others = compress(count(), map(is_not, before, share.items))
    changed = [i for i in others if before[i] != share.items[i]]
    if any(not _same_kind(before[i], share.items[i]) for i in changed):
        return None
    found = copy(step)
    found.share = share
    touched = {*changed, *(to for i in changed for to in where.links_from.get(i, ()))}
    found.table = ItemTable(share.items, share.links)
    units = sorted({unit for i in touched for unit in where.units_of.get(i, ())})
    if units:
        _recost(found, units, where)
        _remeasure(found, units, {unit for i in changed for unit in where.units_of.get(i, ())}, where)
    return found


class Where:
    """What is where in a step, whatever the sizes of its items: units by item, links, edges by unit, their ends, inlets
    and workers; `parts` are the distinct ones, `part` [U] the number of each unit's."""

    def __init__(self, step: StepStages) -> None:
        inlets = [inlet for of in step.wiring.inlets for inlet in of]
        self.is_plain = all(len(inlet.sources) == 1 for inlet in inlets)
        numbers: dict[tuple[int, ...], int] = {}
        items = [step.parts[chunk][part].items for chunk, part in step.units.pairs]
        self.part = [numbers.setdefault(of, len(numbers)) for of in items]
        self.parts = list(numbers)
        self.members = [frozenset(of) for of in self.parts]
        self.units_of: dict[int, list[int]] = {}
        for unit, of in enumerate(items):
            for i in of:
                self.units_of.setdefault(i, []).append(unit)
        self.links_into: dict[int, list[int]] = {}
        self.links_from: dict[int, list[int]] = {}
        for source, to in step.share.links:
            self.links_into.setdefault(to, []).append(source)
            self.links_from.setdefault(source, []).append(to)
        self.edges_of: dict[int, list[int]] = {}
        self.outputs_of: dict[int, set[str]] = {}
        self.ends = list(zip(step.edges.source.tolist(), step.edges.destination.tolist(), strict=True))
        self.inlet_of = [inlets[inlet] for inlet in step.edges.inlet.tolist()]
        self.is_local, self.worker = step.is_local.tolist(), step.worker.tolist()
        for edge, (source, destination) in enumerate(self.ends):
            self.edges_of.setdefault(source, []).append(edge)
            self.edges_of.setdefault(destination, []).append(edge)
            self.outputs_of.setdefault(source, set()).add(self.inlet_of[edge].output)


def _same_kind(old: Item, new: Item) -> bool:
    """Whether edges of the one are those of the other, but for their lengths."""
    if old.module != new.module or old.sizes.keys() != new.sizes.keys():
        return False
    if all(old.sizes.values()) and all(new.sizes.values()):
        return True
    return all(bool(size) == bool(new.sizes[name]) for name, size in old.sizes.items())


def _recost(step: StepStages, units: Sequence[int], where: Where) -> None:
    """Costs of these units anew; equal questions have equal answers, so the rest stays."""
    items, links = step.share.items, where.links_into
    parts = {number: where.parts[number] for number in map(where.part.__getitem__, units)}
    inside = dict.fromkeys(chain.from_iterable(parts.values()))
    listed = dict.fromkeys(chain(inside, *(links.get(to, ()) for to in inside)))
    place = {i: number for number, i in enumerate(listed)}
    table = ItemTable([items[i] for i in listed], [(place[i], place[to]) for to in inside for i in links.get(to, ())])
    asked_parts = {number: [place[i] for i in of] for number, of in parts.items()}
    chunks = step.placement.chunks
    chunk_of = step.units.chunk[units].tolist()
    asked = [(chunks[chunk], asked_parts[where.part[unit]]) for chunk, unit in zip(chunk_of, units, strict=True)]
    step.stage_costs = list(step.stage_costs)
    costs = step.pricing.stages(table, asked)
    for unit, cost in zip(units, costs, strict=True):
        step.stage_costs[unit] = cost
    fresh = unit_costs(costs)
    columns = [column.copy() for column in step.costs]
    for column, values in zip(columns, fresh, strict=True):
        column[units] = values
    step.costs = type(step.costs)(*columns)
    step.__dict__.pop("alike", None)  # whose strategies cost the same is asked anew
    step._strategies = {}


def _remeasure(step: StepStages, units: Sequence[int], resized_units: set[int], where: Where) -> None:
    """Bytes and times of the edges into and out of these units, and what leaves those whose own items changed."""
    edges, items = step.edges, step.share.items
    num_rows, edge_bytes = edges.num_rows.copy(), step.edge_bytes.copy()
    lag_ns, post_ns = step.lag_ns.copy(), step.post_ns.copy()
    rows_of: dict[object, int] = {}  # chunks with the same parts have the same edges
    for e in sorted({edge for unit in units for edge in where.edges_of.get(unit, ())}):
        source, destination = where.ends[e]
        inlet = where.inlet_of[e]
        key = (where.part[source], where.part[destination], inlet.rows, inlet.linked)
        if key not in rows_of:
            wanted: Iterable[int] = where.parts[key[1]]
            if inlet.linked:
                wanted = (i for to in wanted for i in where.links_into.get(to, ()))
            rows_of[key] = sum(items[i].sizes[inlet.rows] for i in wanted if i in where.members[key[0]])
        num_rows[e] = rows_of[key]
        edge_bytes[e] = num_bytes = rows_of[key] * inlet.row_bytes
        if not where.is_local[e]:
            lag_ns[e] = step.pricing.transfer_ns(where.worker[source], where.worker[destination], num_bytes)
            post_ns[e] = step.pricing.post_ns(num_bytes)
    step.edges = edges._replace(num_rows=num_rows)
    step.edge_bytes, step.lag_ns, step.post_ns = edge_bytes, lag_ns, post_ns
    step.output_bytes = step.output_bytes.copy()
    sums: dict[tuple[int, str], int] = {}
    for unit in resized_units:
        outputs = step.wiring.outputs[step.units.chunk[unit]]
        total = 0
        for name in where.outputs_of.get(unit, ()):
            rows, row_bytes = outputs[name]
            summed = (where.part[unit], rows)
            if summed not in sums:
                sums[summed] = sum([items[i].sizes[rows] for i in where.parts[summed[0]]])
            total += sums[summed] * row_bytes
        step.output_bytes[unit] = total
