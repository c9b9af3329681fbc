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

from collections.abc import Sequence
from copy import copy

import numpy as np

from pipeweaver.data.items import Item, Share, linked
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
            found = resized(last, share)
            if found is not None:
                self.resized += 1
                self._last = found
                return found
        costs = self.costs if self.reuse else self.costs.anew()
        self._last = StepStages(self.graph, self.placement, share, parts, costs, dtype=self.dtype, work=NO_WORK)
        return self._last


def resized(step: StepStages, share: Share) -> StepStages | None:
    """The stages of a step whose items have other sizes, in the same parts: from a step with all else equal.

    None where edges come, go or are cut otherwise: items with or without rows of some kind, other links or modules, or
    several chunks that could supply an item.
    """
    before = step.share.items
    if len(before) != len(share.items) or step.share.links != share.links:
        return None
    changed = [i for i, (old, new) in enumerate(zip(before, share.items, strict=True)) if old is not new and old != new]
    if any(not _same_kind(before[i], share.items[i]) for i in changed):
        return None
    inlets = [inlet for of in step.wiring.inlets for inlet in of]
    if any(len(inlet.sources) > 1 for inlet in inlets):
        return None
    found = copy(step)
    found.share = share
    found._sources = linked(share.items, share.links) if changed else step._sources
    touched = set(changed) | {to for source, to in share.links if source in set(changed)}
    units = [
        unit
        for unit, (chunk, part) in enumerate(step.units.pairs)
        if not touched.isdisjoint(step.parts[chunk][part].items)
    ]
    _recost(found, units)
    _remeasure(found, units, set(changed))
    return found


def _same_kind(old: Item, new: Item) -> bool:
    """Whether edges of the one are those of the other, but for their lengths."""
    return old.module == new.module and {n: bool(s) for n, s in old.sizes.items()} == {
        n: bool(s) for n, s in new.sizes.items()
    }


def _recost(step: StepStages, units: Sequence[int]) -> None:
    """Costs of these units anew; equal questions have equal answers, so the rest stays."""
    step.stage_costs = list(step.stage_costs)
    for unit in units:
        step.stage_costs[unit] = step.pricing.stage(*step._question(unit))
    if units:
        fresh = unit_costs([step.stage_costs[unit] for unit in units])
        at = np.array(units)
        columns = [column.copy() for column in step.costs]
        for column, values in zip(columns, fresh, strict=True):
            column[at] = values
        step.costs = type(step.costs)(*columns)
    step.alike = list(range(len(step)))  # whose strategies cost the same is asked anew
    step._strategies = {}


def _remeasure(step: StepStages, units: Sequence[int], changed: set[int]) -> None:
    """Bytes and times of the edges into and out of these units."""
    edges, items = step.edges, step.share.items
    is_touched = np.zeros(len(step), np.bool_)
    is_touched[list(units)] = True
    numbers = np.nonzero(is_touched[edges.source] | is_touched[edges.destination])[0]
    inlets = [inlet for of in step.wiring.inlets for inlet in of]
    num_rows, edge_bytes, lag_ns = edges.num_rows.copy(), step.edge_bytes.copy(), step.lag_ns.copy()
    members = [set(step.parts[chunk][part].items) if is_touched[u] else set() for u, (chunk, part) in _pairs(step)]
    into = _links_into(step)
    for e in numbers.tolist():
        inlet = inlets[edges.inlet[e]]
        source, destination = int(edges.source[e]), int(edges.destination[e])
        here = members[source] or set(_items(step, source))
        wanted = _items(step, destination)
        moved = [s for i in wanted for s in into.get(i, ())] if inlet.linked else wanted
        rows = sum(items[i].sizes[inlet.rows] for i in moved if i in here)
        num_rows[e], edge_bytes[e] = rows, rows * inlet.row_bytes
        if not step.is_local[e]:
            sender, receiver = int(step.worker[source]), int(step.worker[destination])
            lag_ns[e] = step.pricing.transfer_ns(sender, receiver, int(edge_bytes[e]))
    step.edges = edges._replace(num_rows=num_rows)
    step.edge_bytes, step.lag_ns = edge_bytes, lag_ns
    output_bytes = step.output_bytes.copy()
    for unit in units:
        if changed.isdisjoint(_items(step, unit)):
            continue
        names = {inlets[i].output for i in np.unique(edges.inlet[edges.source == unit]).tolist()}
        outputs = step.wiring.outputs[step.units.chunk[unit]]
        output_bytes[unit] = sum(
            outputs[name][1] * sum(items[i].sizes[outputs[name][0]] for i in _items(step, unit)) for name in names
        )
    step.output_bytes = output_bytes


def _pairs(step: StepStages) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(step.units.pairs))


def _items(step: StepStages, unit: int) -> tuple[int, ...]:
    chunk, part = step.units.pairs[unit]
    return step.parts[chunk][part].items


def _links_into(step: StepStages) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for source, to in step.share.links:
        found.setdefault(to, []).append(source)
    return found
