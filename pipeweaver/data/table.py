"""The items of a step as columns, for those who sum over many of them at once.

table = ItemTable((image, text), links=((0, 1),))
table.sizes("features")        # [4, -1]: the text has none
table.linked                   # start [0, 0, 1], source [0]: the image's rows go into the text
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.items import Item, linked

Ints = NDArray[np.int64]


class ItemTable:
    """`items`, and `links` as pairs of positions among them; columns are made when they are first asked for."""

    def __init__(self, items: Sequence[Item], links: Sequence[tuple[int, int]]) -> None:
        self.items = items
        self.links = links
        self._columns: dict[str, Ints] = {}

    @classmethod
    def of_part(cls, items: Sequence[Item], sources: Sequence[Sequence[Item]]) -> ItemTable:
        """A part's items come first, then what is linked to each of them, once per link."""
        listed, links = list(items), []
        for to, of in enumerate(sources):
            links += [(place, to) for place in range(len(listed), len(listed) + len(of))]
            listed += of
        return cls(listed, links)

    def sizes(self, name: str) -> Ints:
        """[items], -1 for those that have no such size."""
        if name not in self._columns:
            self._columns[name] = np.array([item.sizes.get(name, -1) for item in self.items], np.int64)
        return self._columns[name]

    def sums(self, name: str, parts: Sequence[Sequence[int]]) -> Ints:
        """[parts] a size summed over the items of each part, all of which have it."""
        return sums(self.sizes(name)[list(chain.from_iterable(parts))], bounds(list(map(len, parts))))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all sizes that any item has."""
        return tuple(sorted({name for sizes in {tuple(item.sizes) for item in self.items} for name in sizes}))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Of all items, each once."""
        return tuple(sorted({item.module for item in self.items}))

    @cached_property
    def module(self) -> Ints:
        """[items] number of each item's module among `modules`."""
        numbers = {name: number for number, name in enumerate(self.modules)}
        return np.array([numbers[item.module] for item in self.items], np.int64)

    @cached_property
    def linked(self) -> tuple[Ints, Ints]:
        """(start [items + 1], source [links]): items whose rows flow into item i, in the order of the links."""
        source, to = np.array(self.links, np.int64).reshape(-1, 2).T
        start = np.zeros(len(self.items) + 1, np.int64)
        np.cumsum(np.bincount(to, minlength=len(self.items)), out=start[1:])
        return start, source[np.argsort(to, kind="stable")]

    @cached_property
    def sources(self) -> tuple[tuple[Item, ...], ...]:
        """The same as records."""
        return linked(tuple(self.items), tuple(self.links))


def bounds(counts: Sequence[int] | Ints) -> Ints:
    """[n + 1]: sums of all counts before each place, and of all."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def sums(values: Ints, start: Ints) -> Ints:
    """[n]: of the values from start[i] to start[i + 1]."""
    before = bounds(values)
    return before[start[1:]] - before[start[:-1]]
