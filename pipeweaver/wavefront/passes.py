"""Passes: forward and backward several times, each with less, where activations of a whole step would not fit.

A task's samples are split over the passes, whole samples in the order drawn, even in tokens. A task with a joint loss
needs all of its samples at once: it goes into one pass, the largest first, each where there is least so far. Example,
two passes, matching with a joint loss:

    caption 0 1 2 3    matching 0 1 2 3    text 0 1        pass 0: caption 0 1, text 0    pass 1: caption 2 3, text 1, matching
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.ir import Placement
from pipeweaver.wavefront.cuts import even_cuts


def split_passes(graph: ModelGraph, share: Share, passes: int) -> tuple[Share, ...]:
    """The share of each pass; a pass that would have nothing is left out."""
    tasks = dict.fromkeys(item.task for item in share.items)
    pass_of = _assigned(graph, share, {task: tuple(range(passes)) for task in tasks})
    members = [[i for i, turn in enumerate(pass_of) if turn == number] for number in range(passes)]
    return tuple(_part_of(share, positions) for positions in members if positions)


def pass_of_items(graph: ModelGraph, share: Share, placement: Placement, finer: int = 1) -> list[int]:
    """For each item its pass on a placement whose every pass is run as `finer` ones: 0..passes * finer - 1."""
    own: dict[str, list[int]] = {}
    for number, chunk in enumerate(placement.chunks):
        turn = sum(first <= number for first in placement.passes)
        if turn not in own.setdefault(chunk.task, []):
            own[chunk.task].append(turn)
    turns = {task: tuple(turn * finer + i for turn in of_task for i in range(finer)) for task, of_task in own.items()}
    return _assigned(graph, share, turns)


def _assigned(graph: ModelGraph, share: Share, turns: Mapping[str, Sequence[int]]) -> list[int]:
    """For each item one of the passes that its task may be in."""
    joint = {module.name for module in graph.modules if module.loss is not None and module.loss.joint}
    samples: dict[str, dict[int, list[int]]] = {}
    for position, item in enumerate(share.items):
        samples.setdefault(item.task, {}).setdefault(item.draw, []).append(position)
    whole = {item.task for item in share.items if item.module in joint}
    work = {task: sum(_work(graph, share, draw) for draw in draws.values()) for task, draws in samples.items()}
    load: dict[int, int] = {}
    assigned = [0] * len(share.items)
    for task, draws in samples.items():
        if task not in whole:
            turns_of_task = turns[task]
            cuts = even_cuts(
                [sum(share.items[i].sizes["tokens"] for i in draw) for draw in draws.values()], len(turns_of_task)
            )
            for i, turn in enumerate(turns_of_task):
                for draw in list(draws.values())[cuts[i] : cuts[i + 1]]:
                    load[turn] = load.get(turn, 0) + _work(graph, share, draw)
                    for position in draw:
                        assigned[position] = turn
    for task in sorted(whole, key=lambda task: (-work[task], task)):
        turn = min(turns[task], key=lambda turn: (load.get(turn, 0), turn))
        load[turn] = load.get(turn, 0) + work[task]
        for draw in samples[task].values():
            for position in draw:
                assigned[position] = turn
    return assigned


def _work(graph: ModelGraph, share: Share, positions: Sequence[int]) -> int:
    """Rows times layers: what activations grow with."""
    return sum(share.items[i].sizes["tokens"] * len(graph.by_name[share.items[i].module].layers) for i in positions)


def _part_of(share: Share, positions: Sequence[int]) -> Share:
    """The same share with some of its items only."""
    number = {position: i for i, position in enumerate(positions)}
    items = tuple(share.items[i] for i in positions)
    draws = {f"{item.task}/{item.draw}" for item in items}
    return Share(
        step=share.step,
        replica=share.replica,
        num_replicas=share.num_replicas,
        items=items,
        links=tuple((number[s], number[d]) for s, d in share.links if s in number and d in number),
        microbatches=(tuple(range(len(items))),),
        records={name: record for name, record in share.records.items() if name in draws},
        normalisers=share.normalisers,
    )
