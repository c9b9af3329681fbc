"""List scheduling: valid in time and memory, never in a corner, what does not fit is refused with numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_cases import chains, check_times, ints, peaks

from pipeweaver.planner.explore import tails
from pipeweaver.planner.listing import TIE_BREAKS, LimitError, Rules, list_schedule, needed_alone
from pipeweaver.planner.problem import groups_of
from pipeweaver.planner.safety import admit, first_unsafe, make_safety

PROBLEMS = st.builds(
    chains, st.integers(0, 10**6), workers=st.integers(1, 4), microbatches=st.integers(1, 7), depth=st.integers(1, 6)
)
RULES = st.builds(
    Rules,
    tie_break=st.sampled_from(TIE_BREAKS),
    patience=st.sampled_from((0.0, 0.5, 2.0)),
    full=st.sampled_from((2.0, 0.5)),
    most_open=st.integers(0, 4),
)


@given(PROBLEMS, RULES, st.integers(0, 100))
def test_schedules_are_valid_and_repeatable(problem, rules, seed):
    rank = np.random.default_rng(seed).random(problem.num_stages)
    schedule = list_schedule(problem, rank, rules)
    check_times(problem, schedule)
    again = list_schedule(problem, rank, rules)
    assert (again.sequence == schedule.sequence).all() and (again.start_ns == schedule.start_ns).all()


@settings(max_examples=300)
@given(PROBLEMS, RULES, st.integers(0, 100), st.floats(1, 3))
def test_whatever_fits_alone_is_scheduled_within_the_limit(problem, rules, seed, slack):
    limits = (slack * needed_alone(problem).max(axis=0)).astype(np.int64)
    schedule = list_schedule(problem, np.random.default_rng(seed).random(problem.num_stages), rules, limits)
    check_times(problem, schedule)
    assert (peaks(problem, schedule.sequence) <= limits).all()


@pytest.mark.parametrize("seed", [798, 1590, 1788, 1819, 1871])
def test_what_was_awaited_and_refused_starts_no_earlier_than_it_is_ready(seed):
    problem = chains(seed, workers=2 + seed % 7, microbatches=8, depth=6)
    rank = np.random.default_rng(seed).random(problem.num_stages)
    limits = needed_alone(problem).max(axis=0)
    check_times(problem, list_schedule(problem, rank, Rules("alternate", patience=10.0), limits))


@given(PROBLEMS)
def test_what_does_not_fit_alone_is_refused_with_numbers(problem):
    needed = needed_alone(problem).max(axis=0)
    worker = int(needed.argmax())
    limits = np.full(problem.num_workers, 10**6)
    limits[worker] = needed[worker] - 1
    if peaks(problem, problem.sequence)[worker] > limits[worker]:
        with pytest.raises(LimitError, match=f"worker {worker} needs .* 1 more") as caught:
            list_schedule(problem, tails(problem).astype(float), limits=limits)
        assert (caught.value.worker, caught.value.missing_bytes) == (worker, 1)


@settings(max_examples=200)
@given(PROBLEMS, st.integers(0, 10**6), st.floats(1, 2))
def test_a_stage_is_admitted_exactly_where_the_rest_stays_runnable_in_the_reference(problem, seed, slack):
    limits = (slack * needed_alone(problem).max(axis=0)).astype(np.int64)
    safety = make_safety(problem, problem.sequence)
    assert first_unsafe(safety, limits) < 0
    draw, undo = np.random.default_rng(seed), np.zeros(99, np.int64)
    done: list[int] = []
    left = problem.sequence.tolist()
    waiting = np.diff(problem.predecessor_start)
    while left:
        ready = [s for s in left if waiting[s] == 0]
        stage = int(draw.choice(ready))
        rest = [s for s in left if s != stage]
        allowed = bool((peaks(problem, ints([*done, stage, *rest])) <= limits).all())
        # What is first in the reference may always run, so that there is always a stage that may.
        if stage == left[0]:
            assert allowed
        assert (admit(problem, safety, limits, stage, undo) < 0) == allowed
        if not allowed:
            stage = left[0]
            assert admit(problem, safety, limits, stage, undo) < 0
        done.append(stage)
        left.remove(stage)
        for i in range(problem.successor_start[stage], problem.successor_start[stage + 1]):
            waiting[problem.successor[i]] -= 1


def test_open_groups_are_bounded():
    problem = chains(5, workers=3, microbatches=8, depth=6)
    for most in (1, 2, 5):
        schedule = list_schedule(problem, problem.group.astype(float), Rules(most_open=most))
        begun, left = set(), np.bincount(problem.group).tolist()
        for stage in schedule.sequence.tolist():
            begun.add(int(problem.group[stage]))
            left[problem.group[stage]] -= 1
            assert sum(left[g] > 0 for g in begun) <= most


def test_a_cutoff_ends_what_cannot_be_better():
    problem = chains(3, workers=3, microbatches=6, depth=5)
    rank = -tails(problem).astype(float)
    found = list_schedule(problem, rank).makespan_ns
    assert list_schedule(problem, rank, tails=tails(problem), cutoff_ns=found) is None
    assert list_schedule(problem, rank, tails=tails(problem), cutoff_ns=found + 1).makespan_ns == found


def test_nothing_to_do_takes_no_time():
    problem = chains(0, workers=2, microbatches=0, depth=1)
    assert list_schedule(problem, np.zeros(0), limits=ints([0, 0])).makespan_ns == 0


def test_groups_are_what_pairs_join():
    assert groups_of(5, [(0, 2), (3, 4), (2, 4)]) == [0, 1, 0, 0, 0]
