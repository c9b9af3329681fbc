"""A plan as flat arrays: what is compiled, emulated and verified in compiled code.

The same content as `Plan`, column by column (`convert.py` goes from one to the other). A plan for 64 microbatches has
some 50000 actions; as records they take longer to make than to verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.schedule.ir import BufferKind, Phase, Plan, Strategy

Ints = NDArray[np.int64]

LOAD, COMPUTE, POST, WAIT, FREE, REDUCE, NORM, STEP, OFFLOAD, RELOAD, SETTLE = range(11)
"""Kinds of actions."""

PHASES: tuple[Phase, ...] = ("F", "B", "I", "W")
BUFFERS: tuple[BufferKind, ...] = (
    "loaded",
    "saved",
    "output",
    "gradient",
    "received",
    "weight",
    "leaving",
    "host",
    "returned",
)
LOADED, SAVED, OUTPUT, GRADIENT, RECEIVED, WEIGHT, LEAVING, HOST, RETURNED = range(9)
"""Kinds of buffers."""


class FlatEdges(NamedTuple):
    """[E] each. Ends are chunk and part; `output`, `input`, `dtype` index the plan's names. Edge e brings
    `runs[run_start[e] : run_start[e + 1]]`, [source row, destination row, length] each."""

    source_chunk: Ints
    source_part: Ints
    destination_chunk: Ints
    destination_part: Ints
    output: Ints
    input: Ints
    dtype: Ints
    width: Ints
    grad: Ints
    run_start: Ints
    runs: Ints


class FlatTransfers(NamedTuple):
    """[T] each. `phase` is 0 for "F", 1 for "B"; `dtype` indexes the plan's names."""

    edge: Ints
    phase: Ints
    sender: Ints
    receiver: Ints
    rows: Ints
    width: Ints
    dtype: Ints
    num_bytes: Ints
    duration_ns: Ints


class FlatStages(NamedTuple):
    """The stages of worker w in order, from `start[w]` on. `phase` indexes `PHASES`."""

    start: Ints
    chunk: Ints
    part: Ints
    phase: Ints


class FlatActions(NamedTuple):
    """The actions of worker w in order, from `start[w]` on; `kind` and what it is about:

    LOAD: (chunk, part), `detail` indexes the plan's lists of names. COMPUTE: (chunk, part), `phase`, `detail`
    indexes the plan's strategies. OFFLOAD, RELOAD, SETTLE: (chunk, part). POST, WAIT: (transfer, 0). REDUCE: (group, 0). Others: (0, 0).
    Action a allocates the buffers from `allocation_start[a]` on, and frees those from `free_start[a]` on.
    """

    start: Ints
    kind: Ints
    first: Ints
    second: Ints
    phase: Ints
    detail: Ints
    duration_ns: Ints
    workspace_bytes: Ints
    allocation_start: Ints
    allocation_kind: Ints
    allocation_first: Ints
    allocation_second: Ints
    allocation_bytes: Ints
    free_start: Ints
    free_kind: Ints
    free_first: Ints
    free_second: Ints


class FlatPrediction(NamedTuple):
    """`Prediction` with spans as [A] and [T] arrays."""

    start_ns: Ints
    end_ns: Ints
    moved_ns: Ints
    arrived_ns: Ints
    makespan_ns: int
    step_ns: int
    peak_bytes: tuple[int, ...]
    useful_ns: int
    lower_bound_ns: int


@dataclass(frozen=True, kw_only=True)
class FlatPlan:
    """`head` is the plan without edges, transfers, order, actions and prediction, which are arrays here.

    `names`, `loads` and `strategies` are what the arrays index.
    """

    head: Plan
    names: tuple[str, ...]
    loads: tuple[tuple[str, ...], ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    order: FlatStages
    edges: FlatEdges
    transfers: FlatTransfers
    actions: FlatActions
    prediction: FlatPrediction | None = None

    @property
    def num_workers(self) -> int:
        return len(self.actions.start) - 1


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def starts(counts: Sequence[int] | Ints) -> Ints:
    """[n + 1]: where each of n runs of these lengths begins, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])
