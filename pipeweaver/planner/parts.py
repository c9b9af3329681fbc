"""Cut the items of a microbatch into the parts that a chunk takes at a time (pipeweaver.md, section 2).

A module with N items in a microbatch and at most B per part gets ceil(N / B) parts, even in number of items
or in cost, in packed order; a module without items in a microbatch has no part there. Example, B = 4:

    9 images  ->  0 1 2 | 3 4 5 | 6 7 8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.partition import split
from pipeweaver.schedule.ir import Part, Placement

Parts = tuple[tuple[Part, ...], ...]
"""For each chunk its parts."""


def cut_parts(
    graph: ModelGraph,
    placement: Placement,
    share: Share,
    items_per_part: Mapping[str, int],
    item_costs: Sequence[int] | None = None,
) -> Parts:
    """For each chunk its parts, in the order of the microbatches; all chunks of a module have the same.

    `items_per_part` is the most items of a part, by module; a module that it does not name keeps a
    microbatch together. With `item_costs` (one number per item of the share) parts are even in cost, else
    in number. Raises ValueError for items that no chunk takes, and for a joint loss in several parts.
    """
    by_module: dict[tuple[str, str], tuple[Part, ...]] = {}
    for chunk in placement.chunks:
        key = (chunk.task, chunk.module)
        if key not in by_module:
            by_module[key] = _module_parts(share, key, items_per_part.get(chunk.module), item_costs)
            _check_joint(graph, key, by_module[key])
    for item in share.items:
        if (item.task, item.module) not in by_module:
            raise ValueError(
                f"item {item.name} belongs to module {item.module} of task {item.task}, which the placement does not "
                f"hold; it was made for {', '.join(f'{task}/{module}' for task, module in by_module)}"
            )
    return tuple(by_module[chunk.task, chunk.module] for chunk in placement.chunks)


def _module_parts(
    share: Share, key: tuple[str, str], at_most: int | None, item_costs: Sequence[int] | None
) -> tuple[Part, ...]:
    parts: list[Part] = []
    for number, microbatch in enumerate(share.microbatches):
        items = [i for i in microbatch if (share.items[i].task, share.items[i].module) == key]
        if not items:
            continue
        count = -(-len(items) // at_most) if at_most else 1
        if item_costs is None or len({item_costs[i] for i in items}) == 1:
            cuts = tuple(i * len(items) // count for i in range(count + 1))
        else:  # Cost may put more than B items into a part; the number of parts stays.
            cuts = split([item_costs[i] for i in items], count)
        parts += [Part(items=tuple(items[a:b]), microbatch=number) for a, b in pairwise(cuts)]
    return tuple(parts)


def _check_joint(graph: ModelGraph, key: tuple[str, str], parts: Sequence[Part]) -> None:
    task, module = key
    loss = graph.by_name[module].loss
    if loss is not None and loss.joint and len(parts) > 1:
        raise ValueError(
            f"the loss of {module} is joint: it takes all items of task {task} in one part, but they come in "
            f"{len(parts)}; put the step's samples into one microbatch and leave items_per_part of {module} unset"
        )
