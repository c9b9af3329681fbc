"""Policy `wavefront-levels`, the paper's method: level by level, allocation, then waves (spindle.md, 3 and 4).

Each level starts when the one before has ended. Where the paper leaves a rule open, the level takes the one of a few
that ends first. Example with two levels on 4 workers:

    level 0 {vision, audio}   wave 0 | wave 1 |
    level 1 {language}                        | wave 2
"""

from __future__ import annotations

from itertools import product

from pipeweaver.wavefront.allocate import relaxed, two_counts
from pipeweaver.wavefront.metagraph import FREE, Links, MetaGraph, Schedule, Slice
from pipeweaver.wavefront.waves import Rules, Wave, make_waves

RULES = tuple(Rules(nearest=n, extend=e, by_far=f) for n, e, f in product((True, False), repeat=3) if e or not f)


def plan_levels(graph: MetaGraph, workers: int, links: Links = FREE) -> Schedule:
    """The paper's plan. Raises ValueError if a MetaOp needs more than `workers` workers."""
    slices: list[Slice] = []
    numbers: list[int] = []
    clock_ns = 0
    for level in range(max(graph.level, default=-1) + 1):
        members = [i for i in graph.order if graph.level[i] == level]
        time_ns, _ = relaxed([graph.ops[i] for i in members], workers)
        shares = [share for i in members for share in two_counts(graph.ops[i], i, time_ns, workers)]
        plans = [
            _timed(graph, make_waves(graph.ops, shares, workers, rules), links, slices, clock_ns) for rules in RULES
        ]
        best = min(plans, key=lambda plan: max(piece.end_ns for piece, _ in plan))
        first = numbers[-1] + 1 if numbers else 0
        slices += [piece for piece, _ in best]
        numbers += [first + wave for _, wave in best]
        clock_ns = max(piece.end_ns for piece in slices)
    return Schedule(workers=workers, slices=tuple(slices), policy="wavefront-levels", waves=tuple(numbers))


def relaxed_optimum_ns(graph: MetaGraph, workers: int) -> float:
    """Sum over the levels of the optimum of the relaxation: a bound level by level, for concave speedups only."""
    levels: dict[int, list[int]] = {}
    for i, level in enumerate(graph.level):
        levels.setdefault(level, []).append(i)
    return sum(relaxed([graph.ops[i] for i in members], workers)[0] for members in levels.values())


def _timed(
    graph: MetaGraph, waves: list[Wave], links: Links, before: list[Slice], clock_ns: int
) -> list[tuple[Slice, int]]:
    """Slices of waves one after another from `clock_ns` on, each with the number of its wave.

    A wave starts when the one before has ended, and the data of all its members has come.
    """
    last: dict[int, Slice] = {piece.op: piece for piece in before}
    timed: list[tuple[Slice, int]] = []
    for number, wave in enumerate(waves):
        begin = clock_ns
        for share in wave:
            op = graph.ops[share.op]
            if share.op in last:
                if last[share.op].workers != share.workers:
                    lag = links.lag_ns(op.carried_bytes, last[share.op].workers, share.workers)
                    begin = max(begin, last[share.op].end_ns + lag)
            else:
                for flow in graph.flows:
                    if flow.destination == share.op:
                        source = last[flow.source]
                        begin = max(begin, source.end_ns + links.lag_ns(flow.num_bytes, source.workers, share.workers))
        for share in wave:
            start = last[share.op].stop if share.op in last else 0
            time = graph.ops[share.op].span_ns(start, start + share.layers, share.workers)
            last[share.op] = Slice(share.op, start, start + share.layers, share.workers, begin, begin + time)
            timed.append((last[share.op], number))
            clock_ns = max(clock_ns, begin + time)
    return timed
