"""The nouns of wavefront planning: MetaOps, their data flows, and slices of them in time (spindle.md).

A MetaOp is a run of equal layers of one task; on n workers each of its layers takes T(n). A slice is some of its
consecutive layers on a fixed number of workers. Example, two MetaOps on four workers:

    vision   8 layers, T(1) = 22, T(2) = 12      slices  vision[0:8] on 2 workers, 0..96
    text     6 layers, T(1) = 10                         text[0:6] on 1 worker, 0..60

Times are forward and backward together: the forward runs the slices in order, the backward in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class MetaOp:
    """Consecutive equal layers of one task, and what they cost.

    `counts` are the numbers of workers that it may run on, ascending; one layer takes `layer_ns[i]` on `counts[i]`,
    and every larger count is faster. `before_ns` and `after_ns` are what its first and its last layer take beyond
    that, by count (empty: nothing). Bytes: `static_bytes[l]` are held by every holder of layer l throughout (parameters,
    gradients, optimizer state; empty: nothing), `saved_bytes` by each layer from forward to backward, over all workers
    together, `carried_bytes` move from one layer to the next. Its layer l is layer `first_layer` + l of `module`: MetaOps
    with layers in common share their parameters.
    """

    name: str
    num_layers: int
    counts: tuple[int, ...]
    layer_ns: tuple[int, ...]
    before_ns: tuple[int, ...] = ()
    after_ns: tuple[int, ...] = ()
    task: str = ""
    module: str = ""
    first_layer: int = 0
    static_bytes: tuple[int, ...] = ()
    saved_bytes: int = 0
    carried_bytes: int = 0

    def span_ns(self, start: int, stop: int, count: int) -> int:
        """Time of layers [start, stop) on `count` workers."""
        index = self.counts.index(count)
        before = self.before_ns[index] if self.before_ns and start == 0 else 0
        after = self.after_ns[index] if self.after_ns and stop == self.num_layers else 0
        return (stop - start) * self.layer_ns[index] + before + after

    def whole_ns(self, count: int) -> int:
        """Time of all layers on `count` workers."""
        return self.span_ns(0, self.num_layers, count)

    def fastest(self, workers: int) -> int:
        """The largest count that `workers` workers allow. Raises ValueError if there is none."""
        fitting = [count for count in self.counts if count <= workers]
        if not fitting:
            raise ValueError(f"{self.name} needs at least {self.counts[0]} workers, there are {workers}")
        return fitting[-1]


class DataFlow(NamedTuple):
    """`num_bytes` that MetaOp `destination` takes from `source`, by position in the MetaGraph."""

    source: int
    destination: int
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MetaGraph:
    """MetaOps and the data flows between them, a DAG. Raises ValueError by name if it is none, or a MetaOp is unsound."""

    ops: tuple[MetaOp, ...]
    flows: tuple[DataFlow, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each MetaOp those that it takes data from."""
        return tuple(
            tuple(dict.fromkeys(flow.source for flow in self.flows if flow.destination == i))
            for i in range(len(self.ops))
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All MetaOps, sources first, ties as given."""
        level = self.level
        return tuple(sorted(range(len(self.ops)), key=lambda i: (level[i], i)))

    @cached_property
    def level(self) -> tuple[int, ...]:
        """For each MetaOp the longest path to it from a source, in flows: MetaOps of one level do not depend on each other."""
        level: dict[int, int] = {}
        for i in TopologicalSorter({i: self.sources[i] for i in range(len(self.ops))}).static_order():
            level[i] = max((level[source] + 1 for source in self.sources[i]), default=0)
        return tuple(level[i] for i in range(len(self.ops)))

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """For each MetaOp all that must be done before it."""
        found: dict[int, frozenset[int]] = {}
        for i in self.order:
            found[i] = frozenset(self.sources[i]).union(*(found[source] for source in self.sources[i]))
        return tuple(found[i] for i in range(len(self.ops)))


class Slice(NamedTuple):
    """Layers [start, stop) of MetaOp `op` on `workers` workers, from `start_ns` to `end_ns`."""

    op: int
    start: int
    stop: int
    workers: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Links:
    """How long data takes between workers: `latency_ns`, and `bytes_per_us` per worker. The default is no time at all."""

    latency_ns: int = 0
    bytes_per_us: int = 0

    def lag_ns(self, num_bytes: int, senders: int, receivers: int) -> int:
        """Moving `num_bytes` forward, and gradients as large back, between groups of workers that share the load."""
        moved = 2 * num_bytes * 1_000 // (self.bytes_per_us * min(senders, receivers)) if self.bytes_per_us else 0
        return 2 * self.latency_ns + moved


FREE = Links()
"""Data takes no time."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Slices of a MetaGraph in time, in the order in which they start. `lower_bound_ns` holds for any schedule."""

    workers: int
    slices: tuple[Slice, ...]
    policy: str
    lower_bound_ns: int = 0
    evaluations: int = 0
    waves: tuple[int, ...] = ()
    """The wave of each slice, where the policy works in waves."""
    devices: tuple[tuple[int, ...], ...] = ()
    """The workers of each slice, in the order of the parts that its batch is split into; once they are chosen."""

    @property
    def makespan_ns(self) -> int:
        return max((piece.end_ns for piece in self.slices), default=0)


def check_schedule(graph: MetaGraph, schedule: Schedule) -> None:
    """Assert that every layer runs once and in order, flows are respected and workers never over-used."""
    done = [0] * len(graph.ops)
    end_ns = [0] * len(graph.ops)
    starts = [min((s.start_ns for s in schedule.slices if s.op == i), default=0) for i in range(len(graph.ops))]
    for piece in sorted(schedule.slices, key=lambda piece: (piece.start_ns, piece.end_ns)):
        op = graph.ops[piece.op]
        assert piece.start == done[piece.op], f"{op.name}: layer {piece.start} after {done[piece.op]} layers"
        assert piece.start_ns >= end_ns[piece.op], f"{op.name}: overlapping slices"
        assert piece.end_ns - piece.start_ns == op.span_ns(piece.start, piece.stop, piece.workers), piece
        done[piece.op], end_ns[piece.op] = piece.stop, piece.end_ns
    for op, layers in zip(graph.ops, done, strict=True):
        assert layers == op.num_layers, f"{op.name}: {layers} of {op.num_layers} layers"
    for flow in graph.flows:
        assert starts[flow.destination] >= end_ns[flow.source], flow
    events = sorted(
        event
        for piece in schedule.slices
        for event in ((piece.start_ns, piece.workers), (piece.end_ns, -piece.workers))
    )
    used = 0
    for _, change in sorted(events):
        used += change
        assert used <= schedule.workers, f"{used} of {schedule.workers} workers used"


def _check(graph: MetaGraph) -> None:
    names = [op.name for op in graph.ops]
    for op in graph.ops:
        if names.count(op.name) > 1:
            raise ValueError(f"there are {names.count(op.name)} MetaOps named {op.name}; names must be unique")
        _check_op(op)
    for flow in graph.flows:
        for end in flow[:2]:
            assert 0 <= end < len(names), flow
    try:
        order = TopologicalSorter({i: graph.sources[i] for i in range(len(names))})
        order.prepare()
    except CycleError as error:
        raise ValueError(f"the data flows form a cycle: {' -> '.join(names[i] for i in error.args[1])}") from None


def _check_op(op: MetaOp) -> None:
    if op.num_layers < 1:
        raise ValueError(f"{op.name} has {op.num_layers} layers; a MetaOp needs at least one")
    if not op.counts:
        raise ValueError(f"{op.name} can run on no number of workers")
    assert _ascending(op.counts) and op.counts[0] >= 1, (op.name, op.counts)
    assert _ascending(op.layer_ns[::-1]) and op.layer_ns[-1] > 0, (op.name, op.layer_ns)
    assert len(op.layer_ns) == len(op.counts), op.name
    assert len(op.before_ns) in (0, len(op.counts)) and len(op.after_ns) in (0, len(op.counts)), op.name
    assert len(op.static_bytes) in (0, op.num_layers), op.name


def _ascending(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))
