"""The exact optimum of small instances, to measure the search against: CP-SAT on the same stages and the same memory.

    held = random_instance(seed=3)               at most 60 stages, in the format of held.py
    optimum(held, seconds=60)                    Optimum(makespan=412, bound=412)

A worker is a no-overlap, bytes are a cumulative from the start of the stage that takes them to the end of the one that
frees them. Instances look like steps: microbatches of uneven cost through an encoder, in some, and a backbone in
chunks, backwards whole or split, memory limits on half of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from ortools.sat.python import cp_model

from benchmarks.held import Held, HeldStage, held_problem
from pipeweaver.planner.listing import needed_alone

MOST_STAGES = 60


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """`makespan` of the best schedule found, `bound` that no schedule goes below."""

    makespan: int
    bound: int

    @property
    def is_proven(self) -> bool:
        return self.makespan == self.bound


def optimum(
    held: Held, *, seconds: float, threads: int = 1, known: Sequence[int] | None = None, bound: int = 0
) -> Optimum:
    """Solve an instance within a time. `known`: starts of some schedule, as a hint; `bound`: what no schedule
    goes below, if that is known already."""
    model = cp_model.CpModel()
    horizon = sum(stage.duration + max((lag for _, lag in stage.lags), default=0) for stage in held.stages)
    starts = [model.new_int_var(0, horizon, f"start {i}") for i in range(len(held.stages))]
    makespan = model.new_int_var(bound, horizon, "makespan")
    runs: list[list[cp_model.IntervalVar]] = [[] for _ in range(held.workers)]
    holds: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(held.workers)]
    for i, (stage, start) in enumerate(zip(held.stages, starts, strict=True)):
        runs[stage.worker].append(model.new_fixed_size_interval_var(start, stage.duration, f"run {i}"))
        model.add(makespan >= start + stage.duration)
        for other, lag in stage.lags:
            model.add(start >= starts[other] + held.stages[other].duration + lag)
        for amount, last in stage.bytes if held.limits is not None else ():
            end = starts[last] + held.stages[last].duration
            size = model.new_int_var(0, horizon, f"held {i} {last}")
            holds[stage.worker].append((model.new_interval_var(start, size, end, f"bytes {i} {last}"), amount))
            if last != i:
                model.add(starts[last] >= start + stage.duration)
    for worker in range(held.workers):
        model.add_no_overlap(runs[worker])
        if holds[worker] and held.limits is not None:
            intervals, amounts = zip(*holds[worker], strict=True)
            model.add_cumulative(intervals, amounts, held.limits[worker])
    if known is not None:
        for start, value in zip(starts, known, strict=True):
            model.add_hint(start, value)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = threads
    # Without linear relaxations, which say little about no-overlaps, proofs take a fifth of the time.
    solver.parameters.linearization_level = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"{held.name}: no schedule found within {seconds} s")
    return Optimum(makespan=round(solver.objective_value), bound=round(solver.best_objective_bound))


def random_instance(seed: int, *, most_stages: int = MOST_STAGES, limited: bool | None = None) -> Held:
    """An instance that looks like a step; equal seeds, equal instance. `limited`: with memory limits, by default every
    second one."""
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    split = draw.random() < 0.5
    encoder, chunks = draw.random() < 0.5, workers * draw.choice((1, 1, 2))
    width = 3 if split else 2
    if 2 * width * chunks * (2 if encoder else 1) > most_stages:
        encoder, chunks = False, workers
    microbatches = min(6, most_stages // (width * chunks))
    backbone = [draw.randint(20, 40) for _ in range(chunks)]
    vision = [draw.randint(10, 60) for _ in range(chunks)]
    lag = draw.choice((0, 2, 5))
    stages: list[HeldStage] = []
    for _ in range(microbatches):
        scale, pictures = draw.uniform(0.8, 1.2), draw.choice((0.0, 0.5, 1.0, 2.0)) * encoder
        passes = [(vision, pictures)] if pictures else []
        passes.append((backbone, scale))
        sizes = [(j % workers, max(1, round(cost * times))) for costs, times in passes for j, cost in enumerate(costs)]
        if len(stages) + len(sizes) * width > most_stages:
            continue
        stages += _microbatch(sizes, first=len(stages), split=split, lag=lag, draw=draw)
    held = Held(workers=workers, stages=tuple(stages), name=f"random {seed}")
    if not (seed % 2 if limited is None else limited):
        return held
    problem, _ = held_problem(held)
    slack = draw.uniform(1.0, 2.5)
    needed = needed_alone(problem).max(axis=0, initial=0)
    return msgspec.structs.replace(held, limits=tuple(int(slack * one) for one in needed.tolist()))


def _microbatch(
    sizes: Sequence[tuple[int, int]], *, first: int, split: bool, lag: int, draw: random.Random
) -> list[HeldStage]:
    """(worker, duration of the forward) along the flow: forwards, then backwards, each followed by its weight half."""
    count = len(sizes)
    width = 2 if split else 1
    stages: list[HeldStage] = []

    def after(number: int, other: int, mine: int) -> tuple[tuple[int, int], ...]:
        return ((first + number, lag if sizes[other][0] != sizes[mine][0] else 0),)

    for j, (worker, duration) in enumerate(sizes):
        backward = count + width * (count - 1 - j)
        frees = ((duration, first + backward), (draw.randint(0, 5), first + j))
        before = after(j - 1, j - 1, j) if j else ()
        stages.append(HeldStage(worker=worker, duration=duration, after=before, bytes=frees))
    for k, (worker, duration) in enumerate(reversed(sizes)):
        j, number = count - 1 - k, count + width * k
        before = (*after(number - width, j + 1, j), (first + j, 0)) if k else ((first + j, 0),)
        if not split:
            stages.append(HeldStage(worker=worker, duration=2 * duration, after=before))
            continue
        half = max(1, round(duration * draw.uniform(0.8, 1.2)))
        weights = ((duration // 2, first + number + 1),)
        stages.append(HeldStage(worker=worker, duration=half, after=before, bytes=weights))
        stages.append(HeldStage(worker=worker, duration=max(1, 2 * duration - half), after=(first + number,)))
    return stages
