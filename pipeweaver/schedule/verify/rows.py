"""Which rows of which items edges bring: compared, row by row, with those that must come.

All packed tensors that the plan's parts make are laid side by side in one space of rows, so that any row of any of them is
a number, and knows its item. What an edge's runs bring must tile the tensor that is expected, and where a run and an
expected item overlap, the sender's rows must be the same rows of the same item:

    expected   a a a b b        runs (0, 0, 3) from a part with a, (0, 3, 2) from one with b
    brought    a a a b b
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pipeweaver.schedule.flat import FlatPlan, Ints, starts
from pipeweaver.schedule.ir import Part, Plan
from pipeweaver.schedule.verify.words import PlanError

Taken = tuple[int, str, str, str]
"""An input: chunk, name, module that its rows are from, and the item size that counts them."""


def check_rows(plan: FlatPlan, inputs: Sequence[Taken], of: Ints) -> None:
    """Every input of every part gets exactly its rows, in order. `of` [E]: the input (number) that each edge goes to.

    Raises PlanError for the first row that is missing, comes twice or is another one.
    """
    head, edges = plan.head, plan.edges
    for origin, size in sorted({(origin, size) for _, _, origin, size in inputs}):
        for lacking in head.items:
            if lacking.module == origin and size not in lacking.sizes:
                raise PlanError("edges", f"item {lacking.name} has no size {size!r}, which counts its rows")
    space = _Space(head)
    taking = [space.block(chunk, size, origin) for chunk, _, origin, size in inputs]
    giving = {size: [space.block(chunk, size) for chunk in range(len(head.parts))] for _, _, _, size in inputs}
    rows = space.rows()
    sizes = list(giving)
    # Tensors are numbered: those that are expected come input by input, part by part.
    expected = np.concatenate([np.arange(first, stop) for first, stop in taking])
    slots = starts([stop - first for first, stop in taking])
    sending = np.array([[first for first, _ in giving[size]] for size in sizes], np.int64)
    size_of = np.array([sizes.index(size) for _, _, _, size in inputs], np.int64)
    sender = sending[size_of[of], edges.source_chunk] + edges.source_part

    edge = np.repeat(np.arange(len(of)), np.diff(edges.run_start))
    slot = (slots[of] + edges.destination_part)[edge]
    source, at, length = edges.runs.T

    def fail(number: int, text: str) -> PlanError:
        """About a slot."""
        which = int(np.searchsorted(slots, number, side="right")) - 1
        chunk, name, _, _ = inputs[which]
        return PlanError("edges", f"{name} into chunk {chunk} part {number - slots[which]}: {text}")

    sent, total = rows.total[sender[edge]], rows.total[expected[slot]]
    # Differences, since sums of what a file says may overflow.
    outside = (length < 1) | (source < 0) | (at < 0) | (source > sent - length) | (at > total - length)
    for r in np.nonzero(outside)[0][:1].tolist():
        raise fail(slot[r], f"rows {source[r]}+{length[r]} of {sent[r]} go to {at[r]}+{length[r]} of {total[r]}")

    # 1. Runs tile the tensor of each slot.
    order = np.lexsort((at, slot))
    at_, end, of_slot = at[order], (at + length)[order], slot[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = of_slot[1:] != of_slot[:-1]
    reached = np.where(begins, 0, np.roll(end, 1))
    for r in np.nonzero(at_ != reached)[0][:1].tolist():
        twice = at_[r] < reached[r]
        raise fail(of_slot[r], f"row {at_[r]} arrives twice" if twice else f"row {reached[r]} is missing")
    brought = np.zeros(len(expected), np.int64)
    np.maximum.at(brought, of_slot, end)
    for number in np.nonzero(brought < rows.total[expected])[0][:1].tolist():
        raise fail(number, f"row {brought[number]} of {rows.total[expected[number]]} is missing")

    # 2. Where a run and an item overlap, it is the same rows of the same item. Runs of the same rows are so anyway.
    to, come = rows.first[expected[slot]] + at, rows.first[sender[edge]] + source
    other = np.nonzero(to != come)[0]
    first = rows.item_at(to[other])
    count = rows.item_at(to[other] + length[other] - 1) - first + 1
    run = np.repeat(other, count)
    item = np.arange(len(run)) - np.repeat(starts(count)[:-1] - first, count)
    begin = np.maximum(to[run], rows.start[item])
    present = np.minimum(to[run] + length[run], rows.start[item + 1]) > begin  # items without rows are in between
    run, item, begin = run[present], item[present], begin[present]
    where = begin - to[run] + come[run]
    found = rows.item_at(where)
    wrong = (rows.item[found] != rows.item[item]) | (where - rows.start[found] != begin - rows.start[item])
    for k in np.nonzero(wrong)[0][:1].tolist():
        items, number = head.items, slot[run[k]]
        row, got, want = begin[k] - rows.first[expected[number]], found[k], item[k]
        raise fail(
            number,
            f"row {row} is row {where[k] - rows.start[got]} of {items[rows.item[got]].name}; it should be row "
            f"{begin[k] - rows.start[want]} of {items[rows.item[want]].name}",
        )


class _Rows:
    """Tensors side by side: `first` and `total` [tensors], their rows; `item` and `start` of the items in them, one after
    the other, `start` with the end of the last."""

    def __init__(self, item: Ints, size: Ints, counts: Ints) -> None:
        self.item, self.start = item, starts(size)
        bounds = self.start[starts(counts)]
        self.first, self.total = bounds[:-1], np.diff(bounds)

    def item_at(self, row: Ints) -> Ints:
        """Places among the items: of those that begin at or before a row, the last."""
        return np.searchsorted(self.start, row, side="right") - 1


class _Space:
    """Makes room for the tensors of parts, once for equal parts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._parts: list[tuple[tuple[Part, ...], Ints, Ints]] = []
        """Distinct parts of chunks, with their items, and how many each has."""
        self._number: list[int] = []
        for parts in plan.parts:
            # Chunks of a module share one tuple; after a journey through a file they only equal it.
            known = (n for n, (other, _, _) in enumerate(self._parts) if other is parts or other == parts)
            number = next(known, len(self._parts))
            if number == len(self._parts):
                items = np.array(list(chain.from_iterable(part.items for part in parts)), np.int64)
                self._parts.append((parts, items, np.array([len(part.items) for part in parts], np.int64)))
            self._number.append(number)
        self._blocks: dict[tuple[int, str, str | None], tuple[int, int]] = {}
        self._found: list[tuple[Ints, Ints, Ints]] = []
        self._used = 0
        self._sizes: dict[str, Ints] = {}
        self._links: dict[str, tuple[Ints, Ints]] = {}

    def block(self, chunk: int, size: str, origin: str | None = None) -> tuple[int, int]:
        """(first, stop) of the tensors of a chunk's parts, one each: rows of their own items, or of those of another
        module `origin` that are linked to them, in the order of the links."""
        own = origin is None or origin == self.plan.placement.chunks[chunk].module
        key = (self._number[chunk], size, None if own else origin)
        if key not in self._blocks:
            _, items, counts = self._parts[key[0]]
            if key[2] is not None:
                source, start = self._linked(key[2])
                each = start[items + 1] - start[items]
                before = starts(each)
                linked = np.arange(before[-1]) + np.repeat(start[items] - before[:-1], each)
                items, counts = source[linked], np.diff(before[starts(counts)])
            self._found.append((items, self._size(size, items), counts))
            self._blocks[key] = (self._used, self._used + len(counts))
            self._used += len(counts)
        return self._blocks[key]

    def rows(self) -> _Rows:
        """All blocks so far."""
        return _Rows(*(np.concatenate(columns) for columns in zip(*self._found, strict=True)))

    def _size(self, name: str, items: Ints) -> Ints:
        if name not in self._sizes:
            self._sizes[name] = np.array([item.sizes.get(name, -1) for item in self.plan.items], np.int64)
        sizes = self._sizes[name][items]
        return np.where(sizes < 0, 0, sizes)  # chunks of other modules are looked at as well, by their number

    def _linked(self, origin: str) -> tuple[Ints, Ints]:
        """Items of a module that are linked to each item: those of item i from `start[i]` on."""
        if origin not in self._links:
            items = self.plan.items
            source, to = np.array(self.plan.links, np.int64).reshape(-1, 2).T
            here = np.array([item.module == origin for item in items], np.bool_)[source]
            source, to = source[here], to[here]
            self._links[origin] = (
                source[np.argsort(to, kind="stable")],
                starts(np.bincount(to, minlength=len(items))),
            )
        return self._links[origin]
