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

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph, topological
from pipeweaver.planner.parts import Parts
from pipeweaver.schedule.connect import has_backward, is_whole
from pipeweaver.schedule.ir import Draft, Placement, Stage
from pipeweaver.schedule.stages import StepStages

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
    num_microbatches = len(share.microbatches)
    stages = _numbered(graph, placement, parts, num_microbatches, forward_only)
    worker = [placement.chunks[stage.chunk].worker for stage in stages]
    order: list[list[Stage]] = [[] for _ in range(placement.workers)]
    for stage, here in zip(stages, worker, strict=True):
        order[here].append(stage)
    draft = Draft(placement=placement, parts=parts, order=tuple(map(tuple, order)), forward_only=forward_only)
    step = StepStages(graph, share, draft, costs, dtype)
    # `step` numbers the stages worker by worker; here they have their own numbers.
    number = {stage: i for i, stage in enumerate(stages)}
    here_of = [number[stage] for stage in step.stages]
    there_of = [step.number[stage] for stage in stages]
    successors = [[(here_of[target], lag) for target, lag in step.successors[i]] for i in there_of]
    predecessors = [0] * len(stages)
    for targets in successors:
        for target, _ in targets:
            predecessors[target] += 1
    microbatch = [parts[stage.chunk][stage.part].microbatch for stage in stages]
    backward = [int(stage.phase != "F") for stage in stages]
    counts = [[0] * (num_microbatches + 1) for _ in range(2)]
    for m, is_backward in zip(microbatch, backward, strict=True):
        counts[is_backward][m + 1] += 1
    forward_range = list(accumulate(counts[0]))
    holds, frees, passing, remote, reserve = _memory(step, stages, number)
    return stages, Instance(
        worker=_ints(worker),
        duration_ns=_ints([step.duration_ns[i] for i in there_of]),
        backward=_ints(backward),
        microbatch=_ints(microbatch),
        successor_start=_starts(successors),
        successor=_ints([target for targets in successors for target, _ in targets]),
        lag_ns=_ints([lag for targets in successors for _, lag in targets]),
        num_predecessors=_ints(predecessors),
        forward_range=_ints(forward_range),
        backward_range=_ints([forward_range[-1] + end for end in accumulate(counts[1])]),
        holds=_ints(holds),
        frees=_ints(frees),
        passing=_ints(passing),
        remote_start=_starts(remote),
        remote_worker=_ints([to for entries in remote for to, _ in entries]),
        remote_bytes=_ints([num_bytes for entries in remote for _, num_bytes in entries]),
        reserve=_ints(reserve),
    )


def _numbered(
    graph: ModelGraph,
    placement: Placement,
    parts: Parts,
    num_microbatches: int,
    forward_only: bool,
) -> tuple[Stage, ...]:
    rank = {name: i for i, name in enumerate(topological(graph))}
    learns = has_backward(graph, placement)
    of: list[list[tuple[int, int, int]]] = [[] for _ in range(num_microbatches)]
    for c, chunk in enumerate(placement.chunks):
        for p, part in enumerate(parts[c]):
            of[part.microbatch].append((rank[chunk.module], p, c))
    forwards = [[Stage(c, p, "F") for _, p, c in sorted(entries)] for entries in of]
    backwards = [
        [] if forward_only else [s._replace(phase="B") for s in reversed(found) if learns[s.chunk]]
        for found in forwards
    ]
    return tuple(stage for found in (*forwards, *backwards) for stage in found)


def _memory(
    step: StepStages, stages: Sequence[Stage], number: dict[Stage, int]
) -> tuple[list[int], list[int], list[int], list[list[tuple[int, int]]], list[int]]:
    """(holds, frees, passing, remote) per stage and the reserve per worker, as the compiler's buffers come and go."""
    chunks = step.draft.placement.chunks
    holds, frees, passing = ([0] * len(stages) for _ in range(3))
    remote: list[list[tuple[int, int]]] = [[] for _ in stages]
    reserve = [0] * step.draft.placement.workers
    for i, stage in enumerate(stages):
        sent = 0
        at = (stage.chunk, stage.part)
        cost, learns = step.cost[at], step.backward[stage.chunk]
        last = number[step.last_stage(at)]
        if stage.phase == "F":
            assembled = 0
            for e in step.incoming.get(at, ()):
                edge, num_bytes = step.edges[e], step.edge_bytes[e]
                whole = is_whole(step.edges, step.incoming[at], e)
                assembled += 0 if whole else num_bytes
                if not step.is_local[e]:
                    remote[number[Stage(*edge.source, "F")]].append((chunks[stage.chunk].worker, num_bytes))
                    frees[last if whole else i] += num_bytes
                elif not step.backward[edge.source[0]]:
                    holds[number[Stage(*edge.source, "F")]] += num_bytes
                    frees[last] += num_bytes
            passing[i] += cost.forward_workspace_bytes
            if learns:
                kept = cost.loaded_bytes + cost.saved_bytes + _output_bytes(step, at) + assembled
                holds[i] += kept
                frees[last] += kept
            else:
                passing[i] += cost.loaded_bytes + assembled
                sent += sum(step.edge_bytes[e] for e in step.outgoing.get(at, ()) if not step.is_local[e])
        else:
            passing[i] += cost.backward_workspace_bytes
            for e in step.incoming.get(at, ()):
                edge, num_bytes = step.edges[e], step.edge_bytes[e]
                if edge.grad:
                    source = number[step.gradient_stage(edge.source)]
                    if step.is_local[e]:
                        holds[i] += num_bytes
                    else:
                        sent += num_bytes
                        remote[i].append((chunks[edge.source[0]].worker, num_bytes))
                    frees[source] += num_bytes
        passing[i] += sent
        here = chunks[stage.chunk].worker
        reserve[here] = max(reserve[here], sent)
    return holds, frees, passing, remote, reserve


def _output_bytes(step: StepStages, at: tuple[int, int]) -> int:
    """Bytes of the tensors that leave a (chunk, part): of each, what the chunk that takes most of it takes."""
    taken: dict[str, dict[int, int]] = {}
    for e in step.outgoing.get(at, ()):
        edge = step.edges[e]
        by_chunk = taken.setdefault(edge.output, {})
        by_chunk[edge.destination[0]] = by_chunk.get(edge.destination[0], 0) + step.edge_bytes[e]
    return sum(max(by_chunk.values()) for by_chunk in taken.values())


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _starts(lists: Sequence[Sequence[object]]) -> Ints:
    return _ints([0, *accumulate(len(entries) for entries in lists)])
