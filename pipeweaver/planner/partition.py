"""Cut modules into chunks of even cost and lay them on workers.

Two ways. *Contiguous*: the modules one after another, sources first, are cut into pieces, piece j on worker
j mod P; a piece may span modules, so it is one chunk of each. *By modality* (pipeweaver.md, section 1): each
module is cut for itself into P*K chunks, chunk j on worker j mod P, so that every worker has a share of every
module. Example, vision of 4 layers and language of 6 (twice the cost) on 2 workers:

    contiguous      vision[0:4] language[0:2] @0 | language[2:6] @1
    by modality     vision[0:2]@0 vision[2:4]@1 language[0:3]@0 language[3:6]@1

`before` and `after` of a module count with its first and last layer. A module with fewer layers than P*K gets
a smaller K; one with fewer layers than workers is spread one layer each over the workers that carry least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from pipeweaver.costs import Costs
from pipeweaver.data.items import Item, Share, linked
from pipeweaver.model.graph import ModelGraph, topological
from pipeweaver.planner.options import Balance
from pipeweaver.schedule.gradients import has_backward
from pipeweaver.schedule.ir import Chunk, Placement


def split(costs: Sequence[int], slots: int) -> tuple[int, ...]:
    """Cut a list into `slots` runs, none empty, so that the largest sum is smallest; among those, evenly.

    Evenly means the smallest sum of squares, then the earliest cuts. Exact. Returns the slots + 1 cut
    positions, 0 and len(costs) included: split([3, 1, 1, 2], 2) == (0, 1, 4).
    """
    assert 1 <= slots <= len(costs), (slots, len(costs))
    assert min(costs) >= 0, costs
    if slots == 1:
        return 0, len(costs)
    sums = [0, *accumulate(costs)]
    limit = _smallest_largest_sum(costs, sums, slots)
    # Which splits keep to the limit: a dynamic programme from the back, over the number of runs still to come.
    # best[i] is the least sum of squares of costs[i:] in `runs` runs, first_cut[runs][i] the end of its first.
    count = len(costs)
    best: list[int | None] = [None] * count + [0]
    first_cut = [[0] * (count + 1)]
    for runs in range(1, slots + 1):
        longer: list[int | None] = [None] * (count + 1)
        cuts = [0] * (count + 1)
        for start in range(count - runs, -1, -1):
            for stop in range(start + 1, count - runs + 2):
                size = sums[stop] - sums[start]
                if size > limit:
                    break
                rest = best[stop]
                if rest is not None:
                    squares = size * size + rest
                    known = longer[start]
                    if known is None or squares < known:
                        longer[start], cuts[start] = squares, stop
        best = longer
        first_cut.append(cuts)
    positions = [0]
    for runs in range(slots, 0, -1):
        positions.append(first_cut[runs][positions[-1]])
    return tuple(positions)


def layer_costs(
    graph: ModelGraph, costs: Costs, shares: Sequence[Share], balance: Balance = "cost"
) -> dict[str, list[int]]:
    """For each module one number per layer, `before` and `after` counted with the first and the last.

    By "cost": forward and, where there is one, backward nanoseconds over all microbatches of `shares`; layers
    of a module that the shares do not use count 1 each. By "parameters": bytes that a worker holds for it.
    """
    result: dict[str, list[int]] = {}
    tasks = tasks_of(shares)
    for module in graph.modules:
        count = len(module.layers)
        singles = [Chunk(task=tasks[0], module=module.name, start=i, stop=i + 1, worker=0) for i in range(count)]
        if balance == "parameters":
            result[module.name] = [
                sum(costs.static_bytes(name) for name, _ in module.range(i, i + 1)) for i in range(count)
            ]
            continue
        backward = has_backward(graph, Placement(workers=1, chunks=tuple(singles)))
        groups = [group for share in shares for group in _microbatch_items(share, module.name)]
        # Layers of one kind cost the same, but for the ends, which carry `before` and `after`.
        known: dict[tuple[str, bool, bool, bool], int] = {}
        result[module.name] = []
        for index, chunk in enumerate(singles):
            key = (module.layers[index].kind, index == 0, index == count - 1, backward[index])
            if key not in known:
                stages = [costs.stage(chunk, items, links) for items, links in groups]
                spent = sum(s.forward_ns + (s.backward_ns if backward[index] else 0) for s in stages)
                known[key] = max(1, spent)
            result[module.name].append(known[key])
    return result


def contiguous(
    graph: ModelGraph,
    workers: int,
    per_layer: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str]],
    *,
    pieces_per_worker: int = 1,
    encoder_first: bool = False,
) -> Placement:
    """The concatenated modules in workers * pieces_per_worker pieces of even cost, piece j on worker j mod workers.

    `per_layer` holds one number per layer of each module, `tasks` the modules that each task uses; others are left out. With
    `encoder_first`, all encoders are one block that stays on the first worker. Raises ValueError if there are
    fewer layers than pieces.
    """
    used = {name for modules in tasks.values() for name in modules}
    names = [name for name in topological(graph) if name in used]
    first = [name for name in names if name in encoders(graph)] if encoder_first else []
    rest = [name for name in names if name not in first]
    layers = [(name, i) for name in rest for i in range(len(graph.by_name[name].layers))]
    weights = [per_layer[name][i] for name, i in layers]
    block = [(name, i) for name in first for i in range(len(graph.by_name[name].layers))]
    if block:
        weights.insert(0, sum(per_layer[name][i] for name, i in block))
    pieces = workers * pieces_per_worker
    if len(weights) < pieces:
        counted = ", ".join(f"{name} {len(graph.by_name[name].layers)}" for name in names)
        whole = f" ({' and '.join(first)} kept whole)" if first else ""
        raise ValueError(
            f"pipeline = {workers} with pieces_per_worker = {pieces_per_worker} needs {pieces} layers, but there are only "
            f"{len(weights)} to share out: {counted}{whole}; use fewer workers or pieces_per_worker, or policy dynamic"
        )
    cuts = split(weights, pieces)
    chunks: list[Chunk] = []
    for piece in range(pieces):
        members = list(layers[max(0, cuts[piece] - bool(block)) : cuts[piece + 1] - bool(block)])
        if block and piece == 0:
            members = block + members
        for task, modules in tasks.items():
            for name in names:
                indices = [i for module, i in members if module == name]
                if indices and name in modules:
                    chunks.append(
                        Chunk(task=task, module=name, start=indices[0], stop=indices[-1] + 1, worker=piece % workers)
                    )
    return Placement(workers=workers, chunks=tuple(chunks))


def by_modality(
    graph: ModelGraph,
    workers: int,
    per_layer: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str]],
    chunks_per_worker: Mapping[str, int],
) -> Placement:
    """Every module cut for itself into workers * K chunks of even cost, chunk j on worker j mod workers.

    `chunks_per_worker` is K by module, 1 where missing, less where a module has too few layers for it. Where there are
    fewer layers than workers, single layers go to the least loaded workers.
    """
    return laid_out(graph, workers, modality_cuts(graph, workers, per_layer, chunks_per_worker), per_layer, tasks)


def modality_cuts(
    graph: ModelGraph, workers: int, per_layer: Mapping[str, Sequence[int]], chunks_per_worker: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The cut positions of `by_modality`, by module."""
    cuts: dict[str, tuple[int, ...]] = {}
    for name in topological(graph):
        count = len(graph.by_name[name].layers)
        chunks = max(1, min(chunks_per_worker.get(name, 1), count // workers))
        cuts[name] = split(per_layer[name], min(count, workers * chunks))
    return cuts


def laid_out(
    graph: ModelGraph,
    workers: int,
    cuts: Mapping[str, Sequence[int]],
    per_layer: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str]],
) -> Placement:
    """The placement of `by_modality` from given cut positions."""
    loads = [0] * workers
    homes: dict[str, list[int]] = {}
    # Modules that reach every worker first; the short ones then go where there is least to do.
    for name in sorted(cuts, key=lambda name: (len(cuts[name]) <= workers, -sum(per_layer[name]))):
        pieces = [sum(per_layer[name][a:b]) for a, b in pairwise(cuts[name])]
        if len(pieces) < workers:
            least = sorted(range(workers), key=lambda worker: (loads[worker], worker))[: len(pieces)]
            homes[name] = sorted(least)
        else:
            homes[name] = [j % workers for j in range(len(pieces))]
        for worker, size in zip(homes[name], pieces, strict=True):
            loads[worker] += size
    chunks = [
        Chunk(task=task, module=name, start=cuts[name][j], stop=cuts[name][j + 1], worker=worker)
        for task, modules in tasks.items()
        for name in topological(graph)
        if name in modules
        for j, worker in enumerate(homes[name])
    ]
    return Placement(workers=workers, chunks=tuple(chunks))


def encoders(graph: ModelGraph) -> frozenset[str]:
    """Modules that feed another one, are fed by none and have no loss."""
    feeding = {flow.source for flow in graph.flows if flow.source != flow.destination}
    fed = {flow.destination for flow in graph.flows if flow.source != flow.destination}
    return frozenset(m.name for m in graph.modules if m.name in feeding and m.name not in fed and m.loss is None)


def tasks_of(shares: Sequence[Share]) -> tuple[str, ...]:
    """Names of the tasks in a sample of batches, sorted. ValueError if it is empty."""
    tasks = tuple(sorted({item.task for share in shares for item in share.items}))
    if not tasks:
        raise ValueError("a placement needs a sample of batches with at least one item; the data set yields none")
    return tasks


def task_modules(graph: ModelGraph, shares: Sequence[Share]) -> dict[str, tuple[str, ...]]:
    """The modules that each task activates, sources first: by the model graph, else those that its items name, and all
    of them for a single task."""
    tasks = tasks_of(shares)
    names = topological(graph)
    used = {(item.task, item.module) for share in shares for item in share.items}
    found = {}
    for task in tasks:
        active = graph.activated.get(task)
        if active is None:
            active = names if len(tasks) == 1 else tuple(name for name in names if (task, name) in used)
        found[task] = tuple(name for name in names if name in active)
    return found


def _microbatch_items(share: Share, module: str) -> list[tuple[list[Item], list[tuple[Item, ...]]]]:
    """(items, linked items) of a module for every microbatch and task that has some."""
    links = linked(share.items, share.links)
    groups: list[tuple[list[Item], list[tuple[Item, ...]]]] = []
    for microbatch in share.microbatches:
        by_task: dict[str, list[int]] = {}
        for i in microbatch:
            if share.items[i].module == module:
                by_task.setdefault(share.items[i].task, []).append(i)
        groups += [([share.items[i] for i in found], [links[i] for i in found]) for found in by_task.values()]
    return groups


def _smallest_largest_sum(costs: Sequence[int], sums: Sequence[int], slots: int) -> int:
    """The smallest limit for which `slots` runs suffice, by bisection over whole numbers."""

    def suffices(limit: int) -> bool:
        start = 0
        for _ in range(slots):
            start = bisect_left(sums, sums[start] + limit + 1) - 1
            if start >= len(costs):
                return True
        return False

    low, high = max(costs), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle + 1
    return low
