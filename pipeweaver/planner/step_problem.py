"""The scheduling problem of a step: its stages, dependencies and memory as `problem.py` wants them.

Memory follows the compiler's buffers: a forward takes what its backward needs and gives nothing back; the backward, or
the input half of a split one, gives it back and takes what the weight half needs; what arrives from another worker is
held there from its producer's start on. What waits to be sent, or travels to the host and back, is a reserve.

Within a microbatch the reference runs what gives memory back as soon as it can, and else what is furthest along:

    microbatch 0   0F0 1F0 2F0   2I0 2W0 1I0 1W0 0I0 0W0
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeweaver.model.graph import topological
from pipeweaver.planner.problem import Effects, Ints, Problem, make_problem
from pipeweaver.schedule.stages import StepStages, UnitCosts, stage_graph

TRAVELLING = 2
"""How many of the largest copies to and from the host may be on their way beside the stages that they belong to."""
FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Which third of the numbers in `stages.py`: F, B or I, W."""


class StepProblem(NamedTuple):
    """`problem` and what its stages are: `number` [n] as `stages.py` counts them; `split` [U]; `reserve` [P] bytes."""

    problem: Problem
    number: Ints
    split: Ints
    reserve: Ints


def step_problem(step: StepStages, costs: UnitCosts, split: Ints) -> StepProblem:
    """The problem of a step whose units cost `costs`. `split` [U] says whose backward is split in two."""
    size, learns = len(step), step.learns
    split = split * learns
    graph = stage_graph(step, costs, split)
    exists = np.concatenate([np.ones(size, np.bool_), learns, split.astype(np.bool_)])
    number = np.nonzero(exists)[0]
    index = np.full(3 * size, -1, np.int64)
    index[number] = np.arange(len(number))
    source = np.repeat(np.arange(3 * size), np.diff(graph.start))
    third, unit = np.divmod(number, max(1, size))
    duration = graph.duration_ns.copy()
    duration[:size] += costs.load_ns
    takes, gives, passing, elsewhere, reserve = _memory(step, costs, split)
    problem = make_problem(
        num_workers=step.placement.workers,
        worker=graph.worker[number],
        duration_ns=duration[number],
        source=index[source],
        target=index[graph.successor],
        lag_ns=graph.lag_ns,
        group=step.microbatch[unit],
        num_groups=len(step.share.microbatches),
        gives=(third != FORWARD).astype(np.int64),
        late=(third == WEIGHTS).astype(np.int64),
        takes=takes[number],
        frees=gives[number],
        passing=passing[number],
        elsewhere=elsewhere._replace(stage=index[elsewhere.stage]),
        urgency=_urgency(step)[number],
    )
    return StepProblem(problem, number, split, reserve)


def _urgency(step: StepStages) -> Ints:
    """[3U] of stages that could be next in the reference, the one with the lowest is: weight halves, backwards, then
    forwards that are furthest along the flows, so that parts pass one by one where they can."""
    size = len(step)
    order = {name: i for i, name in enumerate(topological(step.graph))}
    module = np.array([order[chunk.module] for chunk in step.placement.chunks], np.int64)[step.units.chunk]
    rank = np.empty(size, np.int64)
    rank[np.lexsort((step.units.part, -step.units.chunk, -module))] = np.arange(size)
    return np.concatenate([2 + rank, np.ones(size, np.int64), np.zeros(size, np.int64)])


def _memory(step: StepStages, costs: UnitCosts, split: Ints) -> tuple[Ints, Ints, Ints, Effects, Ints]:
    """(takes, gives, passing) [3U], effects on other workers, and the reserve [P]."""
    size, edges, learns = len(step), step.edges, step.learns
    takes, gives, passing = (np.zeros(3 * size, np.int64) for _ in range(3))
    source, destination, num_bytes = edges.source, edges.destination, step.edge_bytes
    last = np.arange(size) + size * learns  # the stage after which nothing of a unit is needed
    crosses, grad = ~step.is_local, step.grad
    assembled = np.bincount(destination, weights=num_bytes * ~step.is_whole, minlength=size).astype(np.int64)
    arrives = np.where(step.is_whole, last[destination], destination)
    np.add.at(gives, arrives[crosses], num_bytes[crosses])
    # Outputs of a forward without a backward stay until the last reader is done.
    lasting = step.is_local & ~learns[source]
    np.add.at(takes, source[lasting], num_bytes[lasting])
    np.add.at(gives, last[destination][lasting], num_bytes[lasting])
    kept = (costs.loaded_bytes + costs.saved_bytes + step.output_bytes + assembled) * learns
    takes[:size] += kept
    gives[size : 2 * size] += kept
    takes[size : 2 * size] += costs.weight_bytes * split
    gives[2 * size :] += costs.weight_bytes * split
    sent = np.zeros(3 * size, np.int64)
    np.add.at(sent, source[crosses], num_bytes[crosses])
    sent[:size] *= ~learns
    returning = crosses & grad
    np.add.at(sent, size + destination[returning], num_bytes[returning])
    # What travels to the host leaves soon after the forward, and is back shortly before the backward.
    away = costs.offloaded_bytes * learns
    passing[:size] = costs.forward_workspace_bytes + (costs.loaded_bytes + assembled) * ~learns + away
    passing[size : 2 * size] = (costs.backward_workspace_bytes + costs.offloaded_bytes) * learns
    passing[2 * size :] = costs.weight_workspace_bytes * split
    passing += sent
    returned = step.is_local & grad
    np.add.at(takes, size + destination[returned], num_bytes[returned])
    np.add.at(gives, size + source[grad], num_bytes[grad])
    reserve = np.zeros(step.placement.workers, np.int64)
    np.maximum.at(reserve, np.tile(step.worker, 3), sent)
    travelling = np.zeros(step.placement.workers, np.int64)
    np.maximum.at(travelling, step.worker, away)
    reserve += TRAVELLING * travelling
    elsewhere = Effects(
        stage=np.concatenate([source[crosses], size + destination[returning]]),
        worker=np.concatenate([step.worker[destination[crosses]], step.worker[source[returning]]]),
        takes=np.concatenate([num_bytes[crosses], num_bytes[returning]]),
    )
    return takes, gives, passing, elsewhere, reserve
