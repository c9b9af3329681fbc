"""Random scheduling problems, and what a schedule of one takes and holds, counted the plain way."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from pipeweaver.planner.problem import Effects, make_problem


def ints(values):
    return np.array(values, np.int64)


def chains(seed, *, workers, microbatches, depth, lag=True, split=0.5):
    """Microbatches as chains of forwards on random workers and their backwards in reverse, some without, some split.

    Every number is drawn: durations, lags, and memory with tensors that other workers receive.
    """
    draw = random.Random(seed)
    stages = []  # worker, duration, group, gives, late, takes, passing
    frees, edges, received = [], [], []

    def stage(worker, duration, group, *, gives=0, late=0, takes=0):
        stages.append((worker, duration, group, gives, late, takes, draw.randint(0, 4)))
        frees.append(0)
        return len(stages) - 1

    def follow(before, after, holder):
        crosses = stages[before][0] != stages[after][0]
        edges.append((before, after, draw.randint(0, 5) if lag and crosses else 0))
        if crosses:
            num_bytes = draw.randint(0, 3)
            received.append((before, stages[after][0], num_bytes))
            frees[holder] += num_bytes

    for group in range(microbatches):
        count, forwards, backwards = draw.randint(1, depth), [], []
        first = draw.randint(0, count) if draw.random() < 0.2 else 0  # those before it have no backward
        for _ in range(count):
            forwards.append(stage(draw.randrange(workers), draw.randint(1, 9), group, takes=draw.randint(0, 9)))
        for k in reversed(range(first, count)):
            forward = forwards[k]
            backwards.append(stage(stages[forward][0], stages[forward][1] + draw.randint(0, 9), group, gives=1))
            edges.append((forward, backwards[-1], 0))
            frees[backwards[-1]] += stages[forward][5]
            if draw.random() < split:
                weights = stage(stages[forward][0], draw.randint(1, 9), group, gives=1, late=1)
                edges.append((backwards[-1], weights, 0))
                waiting = draw.randint(0, 5)
                stages[backwards[-1]] = (*stages[backwards[-1]][:5], waiting, stages[backwards[-1]][6])
                frees[weights] += waiting
        for k in range(first):
            frees[forwards[k]] += stages[forwards[k]][5]
        last = dict(zip(forwards[first:][::-1], backwards, strict=True))
        for before, after in pairwise(forwards):
            follow(before, after, last.get(after, after))
        for before, after in pairwise(backwards):
            follow(before, after, after)
    worker, duration, group, gives, late, takes, passing = ints(stages).reshape(-1, 7).T.copy()
    source, target, lags = ints(edges).reshape(-1, 3).T.copy()
    return make_problem(
        num_workers=workers,
        worker=worker,
        duration_ns=duration,
        source=source,
        target=target,
        lag_ns=lags,
        group=group,
        num_groups=microbatches,
        gives=gives,
        late=late,
        takes=takes,
        frees=ints(frees),
        passing=passing,
        elsewhere=Effects(*ints(received).reshape(-1, 3).T.copy()),
        urgency=2 - gives - late,
    )


def check_times(problem, schedule):
    """Every stage once, after what it waits for, one at a time on each worker."""
    assert sorted(schedule.sequence.tolist()) == list(range(problem.num_stages))
    end = schedule.start_ns + problem.duration_ns
    assert schedule.makespan_ns == end.max(initial=0)
    source = np.repeat(np.arange(problem.num_stages), np.diff(problem.successor_start))
    assert (schedule.start_ns[problem.successor] >= end[source] + problem.lag_ns).all()
    place = np.argsort(schedule.sequence)
    assert (place[problem.successor] > place[source]).all()
    for order in schedule.orders(problem):
        for before, after in pairwise(order.tolist()):
            assert schedule.start_ns[after] >= end[before]


def peaks(problem, sequence):
    """Highest memory of each worker along a sequence of all stages."""
    used, highest = [0] * problem.num_workers, [0] * problem.num_workers
    for stage in sequence.tolist():
        effects = range(problem.effect_start[stage], problem.effect_start[stage + 1])
        for e in effects:
            worker = problem.effect_worker[e]
            used[worker] += problem.effect_takes[e]
            highest[worker] = max(highest[worker], used[worker] + problem.effect_passing[e])
        for e in effects:
            used[problem.effect_worker[e]] -= problem.effect_gives[e]
    assert used == [0] * problem.num_workers
    return ints(highest)
