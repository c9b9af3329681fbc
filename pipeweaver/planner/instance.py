"""A scheduling problem as flat integer arrays: what the interleaver and every search over it work on.

Built from the same stages, edges and costs as the compiler's plan. Stages are numbered so that each microbatch
can be run alone in the order of the numbers: forwards along the flows, part by part, then backwards in reverse:

    microbatch 0   0F0 1F0 2F0 | microbatch 1   0F1 1F1 2F1 | microbatch 0   2B0 1B0 0B0 | microbatch 1 ...

Memory follows the compiler's rules. A stage *holds* bytes from its start on and at its end *frees* what it and
its forward held; *passing* bytes are needed only while it runs; a stage whose tensor goes to another worker makes
that worker hold it from then on. What is sent stays until the next stage of the sender has run: a *reserve* of
the largest such tensors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph, topological
from pipeweaver.planner.parts import Parts
from pipeweaver.schedule.flat import starts
from pipeweaver.schedule.ir import Placement, Stage
from pipeweaver.schedule.stages import StepStages, stage_graph, stage_of

Ints = NDArray[np.int64]


class Instance(NamedTuple):
    """n stages on P workers in J microbatches. All arrays int64; ns and bytes. Compiled code takes it as it is.

    `worker`, `duration_ns`, `backward` (0 or 1), `microbatch`: [n]. `successor_start` [n + 1] indexes
    `successor` and `lag_ns`; `num_predecessors` [n]. `forward_range`, `backward_range` [J + 1]: a microbatch's
    stages are two runs of numbers. `holds`, `frees`, `passing`: [n], on the stage's own worker. `remote_start`
    [n + 1] indexes `remote_worker` and `remote_bytes`, what other workers hold from its start. `reserve`: [P].
    """

    worker: Ints
    duration_ns: Ints
    backward: Ints
    microbatch: Ints
    successor_start: Ints
    successor: Ints
    lag_ns: Ints
    num_predecessors: Ints
    forward_range: Ints
    backward_range: Ints
    holds: Ints
    frees: Ints
    passing: Ints
    remote_start: Ints
    remote_worker: Ints
    remote_bytes: Ints
    reserve: Ints

    @property
    def num_stages(self) -> int:
        return len(self.worker)

    @property
    def num_workers(self) -> int:
        return len(self.reserve)

    @property
    def num_microbatches(self) -> int:
        return len(self.forward_range) - 1


def build_instance(
    graph: ModelGraph,
    placement: Placement,
    parts: Parts,
    share: Share,
    costs: Costs,
    *,
    forward_only: bool = False,
    dtype: str = "float32",
) -> tuple[tuple[Stage, ...], Instance]:
    """The problem of ordering the stages of these parts, and the stages by number.

    `dtype` is what tensors between chunks are in.
    """
    step = StepStages(graph, placement, share, parts, costs, dtype=dtype, forward_only=forward_only)
    size = len(step)
    unsplit = np.zeros(size, np.int64)
    whole = stage_graph(step, step.costs, unsplit)
    number = _numbered(step, len(share.microbatches))
    place = np.full(3 * size, -1, np.int64)
    place[number] = np.arange(len(number))
    source = np.repeat(np.arange(3 * size), np.diff(whole.start))
    first, target = place[source], place[whole.successor]
    order = np.argsort(first, kind="stable")
    holds, frees, passing, remote, reserve = _memory(step)
    remote_stage, remote_worker, remote_bytes = remote
    by_stage = np.argsort(place[remote_stage], kind="stable")
    is_backward = number >= size
    microbatch = step.microbatch[number % size] if size else number
    counts = [np.bincount(microbatch[is_backward == back], minlength=len(share.microbatches)) for back in (False, True)]
    forward_range = starts(counts[0])
    instance = Instance(
        worker=whole.worker[number],
        duration_ns=whole.duration_ns[number],
        backward=is_backward.astype(np.int64),
        microbatch=microbatch,
        successor_start=starts(np.bincount(first, minlength=len(number))),
        successor=target[order],
        lag_ns=whole.lag_ns[order],
        num_predecessors=np.bincount(target, minlength=len(number)),
        forward_range=forward_range,
        backward_range=forward_range[-1] + starts(counts[1]),
        holds=holds[number],
        frees=frees[number],
        passing=passing[number],
        remote_start=starts(np.bincount(place[remote_stage], minlength=len(number))),
        remote_worker=remote_worker[by_stage],
        remote_bytes=remote_bytes[by_stage],
        reserve=reserve,
    )
    return tuple(stage_of(step, stage, unsplit) for stage in number.tolist()), instance


def _numbered(step: StepStages, num_microbatches: int) -> Ints:
    """The stages as `stages.py` numbers them, in the order in which they are numbered here."""
    order = {name: i for i, name in enumerate(topological(step.graph))}
    rank = np.array([order[chunk.module] for chunk in step.placement.chunks], np.int64)[step.units.chunk]
    forward = np.lexsort((step.units.chunk, step.units.part, rank, step.microbatch))
    ends = starts(np.bincount(step.microbatch, minlength=num_microbatches))
    backward = np.concatenate([forward[:0], *(forward[a:b][::-1] for a, b in pairwise(ends.tolist()))])
    return np.concatenate([forward, len(step) + backward[step.learns[backward]]])


def _memory(step: StepStages) -> tuple[Ints, Ints, Ints, tuple[Ints, Ints, Ints], Ints]:
    """(holds, frees, passing) by stage, remote entries (stage, worker, bytes), and the reserve by worker, as the
    compiler's buffers come and go."""
    size, edges, costs = len(step), step.edges, step.costs
    holds, frees, passing = (np.zeros(3 * size, np.int64) for _ in range(3))
    source, destination, num_bytes = edges.source, edges.destination, step.edge_bytes
    last = np.arange(size) + size * step.learns  # the stage after which nothing of a unit is needed
    crosses, grad = ~step.is_local, step.grad
    assembled = np.bincount(destination, weights=num_bytes * ~step.is_whole, minlength=size).astype(np.int64)
    # What arrives from elsewhere is held from its producer's start on.
    np.add.at(frees, np.where(step.is_whole, last[destination], destination)[crosses], num_bytes[crosses])
    # Outputs of a forward without a backward stay until the last reader is done.
    lasting = step.is_local & ~step.learns[source]
    np.add.at(holds, source[lasting], num_bytes[lasting])
    np.add.at(frees, last[destination][lasting], num_bytes[lasting])
    kept = costs.loaded_bytes + costs.saved_bytes + step.output_bytes + assembled
    holds[:size] += kept * step.learns
    np.add.at(frees, last, kept * step.learns)
    sent = np.zeros(3 * size, np.int64)
    np.add.at(sent, source[crosses], num_bytes[crosses])
    sent[:size] *= ~step.learns
    np.add.at(sent, size + destination[crosses & grad], num_bytes[crosses & grad])
    passing[:size] = costs.forward_workspace_bytes + (costs.loaded_bytes + assembled) * ~step.learns
    passing[size : 2 * size] = costs.backward_workspace_bytes * step.learns
    passing += sent
    returned = step.is_local & grad
    np.add.at(holds, size + destination[returned], num_bytes[returned])
    np.add.at(frees, size + source[grad], num_bytes[grad])
    reserve = np.zeros(step.placement.workers, np.int64)
    np.maximum.at(reserve, np.tile(step.worker, 3), sent)
    remote = (
        np.concatenate([source[crosses], size + destination[crosses & grad]]),
        np.concatenate([step.worker[destination[crosses]], step.worker[source[crosses & grad]]]),
        np.concatenate([num_bytes[crosses], num_bytes[crosses & grad]]),
    )
    return holds, frees, passing, remote, reserve
