"""Plans on random MetaGraphs: sound, above every bound, and ours never longer than others'."""

from __future__ import annotations

import itertools

import pytest

from pipeweaver.wavefront.baselines import sequential, task_parallel
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.levels import plan_levels, relaxed_optimum_ns
from pipeweaver.wavefront.metagraph import DataFlow, Links, MetaGraph, check_schedule
from pipeweaver.wavefront.packing import packing_bound
from pipeweaver.wavefront.plan import plan_wavefront
from tests.wavefront.graphs import meta_op, random_graph

WORKERS = (1, 2, 3, 4, 7, 8, 16, 64)
OTHERS = (sequential, task_parallel, plan_levels)


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed):
    workers = WORKERS[seed % len(WORKERS)]
    graph = random_graph(seed, workers=workers)
    links = Links(latency_ns=20_000, bytes_per_us=50_000) if seed % 3 == 0 else Links()
    ours = plan_wavefront(graph, workers, links, effort=40_000)
    check_schedule(graph, ours)
    assert ours.makespan_ns >= ours.lower_bound_ns > 0
    for plan in OTHERS:
        schedule = plan(graph, workers, links)
        check_schedule(graph, schedule)
        assert schedule.makespan_ns >= ours.makespan_ns
    assert plan_wavefront(graph, workers, links, effort=40_000) == ours


@pytest.mark.parametrize("seed", range(40))
def test_bounds_never_exceed_the_optimum_of_small_graphs(seed):
    """All plans of one slice per MetaOp and count, in all orders: none is below a bound, and the search finds the best."""
    graph = random_graph(seed, most_ops=4, workers=4)
    bounds = area_bound_ns(graph, 4), packing_bound(graph, 4).lower_bound_ns
    best = best_of_all(graph, 4)
    assert max(bounds) <= best
    assert plan_wavefront(graph, 4, effort=200_000).makespan_ns <= best


def best_of_all(graph, workers):
    """The shortest makespan of plans in which every MetaOp is one slice, by trying all counts and all orders."""
    best = None
    counts = [[count for count in op.counts if count <= workers] for op in graph.ops]
    for chosen in itertools.product(*counts):
        for order in itertools.permutations(range(len(graph.ops))):
            ends: dict[int, int] = {}
            running: list[tuple[int, int, int]] = []
            for op in order:
                if any(source not in ends for source in graph.sources[op]):
                    break
                earliest = max((ends[source] for source in graph.sources[op]), default=0)
                time = graph.ops[op].whole_ns(chosen[op])
                starts = sorted({earliest, *(end for _, end, _ in running if end > earliest)})
                begin = next(s for s in starts if fits(running, s, s + time, chosen[op], workers))
                ends[op] = begin + time
                running.append((begin, begin + time, chosen[op]))
            else:
                best = min(best or max(ends.values()), max(ends.values()))
    return best


def fits(running, begin, stop, count, workers):
    moments = [begin, *(start for start, _, _ in running if begin < start < stop)]
    return all(count + sum(c for s, e, c in running if s <= moment < e) <= workers for moment in moments)


def test_one_metaop_takes_its_largest_count():
    graph = MetaGraph(ops=(meta_op("a", 5, {1: 8_000, 2: 5_000, 4: 4_000}),))
    for workers, time in ((1, 40_000), (2, 25_000), (3, 25_000), (9, 20_000)):
        plan = plan_wavefront(graph, workers)
        assert plan.makespan_ns == plan_levels(graph, workers).makespan_ns == time
        assert plan.lower_bound_ns == pytest.approx(time, abs=1)


def test_what_does_not_scale_runs_side_by_side():
    graph = MetaGraph(ops=tuple(meta_op(f"op{i}", 4, {1: 1_000, 2: 990, 4: 980}) for i in range(4)))
    plan = plan_wavefront(graph, 4)
    assert plan.makespan_ns == 4_000
    assert sequential(graph, 4).makespan_ns == 4 * 4 * 980
    assert {piece.workers for piece in plan.slices} == {1}


def test_no_barrier_between_levels():
    # b is short and c, after it, long: by levels c waits for a.
    ops = (meta_op("a", 10, {1: 1_000}), meta_op("b", 1, {1: 1_000}), meta_op("c", 9, {1: 1_000}))
    graph = MetaGraph(ops=ops, flows=(DataFlow(1, 2),))
    assert plan_levels(graph, 2).makespan_ns == 19_000
    assert plan_wavefront(graph, 2).makespan_ns == 10_000


def test_the_theorem_needs_concave_speedups():
    # T = 1 / n^2, two layers: in parallel 1.0, one after another 0.5.
    graph = MetaGraph(ops=(meta_op("a", 1, {1: 1_000, 2: 250}), meta_op("b", 1, {1: 1_000, 2: 250})))
    assert plan_wavefront(graph, 2).makespan_ns == sequential(graph, 2).makespan_ns == 500


def test_changing_the_count_takes_time():
    ops = (meta_op("a", 2, {1: 10_000, 2: 6_000}, carried_bytes=1_000), meta_op("b", 1, {1: 10_000}))
    free = plan_wavefront(MetaGraph(ops=ops), 2).makespan_ns
    dear = plan_wavefront(MetaGraph(ops=ops), 2, Links(latency_ns=3_000)).makespan_ns
    assert (free, dear) == (16_000, 20_000)


def test_task_parallel_gives_workers_where_they_help():
    ops = (
        meta_op("a", 1, {1: 90, 2: 45, 3: 30}, task="a"),
        meta_op("b", 1, {1: 30, 2: 29}, task="b"),
        meta_op("c", 1, {1: 10}, task="c"),
    )
    plan = task_parallel(MetaGraph(ops=ops), 5)
    assert {piece.op: piece.workers for piece in plan.slices} == {0: 3, 1: 1, 2: 1}
    assert plan.makespan_ns == 30
    crowded = task_parallel(MetaGraph(ops=ops), 2)
    assert crowded.makespan_ns == 90
    assert {piece.op: piece.start_ns for piece in crowded.slices} == {0: 0, 1: 0, 2: 30}


def test_relaxed_optimum_is_a_bound_for_levels_with_concave_speedups():
    ops = tuple(meta_op(f"op{i}", 6, {n: 1_000 + 12_000 * (i + 1) // n for n in (1, 2, 4, 8)}) for i in range(5))
    graph = MetaGraph(ops=ops, flows=(DataFlow(0, 3), DataFlow(1, 4)))
    for workers in (1, 2, 4, 8, 16):
        assert plan_levels(graph, workers).makespan_ns >= relaxed_optimum_ns(graph, workers) * (1 - 1e-9)
