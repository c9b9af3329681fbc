"""Edges: which rows of which chunk's output each chunk needs, part by part, as flat arrays.

Chunks of one module hand on what the layer between them carries; flows bring what layers of one module
send to the layers that read it, along the links of the samples. Cuts into parts may differ from chunk to
chunk. Example: images a (9 rows) and b (25) in parts of one, both linked to the text t:

    vision part 0 {a} -> language part 0 {t}: rows 0..9 -> 0..9 of the input "vision"
    vision part 1 {b} -> language part 0 {t}: rows 0..25 -> 9..34

A *unit* is a (chunk, part); units are numbered chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.items import Item
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.gradients import Gradients, has_backward
from pipeweaver.schedule.ir import Edge, Part, Placement, Rows
from pipeweaver.schedule.wiring import Inlet, Wiring, wiring

__all__ = ["EdgeArrays", "Gradients", "Parts", "Units", "connect", "edge_arrays", "edge_records", "has_backward"]

Ints = NDArray[np.int64]
Parts = tuple[tuple[Part, ...], ...]
"""For each chunk its parts."""


class EdgeArrays(NamedTuple):
    """E edges, ordered by destination. `source` and `destination` are units, `inlet` the number of the inlet among
    all inlets, chunk by chunk. Edge e brings `runs[run_start[e] : run_start[e + 1]]`, rows of [source row,
    destination row, length], `num_rows` in all."""

    source: Ints
    destination: Ints
    inlet: Ints
    num_rows: Ints
    run_start: Ints
    runs: Ints


def connect(
    graph: ModelGraph,
    placement: Placement,
    items: Sequence[Item],
    links: Sequence[tuple[int, int]],
    parts: Parts,
    dtype: str = "float32",
) -> tuple[Edge, ...]:
    """All edges between the (chunk, part) pairs of a plan, ordered by destination.

    `dtype` is what "model" stands for in tensor specs. Raises ValueError if an item that is needed is in
    no part of a chunk that could supply it.
    """
    wired = wiring(graph, placement, dtype)
    return edge_records(wired, Units(parts), edge_arrays(placement, wired, ItemTable(items, links), parts))


def edge_arrays(
    placement: Placement,
    wired: Wiring,
    table: ItemTable,
    parts: Parts,
) -> EdgeArrays:
    """All edges; see `connect`."""
    index = _Index(placement, table, parts)
    found: list[_Found] = []
    known: dict[tuple[object, ...], _Found] = {}
    number = 0
    for chunk, inlets in enumerate(wired.inlets):
        for inlet in inlets:
            group = index.group[chunk]
            sources = inlet.sources
            if not inlet.linked and len(sources) == 1 and index.group[sources[0]] == group:
                one = _whole(index, group, inlet.rows)
            else:
                key = (sources, group, inlet.rows, inlet.origin if inlet.linked else None)
                if key not in known:
                    known[key] = _gathered(index, chunk, inlet)
                one = known[key]
            first = index.units.start
            found.append(
                one._replace(
                    source=one.source + first[sources[0]] if one.is_whole else one.source,
                    destination=one.destination + first[chunk],
                    inlet=np.full(len(one.source), number, np.int64),
                )
            )
            number += 1
    return _ordered(found)


def edge_records(wired: Wiring, units: Units, edges: EdgeArrays) -> tuple[Edge, ...]:
    """The same edges as records."""
    inlets = list(chain.from_iterable(wired.inlets))
    runs = [Rows(*run) for run in edges.runs.tolist()]
    columns = (edges.source, edges.destination, edges.inlet, edges.run_start[:-1], edges.run_start[1:])
    result = []
    for source, destination, number, first, stop in zip(*(column.tolist() for column in columns), strict=True):
        inlet = inlets[number]
        result.append(
            Edge(
                source=units.pairs[source],
                destination=units.pairs[destination],
                output=inlet.output,
                input=inlet.input,
                dtype=inlet.dtype,
                width=inlet.width,
                rows=tuple(runs[first:stop]),
                grad=inlet.grad,
            )
        )
    return tuple(result)


class Units:
    """The (chunk, part) pairs of a step. `start` [C + 1], `chunk` and `part` [U]."""

    def __init__(self, parts: Parts) -> None:
        counts = np.array([len(chunk_parts) for chunk_parts in parts], np.int64)
        self.start: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.chunk: Ints = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
        self.part: Ints = np.arange(len(self.chunk), dtype=np.int64) - self.start[self.chunk]
        self.pairs: list[tuple[int, int]] = list(zip(self.chunk.tolist(), self.part.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.pairs)


class _Found(NamedTuple):
    """Edges of one inlet; `destination` counts parts of the chunk, and so does `source` where `is_whole`."""

    source: Ints
    destination: Ints
    inlet: Ints
    num_rows: Ints
    num_runs: Ints
    runs: Ints
    is_whole: bool


@dataclass
class _Group:
    """Chunks with the same parts. `items` [I] of all parts, part by part, part p from `start[p]` on; `part` and
    `place` by item of the step, -1 where it is in no part."""

    items: Ints
    start: Ints
    part: Ints
    place: Ints


class _Index:
    """Where each item is: in which part of which chunk, and from which row on."""

    def __init__(self, placement: Placement, table: ItemTable, parts: Parts) -> None:
        self.placement = placement
        self.table = table
        self.units = Units(parts)
        self.group: list[int] = []
        self.groups: list[_Group] = []
        firsts: list[tuple[Part, ...]] = []
        for chunk_parts in parts:
            # Chunks of a module share one tuple; after a journey through a file they only equal it.
            same = next((g for g, one in enumerate(firsts) if one is chunk_parts or one == chunk_parts), None)
            if same is None:
                same = len(firsts)
                firsts.append(chunk_parts)
                self.groups.append(_group(chunk_parts, len(table.items)))
            self.group.append(same)
        self._sources: dict[str, tuple[Ints, Ints]] = {}

    def checked_sizes(self, rows: str, items: Ints) -> Ints:
        """[len(items)] rows of each of these items, all of which must have some."""
        sizes = self.table.sizes(rows)[items]
        if len(sizes) and sizes.min() < 0:
            lacking = self.table.items[int(items[np.argmin(sizes)])]
            raise ValueError(f"item {lacking.name} has no size {rows!r}, only {', '.join(sorted(lacking.sizes))}")
        return sizes

    def linked(self, origin: str) -> tuple[Ints, Ints]:
        """Items of module `origin` that are linked to each item: those of item i from `start[i]` on."""
        if origin not in self._sources:
            start, source = self.table.linked
            modules = self.table.modules
            here = self.table.module[source] == (modules.index(origin) if origin in modules else -1)
            self._sources[origin] = source[here], _before(here)[start]
        return self._sources[origin]


def _group(parts: tuple[Part, ...], num_items: int) -> _Group:
    counts = np.array([len(part.items) for part in parts], np.int64)
    flat = np.array(list(chain.from_iterable(part.items for part in parts)), np.int64)
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    part, place = np.full(num_items, -1, np.int64), np.full(num_items, -1, np.int64)
    part[flat] = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
    place[flat] = np.arange(len(flat))
    return _Group(items=flat, start=start, part=part, place=place)


def _whole(index: _Index, number: int, rows: str) -> _Found:
    """Every part as it is, but for parts without rows."""
    group = index.groups[number]
    sums = _before(index.checked_sizes(rows, group.items))[group.start]
    num_rows = np.diff(sums)
    present = np.nonzero(num_rows)[0]
    zeros = np.zeros(len(present), np.int64)
    return _Found(
        source=present,
        destination=present,
        inlet=zeros,
        num_rows=num_rows[present],
        num_runs=np.ones(len(present), np.int64),
        runs=np.stack([zeros, zeros, num_rows[present]], axis=1),
        is_whole=True,
    )


def _gathered(index: _Index, chunk: int, inlet: Inlet) -> _Found:
    """Rows item by item, those that stay side by side in one run."""
    group = index.groups[index.group[chunk]]
    items = group.items
    to = group.part[items]
    if inlet.linked:
        sources, start = index.linked(inlet.origin)
        counts = start[items + 1] - start[items]
        to = np.repeat(to, counts)
        first = np.repeat(start[items] - _before(counts)[:-1], counts)
        items = sources[np.arange(len(to)) + first]
    sizes = index.table.sizes(inlet.rows)
    length = index.checked_sizes(inlet.rows, items)
    at = _before(length)[:-1]
    starts = np.searchsorted(to, np.arange(len(group.start) - 1))
    at = at - np.append(at, 0)[starts][to] if len(at) else at
    unit = np.full(len(items), -1, np.int64)
    row = np.zeros(len(items), np.int64)
    for source in reversed(inlet.sources):  # where several could, the first supplies
        other = index.groups[index.group[source]]
        here = other.part[items]
        within = _before(np.where(sizes[other.items] < 0, 0, sizes[other.items]))[:-1]
        has = here >= 0
        unit[has] = here[has] + index.units.start[source]
        places = other.place[items[has]]
        row[has] = within[places] - np.append(within, 0)[other.start[here[has]]]
    if len(items) and unit.min() < 0:
        lost = int(items[np.argmin(unit)])
        raise ValueError(
            f"item {index.table.items[lost].name} is needed by {index.placement.chunks[chunk]} but no chunk runs it through "
            f"layer {inlet.layer} of {inlet.origin}"
        )
    # Edges: distinct (part, source), in the order in which they first occur.
    key = to * (int(index.units.start[-1]) + 1) + unit
    _, first_seen, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first_seen), np.int64)
    rank[np.argsort(first_seen)] = np.arange(len(first_seen))
    edge = rank[inverse]
    order = np.argsort(edge, kind="stable")
    order = order[length[order] > 0]
    edge, row, at, length = edge[order], row[order], at[order], length[order]
    begins = np.ones(len(edge), np.bool_)
    follows = (edge[1:] == edge[:-1]) & (row[1:] == row[:-1] + length[:-1]) & (at[1:] == at[:-1] + length[:-1])
    begins[1:] = ~follows
    heads = np.nonzero(begins)[0]
    lengths = np.add.reduceat(length, heads) if len(heads) else length[:0]
    runs = np.stack([row[heads], at[heads], lengths], axis=1)
    present, num_runs = np.unique(edge[heads], return_counts=True)
    firsts = np.sort(first_seen)[present] if len(present) else present
    num_rows = np.bincount(edge, weights=length)[present].astype(np.int64) if len(present) else present
    return _Found(
        source=unit[firsts],
        destination=to[firsts],
        inlet=np.zeros(len(present), np.int64),
        num_rows=num_rows,
        num_runs=num_runs.astype(np.int64),
        runs=runs,
        is_whole=False,
    )


def _ordered(found: Sequence[_Found]) -> EdgeArrays:
    """All edges by destination, then inlet, then first occurrence."""
    none = np.zeros(0, np.int64)
    source, destination, inlet, num_rows, num_runs = (
        (np.concatenate([none, *columns]) for columns in list(zip(*found, strict=True))[:5]) if found else (none,) * 5
    )
    runs = np.concatenate([np.zeros((0, 3), np.int64), *(one.runs for one in found)])
    order = np.lexsort((inlet, destination))
    start = _before(num_runs)
    picked = num_runs[order]
    new_start = _before(picked)
    which = np.repeat(start[order] - new_start[:-1], picked) + np.arange(len(runs))
    return EdgeArrays(
        source=source[order],
        destination=destination[order],
        inlet=inlet[order],
        num_rows=num_rows[order],
        run_start=new_start,
        runs=runs[which],
    )


def _before(values: Ints) -> Ints:
    """[n + 1]: sums of all values before each place, and of all."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
