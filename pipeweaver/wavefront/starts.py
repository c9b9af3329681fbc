"""Sequences of slices to begin the search with.

Example, the sketch {a on 2, b on 1: 30 ms} {b on 4: 10 ms} with layers of 10 ms: a[2, 3] b[1, 3] b[4, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.wavefront.metagraph import MetaGraph, Slice
from pipeweaver.wavefront.packing import Running


def from_sketch(graph: MetaGraph, sketch: Sequence[Running]) -> list[Slice]:
    """The sets of a sketch one after another, in whole layers, put in an order that respects the data flows."""
    heads, tails = _heads_and_tails(graph)

    def position(running: Running) -> float:
        ranks = [(heads[op] + 1) / (heads[op] + tails[op] + 1) for op, _ in running.members]
        return sum(ranks) / len(ranks)

    ordered = sorted(sketch, key=lambda running: (position(running), -running.time_ns))
    in_sketch: dict[int, float] = {}  # How much of each MetaOp the sketch does: about one.
    for running in ordered:
        for op, count in running.members:
            in_sketch[op] = in_sketch.get(op, 0.0) + running.time_ns / graph.ops[op].whole_ns(count)
    done = dict.fromkeys(in_sketch, 0.0)
    whole = dict.fromkeys(in_sketch, 0)
    last: dict[int, int] = {}
    slices: list[Slice] = []
    for running in ordered:
        for op, count in running.members:
            layers = graph.ops[op].num_layers
            done[op] += running.time_ns / graph.ops[op].whole_ns(count) / in_sketch[op]
            until = min(layers, round(layers * done[op]))
            if until > whole[op]:
                last[op] = len(slices)
                slices.append(Slice(op, whole[op], until, count, 0, 0))
                whole[op] = until
    for op, number in last.items():
        slices[number] = slices[number]._replace(stop=graph.ops[op].num_layers)
    slices += [Slice(i, 0, op.num_layers, op.counts[0], 0, 0) for i, op in enumerate(graph.ops) if i not in last]
    return in_order(graph, slices)


def in_order(graph: MetaGraph, slices: Sequence[Slice]) -> list[Slice]:
    """The same slices, those put off that come before their MetaOp's sources are done."""
    left = list(slices)
    done = [0] * len(graph.ops)
    ordered: list[Slice] = []
    while left:
        waiting = []
        for piece in left:
            if all(done[source] == graph.ops[source].num_layers for source in graph.sources[piece.op]):
                done[piece.op] += piece.stop - piece.start
                ordered.append(piece)
            else:
                waiting.append(piece)
        assert len(waiting) < len(left), "slices of a source are missing"
        left = waiting
    return ordered


def _heads_and_tails(graph: MetaGraph) -> tuple[list[int], list[int]]:
    """Least time before each MetaOp, and from its start to the end, over all paths, ns."""
    least = [op.whole_ns(op.counts[-1]) for op in graph.ops]
    heads, tails = [0] * len(least), list(least)
    for op in graph.order:
        heads[op] = max((heads[source] + least[source] for source in graph.sources[op]), default=0)
    for op in reversed(graph.order):
        for source in graph.sources[op]:
            tails[source] = max(tails[source], least[source] + tails[op])
    return heads, tails
