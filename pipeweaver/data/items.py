"""Items and samples: what a batch is made of, known from metadata alone.

The loader hands these records out long before any pixel is decoded; planner, verifier and workers
agree on them. Example: a document with two images is one sample of three items:

    Sample(draw=7, record=3, task="main", items=(
        Item(task="main", draw=7, module="vision", position=0, sizes={"tokens": 36, "features": 9}),
        Item(task="main", draw=7, module="vision", position=1, sizes={"tokens": 100, "features": 25}),
        Item(task="main", draw=7, module="language", position=0, sizes={"tokens": 61, "supervised": 27}),
    ), links=((0, 2), (1, 2)))
"""

from __future__ import annotations

import msgspec


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of data for one module: an image, a clip, a text sequence.

    `draw` is the running number of its sample among all samples drawn in this run, so that
    (task, draw, module, position) identifies an item for good: randomness hangs on it.
    `sizes` counts what costs and shapes depend on. Every item has "tokens" (its rows inside the
    module; attention squares it). Others are named by the tensors that use them: "features" (rows
    handed to another module), "supervised" (units of the loss), "height", "width" (patches).
    """

    task: str
    draw: int
    module: str
    position: int
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        """Printable identity, unique in a run: `main/7/vision/1`."""
        return f"{self.task}/{self.draw}/{self.module}/{self.position}"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Items that belong together, as a data set yields them.

    `record` is the position in the data set that the content is loaded from. `links` are pairs
    (source, destination) of positions in `items`: the rows of the source item go into the
    destination item, in the order of the pairs, for every flow between the two modules.
    """

    task: str
    draw: int
    record: int
    items: tuple[Item, ...]
    links: tuple[tuple[int, int], ...] = ()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one optimizer step, over all replicas.

    `microbatches` are positions in `samples`, as drawn: each is the samples whose backbone items fill
    one token budget. Planning may regroup samples, never add or drop one.
    """

    step: int
    samples: tuple[Sample, ...]
    microbatches: tuple[tuple[int, ...], ...]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's share of a batch, flattened: what a plan is made for.

    `links` are pairs of positions in `items`. `microbatches` are positions in `items`, items of all
    modules of its samples together.
    """

    step: int
    replica: int
    num_replicas: int
    items: tuple[Item, ...]
    links: tuple[tuple[int, int], ...]
    microbatches: tuple[tuple[int, ...], ...]
    records: dict[str, int]
    """"task/draw" -> position in the data set, for whoever loads the content."""
    normalisers: dict[str, int]
    """"task/module" of each loss -> its units over the whole batch, all replicas together."""


def linked(items: tuple[Item, ...], links: tuple[tuple[int, int], ...]) -> tuple[tuple[Item, ...], ...]:
    """For each item, the items whose rows flow into it, in the order of the links."""
    sources: list[list[Item]] = [[] for _ in items]
    for source, destination in links:
        sources[destination].append(items[source])
    return tuple(tuple(found) for found in sources)
