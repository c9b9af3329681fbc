"""The search over orders: anytime, repeatable, within limits, at or near the optimum where that is known."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_cases import chains, check_times, peaks

from benchmarks.held import Held, HeldStage, held_problem
from benchmarks.oracle import optimum, random_instance
from pipeweaver.planner.explore import Search, tails
from pipeweaver.planner.listing import LimitError, list_schedule, needed_alone
from pipeweaver.planner.neighbours import tabu_search
from pipeweaver.planner.problem import bound_ns

PROBLEMS = st.builds(
    chains, st.integers(0, 10**6), workers=st.integers(1, 4), microbatches=st.integers(0, 7), depth=st.integers(1, 6)
)


@settings(max_examples=60)
@given(PROBLEMS, st.integers(0, 99), st.integers(1, 300), st.integers(0, 300), st.floats(1, 3))
def test_more_rounds_are_never_worse_and_equal_arguments_give_equal_schedules(problem, seed, few, more, slack):
    limits = (slack * needed_alone(problem).max(axis=0, initial=0)).astype(np.int64)
    short, again, together = (Search(problem, limits, seed=seed) for _ in range(3))
    short.run(few)
    check_times(problem, short.best)
    assert (peaks(problem, short.best.sequence) <= limits).all()
    assert short.best.makespan_ns >= bound_ns(problem)
    before = short.best.makespan_ns
    short.run(more)
    assert short.best.makespan_ns <= before
    for step in (few, more):
        again.run(step)
    together.run(few + more)
    assert (again.best.sequence == short.best.sequence).all()
    assert (together.best.sequence == short.best.sequence).all()


@settings(max_examples=40)
@given(PROBLEMS, st.integers(0, 99))
def test_a_known_schedule_is_where_the_search_begins(problem, seed):
    first = list_schedule(problem, np.random.default_rng(seed).random(problem.num_stages))
    assert Search(problem, first=first).best.makespan_ns <= first.makespan_ns


def test_limits_that_nothing_keeps_to_are_refused():
    problem = chains(1, workers=2, microbatches=3, depth=5)
    with pytest.raises(LimitError, match=r"worker \d needs [\d,]+ bytes even with one microbatch at a time"):
        Search(problem, needed_alone(problem).max(axis=0) - 1)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_local_search_keeps_orders_valid_and_within_limits(seed):
    problem, limits = held_problem(random_instance(seed, limited=True))
    start = list_schedule(problem, -tails(problem).astype(float), limits=limits)
    found = tabu_search(problem, start.orders(problem), limits, seed=seed, moves=60)
    check_times(problem, found)
    assert (peaks(problem, found.sequence) <= limits).all()
    assert found.makespan_ns <= start.makespan_ns


def test_near_the_optimum_and_never_above_it_the_bound():
    """Where CP-SAT proves the optimum within seconds, limits on every second instance."""
    gaps = []
    for seed in range(12):
        held = random_instance(seed, most_stages=24)
        problem, limits = held_problem(held)
        search = Search(problem, limits, seed=seed)
        search.run(2_000)
        best = optimum(held, seconds=10, known=search.best.start_ns.tolist())
        assert bound_ns(problem) <= best.makespan
        if best.is_proven:
            assert search.best.makespan_ns >= best.makespan
            gaps.append(search.best.makespan_ns / best.makespan - 1)
    assert len(gaps) >= 8
    assert mean(gaps) <= 0.005 and max(gaps) <= 0.02


def test_the_bound_counts_what_precedes_and_follows_on_one_worker():
    """Three images on worker 0, a text on worker 1 that reads them all, their backwards: no path is that long."""
    stages = [HeldStage(worker=0, duration=2)] * 3 + [HeldStage(worker=1, duration=5, after=(0, (1, 1), 2))]
    stages += [HeldStage(worker=0, duration=4, after=(3,))] * 3
    problem, _ = held_problem(Held(workers=2, stages=tuple(stages)))
    assert bound_ns(problem) == 3 * 2 + 5 + 3 * 4
    search = Search(problem, enough_ns=bound_ns(problem))
    search.run(100)
    assert search.best.makespan_ns == bound_ns(problem)
