"""Which parts of the data to measure layers on, and what their cost can depend on.

The data says what sizes occur: candidates are runs of a microbatch's items, of 1, 2, 4... up to all of
them, in their own order, the shortest first and the longest first. Of these a few are taken, each as far
from the others as possible (in the logarithms of their sizes), the largest and the smallest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeweaver.data.items import Batch, Item, linked
from pipeweaver.model.graph import ModelGraph, Module, positions


class Sizes(NamedTuple):
    """What the cost of a part can depend on: sums over its items. `mixed` are the rows where items differ in length."""

    one: int = 1
    items: int = 0
    rows: int = 0
    squares: int = 0
    mixed: int = 0
    units: int = 0
    linked: int = 0
    cross: int = 0


@dataclass(frozen=True, kw_only=True)
class SamplePart:
    """Items of one module that occur together; `links[i]` are the items whose rows flow into items[i]."""

    items: tuple[Item, ...]
    links: tuple[tuple[Item, ...], ...]


def sizes_of(
    graph: ModelGraph, module: Module, reads: Sequence[str], items: Sequence[Item], links: Sequence[Sequence[Item]]
) -> Sizes:
    """Sizes of a part for a layer of `module` that reads the flows `reads`. Rows of a skip connection are its own."""
    rows = squares = units = linked_rows = cross = 0
    shapes = set()
    counted = module.loss.units if module.loss is not None else None
    senders = [_sender(graph, module.name, name) for name in reads]
    for i, item in enumerate(items):
        tokens = item.sizes["tokens"]
        rows += tokens
        squares += tokens * tokens
        if counted is not None:
            units += item.sizes.get(counted, 0)
        flowing = sum(
            source.sizes[rows_name] for sender, rows_name in senders for source in links[i] if source.module == sender
        )
        linked_rows += flowing
        cross += tokens * flowing
        shapes.add((tokens, flowing))
    mixed = rows if len(shapes) > 1 else 0
    return Sizes(1, len(items), rows, squares, mixed, units, linked_rows, cross)


def choose_parts(graph: ModelGraph, module: Module, batches: Sequence[Batch], count: int) -> list[SamplePart]:
    """At most `count` parts, largest first; none if no batch has an item of the module."""
    reads = tuple(dict.fromkeys(name for _, layer in positions(module) for name in layer.reads))
    found: dict[Sizes, SamplePart] = {}
    for part in _candidates(module, batches):
        found.setdefault(sizes_of(graph, module, reads, part.items, part.links), part)
    if not found:
        return []
    sizes = sorted(found, key=lambda s: (s.rows, s), reverse=True)
    places = np.log1p(np.array(sizes, dtype=np.float64))
    chosen = [0]
    distance = np.abs(places - places[0]).sum(axis=1)
    if len(sizes) > 1:
        chosen.append(len(sizes) - 1)
    while len(chosen) < min(count, len(sizes)):
        distance = np.minimum(distance, np.abs(places - places[chosen[-1]]).sum(axis=1))
        chosen.append(int(distance.argmax()))
    return [found[sizes[i]] for i in sorted(set(chosen))]


def largest(graph: ModelGraph, module: Module, batches: Sequence[Batch]) -> Sizes:
    """Sizes of the part with the most rows, for a layer that reads nothing; zeros if there is none."""
    parts = choose_parts(graph, module, batches, 1)
    return sizes_of(graph, module, (), parts[0].items, parts[0].links) if parts else Sizes()


def records_of(batches: Sequence[Batch]) -> dict[str, int]:
    """ "task/draw" -> position in the data set, for whoever loads the content."""
    return {f"{sample.task}/{sample.draw}": sample.record for batch in batches for sample in batch.samples}


def _candidates(module: Module, batches: Sequence[Batch]) -> Iterator[SamplePart]:
    joint = module.loss is not None and module.loss.joint
    for batch in batches:
        groups = [tuple(range(len(batch.samples)))] if joint else batch.microbatches
        for group in groups:
            items: list[tuple[Item, tuple[Item, ...]]] = []
            for sample in (batch.samples[i] for i in group):
                found = zip(sample.items, linked(sample.items, sample.links), strict=True)
                items += [(item, sources) for item, sources in found if item.module == module.name]
            by_length = sorted(items, key=lambda pair: pair[0].sizes["tokens"])
            for ordered in (items, by_length, by_length[::-1]):
                for length in [len(items)] if joint else _lengths(len(items)):
                    chosen = ordered[:length]
                    if chosen:
                        yield SamplePart(items=tuple(i for i, _ in chosen), links=tuple(s for _, s in chosen))


def _lengths(count: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16... and `count`."""
    lengths = {n * 2**k for k in range(20) for n in (1, 3)}
    return [*sorted(length for length in lengths if length < count), count]


def _sender(graph: ModelGraph, module: str, name: str) -> tuple[str | None, str]:
    """(module, size that counts rows) of what flow `name` brings to `module`; no module for a skip connection."""
    for flow in graph.flows:
        if flow.destination == module and flow.name == name:
            return (None if flow.source == module else flow.source), graph.sent(flow)[1].rows
    raise AssertionError(f"no flow brings {name} to {module}")
