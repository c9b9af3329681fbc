"""Which workers each slice runs on (spindle.md, section 5).

Slice by slice in the order of their starts, those with the largest data flows first. A slice goes to the island that
holds most of its data and, there, to the workers that hold it; then to those with most free memory, and to those that
already hold its parameters. If a worker would run out of memory, the next best workers are tried, then other workers for
earlier slices. Example, two islands of two workers: vision on {0, 1}, audio on {2, 3}, language, which takes more from
vision, on {0, 1}.

Afterwards slices are timed anew: data that stays on its worker takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.wavefront.metagraph import FREE, Links, MetaGraph, MetaOp, Schedule, Slice

MOST_SKIPPED = 8
"""Further placements of a slice that are kept in reserve."""
MOST_TRIES = 2_000
"""Placements of single slices tried before memory is said not to suffice."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers in islands of `island`, what joins them, and what each may hold (None: no limit)."""

    workers: int
    island: int
    inside: Links = FREE
    across: Links = FREE
    memory_bytes: int | None = None


Held = dict[tuple[str, int], tuple[int, frozenset[int]]]
"""(module, layer) -> (its bytes on each worker that holds it, these workers)."""


class MemoryShortage(ValueError):
    """No placement found fits. `missing_bytes` is what the slice that could not be placed lacked."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class Source(NamedTuple):
    """Where a slice's data comes from: the workers of another slice, in the order of their parts, and its bytes."""

    devices: tuple[int, ...]
    num_bytes: int
    end_ns: int


def place(
    graph: MetaGraph, schedule: Schedule, cluster: Cluster, *, held: Held | None = None, by_flow: bool = True
) -> Schedule:
    """The schedule with `devices` for every slice, timed anew.

    `held` is what the workers hold anyway, from other passes. Without `by_flow` each slice takes the next free workers,
    whatever they hold: the baseline of the paper. Raises MemoryShortage if no placement is found that keeps to the
    memory of the workers.
    """
    slices = _largest_flows_first(graph, schedule.slices)
    states = [_State(graph, cluster, held or {})]
    choices: list[list[tuple[int, ...]]] = []
    tries, shortage = 0, 0
    while len(states) <= len(slices):
        piece = slices[len(states) - 1]
        state = states[-1]
        if len(choices) < len(states):
            choices.append(state.choices(piece, by_flow))
        placed = None
        while choices[-1] and placed is None and tries < MOST_TRIES:
            tries += 1
            placed, missing = state.with_slice(piece, choices[-1].pop(0))
            if placed is None:
                shortage = max(shortage, missing)
        if placed is not None:
            states.append(placed)
            continue
        if len(states) == 1 or tries >= MOST_TRIES:
            memory = cluster.memory_bytes or 0
            raise MemoryShortage(
                f"{graph.ops[piece.op].name} on {piece.workers} of {cluster.workers} workers does not fit: a worker would "
                f"need {memory + shortage:,} bytes, {shortage:,} more than its {memory:,}; use more workers or memory, "
                f"or smaller batches",
                shortage,
            )
        states.pop()
        choices.pop()
    devices = {piece[:2]: found for piece, found in zip(slices, states[-1].devices, strict=True)}
    return retimed(graph, replace(schedule, devices=tuple(devices[piece[:2]] for piece in schedule.slices)), cluster)


def retimed(graph: MetaGraph, schedule: Schedule, cluster: Cluster) -> Schedule:
    """The schedule with every slice as early as its workers and its data allow, in the order of its slices."""
    free_ns = np.zeros(cluster.workers, np.int64)
    last: dict[int, tuple[Slice, tuple[int, ...]]] = {}
    slices, devices, waves = [], [], []
    for number, (piece, on) in enumerate(zip(schedule.slices, schedule.devices, strict=True)):
        begin = int(free_ns[list(on)].max())
        for source in _sources(graph, piece, last):
            begin = max(begin, source.end_ns + _lag_ns(source, on, cluster))
        end = begin + graph.ops[piece.op].span_ns(piece.start, piece.stop, piece.workers)
        free_ns[list(on)] = end
        timed = piece._replace(start_ns=begin, end_ns=end)
        last[piece.op] = (timed, on)
        slices.append(timed)
        devices.append(on)
        waves.append(schedule.waves[number] if schedule.waves else 0)
    order = sorted(range(len(slices)), key=lambda i: (slices[i].start_ns, i))
    return replace(
        schedule,
        slices=tuple(slices[i] for i in order),
        devices=tuple(devices[i] for i in order),
        waves=tuple(waves[i] for i in order) if schedule.waves else (),
    )


def add_held(graph: MetaGraph, schedule: Schedule, held: Held) -> Held:
    """What workers hold once they hold a placed schedule too."""
    sizes = {layer: size for layer, (size, _) in held.items()}
    found = {layer: set(devices) for layer, (_, devices) in held.items()}
    for piece, devices in zip(schedule.slices, schedule.devices, strict=True):
        op = graph.ops[piece.op]
        for layer in range(piece.start, piece.stop):
            key = _layer_key(op, layer)
            sizes[key] = op.static_bytes[layer] if op.static_bytes else 0
            found.setdefault(key, set()).update(devices)
    return {key: (sizes[key], frozenset(devices)) for key, devices in found.items()}


def _layer_key(op: MetaOp, layer: int) -> tuple[str, int]:
    return op.module or op.name, op.first_layer + layer


class _State:
    """What is where after some slices. Never changed: `with_slice` makes the next one."""

    def __init__(self, graph: MetaGraph, cluster: Cluster, held: Held) -> None:
        self.graph, self.cluster = graph, cluster
        keys = [*held, *(_layer_key(op, layer) for op in graph.ops for layer in range(op.num_layers))]
        self.rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.held = np.zeros((len(self.rows), cluster.workers), np.bool_)
        self.used = np.zeros(cluster.workers, np.int64)
        for key, (size, devices) in held.items():
            self.held[self.rows[key], list(devices)] = True
            self.used[list(devices)] += size
        self.busy_ns = np.zeros(cluster.workers, np.int64)
        self.devices: tuple[tuple[int, ...], ...] = ()
        self.last: dict[int, tuple[Slice, tuple[int, ...]]] = {}

    def choices(self, piece: Slice, by_flow: bool) -> list[tuple[int, ...]]:
        """Workers for a slice, in the order of their parts, best first."""
        free = np.flatnonzero(self.busy_ns <= piece.start_ns)
        assert len(free) >= piece.workers, f"{len(free)} workers are free for {piece}"
        if not by_flow:
            return [tuple(free[: piece.workers].tolist())]
        sources = _sources(self.graph, piece, self.last)
        data = np.zeros(self.cluster.workers)
        for source in sources:
            data[list(source.devices)] += source.num_bytes / len(source.devices)
        added = self._added_bytes(piece)
        found = []
        for rank in (
            np.lexsort((free, self.used[free], added[free], -data[free])),
            np.lexsort((free, added[free], self.used[free], -data[free])),
            np.lexsort((free, -data[free], self.used[free] + added[free])),
        ):
            chosen = self._by_island(free[rank], data, piece.workers)
            found.append(_in_order_of_parts(chosen, free[rank], sources, piece.workers))
        # Should none of these do: whoever has most memory left, but for one, two, three… of them.
        emptiest = free[np.lexsort((free, self.used[free] + added[free]))]
        for skipped in range(1, min(MOST_SKIPPED, len(free) - piece.workers) + 1):
            found.append(tuple(sorted(emptiest[skipped : skipped + piece.workers].tolist())))
        return list(dict.fromkeys(found))

    def with_slice(self, piece: Slice, devices: tuple[int, ...]) -> tuple[_State | None, int]:
        """The state after a slice on `devices`; or None, and by how many bytes a worker is short."""
        on = list(devices)
        op = self.graph.ops[piece.op]
        saved = -(-op.saved_bytes * (piece.stop - piece.start) // piece.workers)
        used = self.used.copy()
        used[on] += self._added_bytes(piece)[on] + saved
        memory = self.cluster.memory_bytes
        if memory is not None and used[on].max() > memory:
            return None, int(used[on].max()) - memory
        state = object.__new__(_State)
        state.graph, state.cluster, state.rows = self.graph, self.cluster, self.rows
        state.held, state.used, state.busy_ns = self.held.copy(), used, self.busy_ns.copy()
        state.held[np.ix_(self._rows(piece), on)] = True
        state.busy_ns[on] = piece.end_ns
        state.devices = (*self.devices, devices)
        state.last = self.last | {piece.op: (piece, devices)}
        return state, 0

    def _by_island(self, ranked: NDArray[np.int64], data: NDArray[np.float64], count: int) -> list[int]:
        """`count` of the ranked workers: of one island if one has enough, the one with most data, then the fullest."""
        islands: dict[int, list[int]] = {}
        for device in ranked.tolist():
            islands.setdefault(device // self.cluster.island, []).append(device)
        position = {island: i for i, island in enumerate(islands)}

        def preference(island: int) -> tuple[float, int, int]:
            return -float(data[islands[island]].sum()), len(islands[island]), position[island]

        enough = [island for island, devices in islands.items() if len(devices) >= count]
        if enough:
            return islands[min(enough, key=preference)][:count]
        chosen: list[int] = []
        for island in sorted(islands, key=lambda island: (-float(data[islands[island]].sum()), -len(islands[island]))):
            chosen += islands[island]
        return chosen[:count]

    def _rows(self, piece: Slice) -> list[int]:
        op = self.graph.ops[piece.op]
        return [self.rows[_layer_key(op, layer)] for layer in range(piece.start, piece.stop)]

    def _added_bytes(self, piece: Slice) -> NDArray[np.int64]:
        """Parameters, gradients and optimizer state that each worker does not hold yet."""
        op = self.graph.ops[piece.op]
        if not op.static_bytes:
            return np.zeros(self.cluster.workers, np.int64)
        sizes = np.array(op.static_bytes[piece.start : piece.stop], np.int64)
        return sizes @ ~self.held[self._rows(piece)]


def _largest_flows_first(graph: MetaGraph, slices: Sequence[Slice]) -> list[Slice]:
    def num_bytes(piece: Slice) -> int:
        if piece.start:
            return graph.ops[piece.op].carried_bytes
        return sum(flow.num_bytes for flow in graph.flows if flow.destination == piece.op)

    return sorted(slices, key=lambda piece: (piece.start_ns, -num_bytes(piece), -piece.workers, piece.op))


def _sources(graph: MetaGraph, piece: Slice, last: dict[int, tuple[Slice, tuple[int, ...]]]) -> list[Source]:
    if piece.start:
        before, devices = last[piece.op]
        return [Source(devices, graph.ops[piece.op].carried_bytes, before.end_ns)]
    return [
        Source(last[flow.source][1], flow.num_bytes, last[flow.source][0].end_ns)
        for flow in graph.flows
        if flow.destination == piece.op
    ]


def _in_order_of_parts(
    chosen: Sequence[int], ranked: NDArray[np.int64], sources: Sequence[Source], count: int
) -> tuple[int, ...]:
    """The chosen workers in an order, and perhaps others with as much data, so that most rows stay where they are."""
    if not sources:
        return tuple(sorted(chosen))
    main = max(sources, key=lambda source: source.num_bytes)
    island_of = set(chosen)
    able = island_of | (set(ranked.tolist()) & set(main.devices) if island_of <= set(main.devices) else set())
    parts: list[int | None] = [None] * count
    overlaps = sorted(
        (
            (-_overlap(part, count, position, len(main.devices)), part, device)
            for position, device in enumerate(main.devices)
            if device in able
            for part in range(count)
        ),
    )
    taken: set[int] = set()
    for negative, part, device in overlaps:
        if negative < 0 and parts[part] is None and device not in taken:
            parts[part] = device
            taken.add(device)
    rest = iter([device for device in chosen if device not in taken])
    return tuple(next(rest) if device is None else device for device in parts)


def _overlap(part: int, parts: int, other: int, others: int) -> float:
    """Share of all rows that part `part` of `parts` and part `other` of `others` have in common."""
    return max(0.0, min((part + 1) / parts, (other + 1) / others) - max(part / parts, other / others))


def _lag_ns(source: Source, devices: tuple[int, ...], cluster: Cluster) -> int:
    """Time from the end of a source to when its data is there, forward and back."""
    if source.devices == devices:
        return 0
    stays = sum(
        _overlap(part, len(devices), source.devices.index(device), len(source.devices))
        for part, device in enumerate(devices)
        if device in source.devices
    )
    if stays > 1 - 1e-9:
        return 0
    islands = {device // cluster.island for device in (*devices, *source.devices)}
    links = cluster.inside if len(islands) == 1 else cluster.across
    return links.lag_ns(round(source.num_bytes * (1 - stays)), len(source.devices), len(devices))
