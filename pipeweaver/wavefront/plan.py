"""Policy `wavefront`, ours: over the whole MetaGraph, no barriers between levels, searched, with a bound beside it.

1. Bound: area and packing. 2. Starts: the packing's sketch, many plans made from front to back, the paper's levels,
and the baselines. 3. The best of them are annealed for a while, the best of those for longer. A plan is never longer
than `wavefront-levels`, `sequential` or `task-parallel`, since it begins with them. Example:

    schedule = plan_wavefront(graph, workers=8)
    schedule.makespan_ns / schedule.lower_bound_ns
"""

from __future__ import annotations

from pipeweaver.wavefront.baselines import sequential, task_parallel
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.levels import plan_levels
from pipeweaver.wavefront.metagraph import FREE, Links, MetaGraph, Schedule
from pipeweaver.wavefront.packing import packing_bound
from pipeweaver.wavefront.replan import replanned
from pipeweaver.wavefront.search import anneal, makespan_ns
from pipeweaver.wavefront.starts import from_sketch
from pipeweaver.wavefront.timeline import Pieces, pieces_of, tables, timed

EFFORT = 1_000_000
"""Slices placed in time during the search, by default: evaluations times slices."""
FRONT_TO_BACK = 100
"""Plans made from front to back."""
TRIED, KEPT = 6, 2
"""Starts that are annealed for a while, and those of them that go on."""


def plan_wavefront(
    graph: MetaGraph,
    workers: int,
    links: Links = FREE,
    *,
    seed: int = 0,
    effort: int = EFFORT,
) -> Schedule:
    """The best plan found, with its bound. Same arguments, same plan. Raises ValueError if a MetaOp fits on no count."""
    if not graph.ops:
        return Schedule(workers=workers, slices=(), policy="wavefront")
    packing = packing_bound(graph, workers)
    bound = max(packing.lower_bound_ns, area_bound_ns(graph, workers))
    table = tables(graph, workers, links)
    # The plans of others come first: where a start is as good, it need not be searched for.
    starts = [pieces_of(graph, plan(graph, workers, links).slices) for plan in (sequential, task_parallel, plan_levels)]
    starts.append(pieces_of(graph, from_sketch(graph, packing.sketch)))
    starts += [replanned(table, seed * FRONT_TO_BACK + number) for number in range(FRONT_TO_BACK)]
    known: dict[int, Pieces] = {}
    for start in starts:
        known.setdefault(makespan_ns(table, start), start)
    evaluations = len(starts)
    most = 3 * len(graph.ops) + 8
    for count, share in ((TRIED, 0.5), (KEPT, 0.5)):
        if min(known) <= bound * (1 + 1e-6):
            break
        # In the order of their starts, neighbours joined: as good, and fewer slices to place.
        best = [pieces_of(graph, timed(graph, table, known[makespan])) for makespan in sorted(known)[:count]]
        for number, pieces in enumerate(best):
            tries = max(100, int(share * effort / len(best)) // max(pieces.size, 2 * len(graph.ops)))
            found = anneal(table, pieces, seed=1 + seed * TRIED + number, evaluations=tries, most=most)
            known.setdefault(makespan_ns(table, found), found)
            evaluations += tries
    return Schedule(
        workers=workers,
        slices=timed(graph, table, known[min(known)]),
        policy="wavefront",
        lower_bound_ns=bound,
        evaluations=evaluations,
    )
