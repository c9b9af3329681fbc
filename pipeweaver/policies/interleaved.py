"""Interleaved 1F1B (Narayanan et al., 2104.04473): v pieces per worker divide fill and drain by v.

Microbatches pass in groups: a worker takes a group through its first piece, then through its second. Four
microbatches on two workers with two pieces each (letters: the second piece), equal forward and backward:

    worker 0  0 1 A B 2 A 3 B C 0 D 1 . C . D 2 3
    worker 1  . 0 1 A A B B 2 0 3 1 C C D D 2 3 .      (m + (P - 1) / v) * (f + b), f and b over all v pieces

The published order wants the number of microbatches to be a multiple of P. Here any number works: groups are as
even as possible, of P to 2P - 1 microbatches (fewer only if there are fewer in all), and the order is that of a
greedy run with equal stages, forwards and backwards in the published sequence, at most the published number in
flight. A greedy run cannot deadlock, and where the number divides it takes the published time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.policies.pieces import Unit, Units, place_contiguous, plan_in_units
from pipeweaver.policies.policy import Policy
from pipeweaver.schedule.ir import Placement

FORWARD, BACKWARD = 1, 2
"""Durations in the greedy run that fixes the order."""


def place(
    graph: ModelGraph,
    workers: int,
    costs: Costs,
    shares: Sequence[Share],
    options: PolicyOptions = DEFAULTS,
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
) -> Placement:
    """`options.pieces_per_worker` pieces of the concatenated modules per worker."""
    return place_contiguous(graph, workers, costs, shares, options, pieces_per_worker=options.pieces_per_worker)


@lru_cache(maxsize=64)
def unit_order(workers: int, pieces: int, microbatches: int) -> Units:
    num_groups = max(1, microbatches // workers)
    cuts = [i * microbatches // num_groups for i in range(num_groups + 1)]
    groups = [range(a, b) for a, b in pairwise(cuts)]
    largest = max(len(group) for group in groups)
    forwards = [[Unit(j, m, "F") for g in groups for j in range(w, pieces, workers) for m in g] for w in range(workers)]
    backwards = [
        [Unit(j, m, "B") for g in groups for j in reversed(range(w, pieces, workers)) for m in g]
        for w in range(workers)
    ]
    most_in_flight = [
        2 * (workers - 1 - w) + (len(range(w, pieces, workers)) - 1) * largest + 1 for w in range(workers)
    ]
    order: list[list[Unit]] = [[] for _ in range(workers)]
    done_forward, done_backward, free_at = [0] * workers, [0] * workers, [0] * workers
    ends: dict[Unit, int] = {}
    for _ in range(2 * pieces * microbatches):
        options: list[tuple[int, int, int, Unit]] = []
        for w in range(workers):
            # A forward and a backward that could start at the same time alternate.
            after_forward = bool(order[w]) and order[w][-1].phase == "F"
            in_flight = done_forward[w] - done_backward[w]
            if done_forward[w] < len(forwards[w]) and in_flight < most_in_flight[w]:
                unit = forwards[w][done_forward[w]]
                before = [] if unit.piece == 0 else [unit._replace(piece=unit.piece - 1)]
                if all(b in ends for b in before):
                    start = max([free_at[w], *(ends[b] for b in before)])
                    options.append((start, 2 * after_forward, w, unit))
            if done_backward[w] < len(backwards[w]):
                unit = backwards[w][done_backward[w]]
                before = [unit._replace(phase="F")]
                if unit.piece + 1 < pieces:
                    before.append(unit._replace(piece=unit.piece + 1))
                if all(b in ends for b in before):
                    options.append((max([free_at[w], *(ends[b] for b in before)]), 1, w, unit))
        assert options, "a greedy run within the published number in flight always goes on"
        start, _, w, unit = min(options)
        ends[unit] = free_at[w] = start + (FORWARD if unit.phase == "F" else BACKWARD)
        order[w].append(unit)
        done_forward[w] += unit.phase == "F"
        done_backward[w] += unit.phase == "B"
    return tuple(map(tuple, order))


POLICY = Policy(place=place, plan=plan_in_units("interleaved-1f1b", unit_order))
