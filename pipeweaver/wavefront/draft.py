"""From placed wavefront schedules to the placement of a run, and from that to the draft of a step.

A slice on n workers is n chunks with the same layers, one after another in the order of their parts; slices are listed in
the order in which they start. So the placement alone says what a step needs: every slice's items are cut into n runs,
every worker runs its chunks forward in the order of their numbers, and backward in reverse. Example, three workers:

    chunks    0 text.language[0:1]@2   1 text.language[1:3]@0   2 text.language[1:3]@1
    worker 2  0F0 0B0     worker 0  1F0 1B0     worker 1  2F0 2B0

Where activations of all tasks do not fit at once, there are several passes of forward and backward: each has a share
of every task's samples, or, where a joint loss needs them together, some of the tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share, linked
from pipeweaver.model.graph import ModelGraph, positions
from pipeweaver.schedule.connect import has_backward
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Stage
from pipeweaver.wavefront.bind import item_weights, items_of, layer_at
from pipeweaver.wavefront.cuts import even_cuts
from pipeweaver.wavefront.metagraph import MetaGraph, Schedule
from pipeweaver.wavefront.passes import pass_of_items


def placement_of(graphs: Sequence[MetaGraph], schedules: Sequence[Schedule]) -> Placement:
    """The chunks of placed schedules, one per pass: slice by slice in the order of their starts."""
    chunks: list[Chunk] = []
    firsts: list[int] = []
    for graph, schedule in zip(graphs, schedules, strict=True):
        assert len(schedule.devices) == len(schedule.slices), "the schedule is not placed"
        firsts.append(len(chunks))
        for piece, devices in zip(schedule.slices, schedule.devices, strict=True):
            op = graph.ops[piece.op]
            start, stop = op.first_layer + piece.start, op.first_layer + piece.stop
            chunks += [
                Chunk(task=op.task, module=op.module, start=start, stop=stop, worker=device) for device in devices
            ]
    return Placement(workers=schedules[0].workers, chunks=tuple(chunks), passes=tuple(firsts[1:]))


def with_idle(placement: Placement, tasks: Mapping[str, Sequence[str]], graph: ModelGraph) -> Placement:
    """The placement with chunks for the modules that a task uses but a pass had no items for in the planned batch.

    They are those of the first pass that has the module; where none has, the module is whole on the worker with the
    fewest layers. Every pass of a task gets all of its modules. `tasks` are the modules of each.
    """
    starts = [0, *placement.passes, len(placement.chunks)]
    passes = [list(placement.chunks[a:b]) for a, b in pairwise(starts)]
    layers = [0] * placement.workers
    for chunk in placement.chunks:
        layers[chunk.worker] += chunk.stop - chunk.start
    for task, modules in tasks.items():
        own = [chunks for chunks in passes if any(chunk.task == task for chunk in chunks)] or passes[:1]
        for name in modules:
            in_each = [[chunk for chunk in chunks if (chunk.task, chunk.module) == (task, name)] for chunks in own]
            home = next((found for found in in_each if found), None)
            if home is None:
                worker = min(range(placement.workers), key=lambda worker: (layers[worker], worker))
                count = len(graph.by_name[name].layers)
                layers[worker] += count
                home = [Chunk(task=task, module=name, start=0, stop=count, worker=worker)]
            for chunks, found in zip(own, in_each, strict=True):
                if not found:
                    chunks += home
    firsts = list(accumulate(len(chunks) for chunks in passes))
    return Placement(
        workers=placement.workers,
        chunks=tuple(chunk for chunks in passes for chunk in chunks),
        passes=tuple(firsts[:-1]),
    )


def draft_of(
    graph: ModelGraph,
    placement: Placement,
    share: Share,
    costs: Costs,
    *,
    finer: int = 1,
    forward_only: bool = False,
    policy: str = "wavefront",
    seed: int = 0,
    rounds: int = 0,
) -> Draft:
    """Parts and orders of a step on the placement of a wavefront plan, every pass cut into `finer` ones.

    Raises ValueError for items that the placement has no chunks for, and for a joint loss on several workers.
    """
    members = items_of(graph, share)
    _check(graph, share, placement, members)
    pass_of = pass_of_items(graph, share, placement, finer)
    sources = linked(share.items, share.links)
    starts = [0, *placement.passes, len(placement.chunks)]
    parts: list[list[Part]] = [[] for _ in placement.chunks]
    number: dict[tuple[int, int], int] = {}  # (chunk, pass) -> its part
    weights: dict[tuple[str, str, int], list[int]] = {}
    for chunks in slices_of(placement):
        chunk = placement.chunks[chunks[0]]
        coarse = max(i for i in range(len(starts) - 1) if starts[i] <= chunks[0])
        for turn in range(coarse * finer, (coarse + 1) * finer):
            items = [i for i in members.get((chunk.task, chunk.module), ()) if pass_of[i] == turn]
            if not items:
                continue
            key = (chunk.task, chunk.module, turn)
            if key not in weights:
                weights[key] = item_weights(graph, share, costs, items, sources)
            cuts = even_cuts(weights[key], len(chunks))
            for position, chunk_number in enumerate(chunks):
                run = items[cuts[position] : cuts[position + 1]]
                if run:
                    number[chunk_number, turn] = len(parts[chunk_number])
                    parts[chunk_number].append(Part(items=tuple(run), microbatch=turn))
    return Draft(
        placement=placement,
        parts=tuple(map(tuple, parts)),
        order=_orders(graph, share, placement, number, (len(starts) - 1) * finer, forward_only),
        forward_only=forward_only,
        policy=policy,
        seed=seed,
        rounds=rounds,
    )


def slices_of(placement: Placement) -> list[list[int]]:
    """The chunks of each slice: neighbours with the same task and layers, in one pass."""

    def key(number: int) -> tuple[str, str, int, int, int]:
        chunk = placement.chunks[number]
        turn = sum(first <= number for first in placement.passes)
        return chunk.task, chunk.module, chunk.start, chunk.stop, turn

    return [list(run) for _, run in groupby(range(len(placement.chunks)), key=key)]


def _orders(
    graph: ModelGraph,
    share: Share,
    placement: Placement,
    number: Mapping[tuple[int, int], int],
    passes: int,
    forward_only: bool,
) -> tuple[tuple[Stage, ...], ...]:
    backward = has_backward(graph, placement)
    orders: list[list[Stage]] = [[] for _ in range(placement.workers)]
    sequence = _sequence(graph, share, placement)
    for turn in range(passes):
        present = [chunk for chunk in sequence if (chunk, turn) in number]
        for chunk in present:
            orders[placement.chunks[chunk].worker].append(Stage(chunk, number[chunk, turn], "F"))
        for chunk in reversed(present):
            if backward[chunk] and not forward_only:
                orders[placement.chunks[chunk].worker].append(Stage(chunk, number[chunk, turn], "B"))
    return tuple(map(tuple, orders))


def _sequence(graph: ModelGraph, share: Share, placement: Placement) -> list[int]:
    """All chunks in the order of their numbers, but for those that would run before what this share needs them to wait
    for: it may link items that the planned batch did not, or have items of modules that were idle there."""
    slices = slices_of(placement)
    needed = _needed(graph, share, placement, slices)
    followers: list[list[int]] = [[] for _ in slices]
    missing = [len(of_slice) for of_slice in needed]
    for position, of_slice in enumerate(needed):
        for other in of_slice:
            followers[other].append(position)
    ready = [position for position, count in enumerate(missing) if count == 0]
    sequence: list[int] = []
    while ready:
        position = heapq.heappop(ready)
        sequence += slices[position]
        for other in followers[position]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready, other)
    return sequence


def _needed(graph: ModelGraph, share: Share, placement: Placement, slices: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each slice the slices that it takes tensors from, by position."""
    items, chunks = share.items, placement.chunks
    joined = {(items[s].task, items[s].module, items[d].module) for s, d in share.links}
    at: dict[tuple[str, str, int, int], int] = {}  # (task, module, layer, pass) -> slice
    turns = [sum(first <= of_slice[0] for first in placement.passes) for of_slice in slices]
    for position, of_slice in enumerate(slices):
        chunk = chunks[of_slice[0]]
        for layer in range(chunk.start, chunk.stop):
            at[chunk.task, chunk.module, layer, turns[position]] = position
    needed: list[set[int]] = [set() for _ in slices]
    for (task, name, layer, turn), position in at.items():
        if layer and at.get((task, name, layer - 1, turn), position) != position:
            needed[position].add(at[task, name, layer - 1, turn])
    tasks = dict.fromkeys((task, turn) for task, _, _, turn in at)
    for flow in graph.flows:
        sent = layer_at(graph.by_name[flow.source], graph.sent(flow)[0])
        reading = graph.by_name[flow.destination]
        for task, turn in tasks:
            if flow.source != flow.destination and (task, flow.source, flow.destination) not in joined:
                continue
            source = at.get((task, flow.source, sent, turn))
            for place, layer_spec in positions(reading):
                reader = at.get((task, flow.destination, layer_at(reading, place), turn))
                if flow.name in layer_spec.reads and None not in (source, reader) and source != reader:
                    assert source is not None and reader is not None
                    needed[reader].add(source)
    return needed


def _check(
    graph: ModelGraph, share: Share, placement: Placement, members: Mapping[tuple[str, str], Sequence[int]]
) -> None:
    held = dict.fromkeys((chunk.task, chunk.module) for chunk in placement.chunks)
    for (task, module), items in members.items():
        if (task, module) not in held:
            raise ValueError(
                f"item {share.items[items[0]].name} belongs to module {module} of task {task}, which the placement does "
                f"not hold; it was made for {', '.join(f'{t}/{m}' for t, m in held)}"
            )
    for chunks in slices_of(placement):
        chunk = placement.chunks[chunks[0]]
        loss, last = graph.by_name[chunk.module].loss, chunk.stop == len(graph.by_name[chunk.module].layers)
        if loss is not None and loss.joint and last and len(chunks) > 1:
            raise ValueError(
                f"the loss of {chunk.module} is joint: it takes all items of task {chunk.task} in one part, but its "
                f"last layer is on {len(chunks)} workers"
            )
