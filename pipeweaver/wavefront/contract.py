"""Contraction: runs of equal layers become MetaOps (spindle.md, section 1).

In topological order i and j are merged while i has one successor, j one predecessor, and both the same kind and the
same input size. Shared parameters are not a data flow. Example, two tasks; text and language are shared by both:

    A -> B -> C \\                               M1 {A, B, C} \\
                 F -> G -> H     becomes                       M3 {F, G, H}
         D -> E /                                M2 {D, E}    /
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of one task. `kind` and `size` say what it costs, `parameters` names what it may share with others."""

    name: str
    kind: str
    size: tuple[int, ...]
    parameters: str = ""


class Contraction(NamedTuple):
    """`members[m]` are the layers of MetaOp m in order, `flows` pairs of MetaOps, `level[m]` the longest path to m."""

    members: tuple[tuple[int, ...], ...]
    flows: tuple[tuple[int, int], ...]
    level: tuple[int, ...]


def contract(layers: Sequence[Layer], flows: Sequence[tuple[int, int]]) -> Contraction:
    """MetaOps of a graph of layers, in the order of their first layers.

    `flows` are pairs (source, destination) of positions in `layers`; those that other paths imply order nothing and
    are left out. Raises ValueError, naming its layers, for a cycle.
    """
    needed = direct(len(layers), flows, [layer.name for layer in layers])
    before: list[list[int]] = [[] for _ in layers]
    after: list[list[int]] = [[] for _ in layers]
    for source, destination in needed:
        before[destination].append(source)
        after[source].append(destination)
    run_of: dict[int, list[int]] = {}
    for i in TopologicalSorter({i: before[i] for i in range(len(layers))}).static_order():
        if len(before[i]) == 1 and len(after[before[i][0]]) == 1:
            source = before[i][0]
            if (layers[source].kind, layers[source].size) == (layers[i].kind, layers[i].size):
                run_of[source].append(i)
                run_of[i] = run_of[source]
                continue
        run_of[i] = [i]
    members = sorted({id(run): tuple(run) for run in run_of.values()}.values())
    number = {i: m for m, run in enumerate(members) for i in run}
    joined = sorted({(number[s], number[d]) for s, d in needed if number[s] != number[d]})
    level = [0] * len(members)
    for m in TopologicalSorter({m: [s for s, d in joined if d == m] for m in range(len(members))}).static_order():
        level[m] = max((level[s] + 1 for s, d in joined if d == m), default=0)
    return Contraction(tuple(members), tuple(joined), tuple(level))


def sharing(layers: Sequence[Layer], members: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of MetaOps that share parameters, by position; those that share with none are left out."""
    users: dict[str, list[int]] = {}
    for m, run in enumerate(members):
        for i in run:
            if layers[i].parameters and m not in users.setdefault(layers[i].parameters, []):
                users[layers[i].parameters].append(m)
    return tuple(dict.fromkeys(tuple(group) for group in users.values() if len(group) > 1))


def direct(count: int, flows: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Flows between 0..count-1 without those that a longer path implies. Raises ValueError for a cycle."""
    before: dict[int, set[int]] = {i: set() for i in range(count)}
    for source, destination in flows:
        before[destination].add(source)
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ValueError(f"the data flows form a cycle: {' -> '.join(names[i] for i in error.args[1])}") from None
    reached = [0] * count  # Bits of all that lie before.
    for i in order:
        for source in before[i]:
            reached[i] |= reached[source] | 1 << source
    return tuple(
        (source, i)
        for i in range(count)
        for source in sorted(before[i])
        if not any(reached[other] >> source & 1 for other in before[i] if other != source)
    )
