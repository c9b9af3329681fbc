"""Sizes and order of segments, as PipeWeaver chooses them (pipeweaver.md, sections 1, 2 and 3.1).

A module with K chunks per worker takes each of its parts through K segments per direction, P stages each.

    B   items of a part: the fewest that reach 95 % of the module's best efficiency. What is packed for a loss over
        tokens counts as one item: a microbatch's language sequence stays whole.
    K   with latencies T at B, sorted: 1 for the smallest, floor(T / smallest) for the others.

Left open by the paper, and chosen here: the item whose copies efficiency is taken from is the median one by tokens; a
packed sequence has the median microbatch's items; K is at most what the layers allow. Example, vision 6.4 ms for
B = 2 images, language 15 ms for a sequence: K = 1 and 2.

Segments of one module in one microbatch share a priority; among themselves they keep their order, part by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeweaver.costs import Costs
from pipeweaver.data.items import Item, Share, linked
from pipeweaver.model.graph import ModelGraph, Module
from pipeweaver.planner.step_problem import StepProblem
from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.gradients import gradients_of
from pipeweaver.schedule.ir import Chunk
from pipeweaver.schedule.stages import StepStages

EFFICIENCY = 0.95
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Numbers of items whose efficiency is compared."""

Group = tuple[Item, tuple[Item, ...]]
"""An item and the items linked to it."""


def items_per_part(graph: ModelGraph, shares: Sequence[Share], costs: Costs) -> dict[str, int]:
    """B of every module that is cut into parts and has items in `shares`."""
    found: dict[str, int] = {}
    for module in graph.modules:
        groups = [group for share in shares for group in _microbatches(share, module.name)]
        if not groups or _is_packed(module):
            continue
        items = sorted(
            (one for group in groups for one in group), key=lambda one: (one[0].sizes["tokens"], one[0].name)
        )
        median = items[len(items) // 2]
        per_item = {count: _latency_ns(graph, module, [median] * count, costs) / count for count in COUNTS}
        best = min(per_item.values())
        found[module.name] = next(count for count in COUNTS if EFFICIENCY * per_item[count] <= best)
    return found


def chunks_per_worker(
    graph: ModelGraph, workers: int, shares: Sequence[Share], costs: Costs, parts: Mapping[str, int]
) -> dict[str, int]:
    """K of every module, 1 where `shares` have no items of it. `parts` is B, by module; others are packed."""
    latency: dict[str, int] = {}
    for module in graph.modules:
        groups = [group for share in shares for group in _microbatches(share, module.name)]
        if not groups:
            continue
        by_tokens = sorted(groups, key=lambda group: sum(item.sizes["tokens"] for item, _ in group))
        items = by_tokens[len(by_tokens) // 2]
        if module.name in parts:
            ones = sorted(
                (one for group in groups for one in group), key=lambda one: (one[0].sizes["tokens"], one[0].name)
            )
            items = [ones[len(ones) // 2]] * parts[module.name]
        latency[module.name] = max(1, _latency_ns(graph, module, items, costs))
    smallest = min(latency.values(), default=1)
    return {
        module.name: max(1, min(latency.get(module.name, 1) // smallest, len(module.layers) // workers))
        for module in graph.modules
    }


def segment_groups(step: StepStages, made: StepProblem) -> tuple[Ints, Ints]:
    """(group [n] of the stages of a problem, and their place [n] among all, within a group part by part).

    A group is all segments of a module in a microbatch; groups are numbered as a plain schedule would have them:
    microbatch by microbatch, modules along the flows.
    """
    third, unit = np.divmod(made.number, max(1, len(step)))
    chunks = step.placement.chunks
    names = list(dict.fromkeys((chunk.task, chunk.module) for chunk in chunks))
    module = np.array([names.index((chunk.task, chunk.module)) for chunk in chunks], np.int64)
    chunk = step.units.chunk[unit]
    group = np.unique(step.microbatch[unit] * len(names) + module[chunk], return_inverse=True)[1]
    order = np.lexsort((np.where(third > 0, -chunk, chunk), step.units.part[unit], group))
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group))
    return group.reshape(-1).astype(np.int64), place


def _is_packed(module: Module) -> bool:
    """Whether what the module takes counts as one item: its loss is over tokens, or over all items jointly."""
    return module.loss is not None and (module.loss.joint or module.loss.units == "supervised")


def _latency_ns(graph: ModelGraph, module: Module, items: Sequence[Group], costs: Costs) -> int:
    """Forward and, where there is one, backward of the items through the whole module."""
    item = items[0][0]
    whole = Chunk(task=item.task, module=module.name, start=0, stop=len(module.layers), worker=0)
    cost = costs.stage(whole, [one for one, _ in items], [links for _, links in items])
    gradients = gradients_of(graph)
    learns = any(gradients.backward[module.name, position] for position in range(len(module.layers)))
    return cost.forward_ns + (cost.backward_ns if learns else 0)


def _microbatches(share: Share, module: str) -> list[list[Group]]:
    """(item, linked items) of a module in every microbatch and task that has some."""
    links = linked(share.items, share.links)
    groups: list[list[Group]] = []
    for microbatch in share.microbatches:
        by_task: dict[str, list[Group]] = {}
        for i in microbatch:
            if share.items[i].module == module:
                by_task.setdefault(share.items[i].task, []).append((share.items[i], links[i]))
        groups += by_task.values()
    return groups
