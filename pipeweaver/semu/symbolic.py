"""Counts of a layer as exact polynomials in the sizes of a part: a new batch costs an evaluation, not a trace.

What a layer costs depends on sums over the items of a part: how many there are, their rows, their squared
rows (attention), rows times rows of what they attend to, every other size. `measure` takes these sums; `fit`
finds, in exact arithmetic, the linear form in them that traces of a few parts determine:

    parts of 1 item of 4 rows and of 1 item of 6 rows; FLOPs 2 * rows * 8 + 4 * squares
    measure  (parts 1, items 1, tokens 4, squares 16), (1, 1, 6, 36)      FLOPs 128, 240
    known for every part whose sums are a combination of these two; any other is traced and joins them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from math import lcm
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.items import Item

Floats = NDArray[np.float64]
Sums = dict[str, int]


def measure(
    items: Sequence[Item], links: Sequence[Sequence[Item]], copies: int = 1, *, by_length: bool = False
) -> Sums:
    """Sums over the items of a part, `copies` times each, that counts may depend on; zeros left out.

    "parts" is 1. "tokens", "features"…: every size, summed. "squares": tokens squared. Per module that
    items are linked to, "vision.tokens"…: its sizes summed over links, and "vision.cross": tokens times
    linked tokens. With `by_length`, for machines where attention makes a call for every run of sequences of equal
    length: "runs" of neighbours with equal tokens, "linked.runs" of those with equally many linked tokens too.
    """
    sums: Sums = {"items": len(items)}
    for item, sources in zip(items, links, strict=True):
        tokens = item.sizes["tokens"]
        _add(sums, "squares", tokens * tokens)
        for name, size in item.sizes.items():
            _add(sums, name, size)
        for source, count in _runs_of_equals(sources):
            for name, size in source.sizes.items():
                _add(sums, f"{source.module}.{name}", count * size)
            _add(sums, f"{source.module}.cross", count * tokens * source.sizes["tokens"])
    found = {"parts": 1} | {name: total * copies for name, total in sums.items() if total}
    if by_length and items:
        lengths = [item.sizes["tokens"] for item in items]
        found["runs"] = _runs(lengths, copies)
        if any(links):
            both = zip(lengths, (sum(s.sizes["tokens"] for s in sources) for sources in links), strict=True)
            found["linked.runs"] = _runs(list(both), copies)
    return found


class Fit:
    """Linear forms through the samples so far. `names` are the sums that they all have."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows: list[list[int]] = []
        self.values: list[Sequence[int]] = []
        self._coefficients: Floats | None = None
        self._pivots: list[str] = []
        self._others: list[tuple[str, list[int]]] = []
        self._denominator = 1

    def add(self, sums: Sums, values: Sequence[int]) -> None:
        """A sample outside the span of the others."""
        assert not self.spans(sums), "a sample that the others determine adds nothing"
        self.rows.append([sums[name] for name in self.names])
        self.values.append(values)
        self._solve()

    def spans(self, sums: Sums) -> bool:
        """Whether the samples so far determine the values at `sums`."""
        if not self.rows:
            return False
        pivots = [sums[name] for name in self._pivots]
        return all(sum(map(mul, pivots, weights)) == self._denominator * sums[name] for name, weights in self._others)

    def __call__(self, sums: Sums) -> Floats:
        """The values at `sums`, whole numbers."""
        assert self._coefficients is not None
        found: Floats = np.rint(self._coefficients @ np.array([sums[name] for name in self._pivots], np.float64))
        return found

    def _solve(self) -> None:
        """Values and all sums as linear forms in the sums of the pivot columns, over one denominator."""
        columns = _independent_columns(self.rows)
        inverse = _inverse([[Fraction(row[column]) for column in columns] for row in self.rows])
        self._denominator = lcm(*(f.denominator for line in inverse for f in line))
        whole = np.array([[int(f * self._denominator) for f in line] for line in inverse], dtype=object)
        scaled = whole @ np.array(self.values, dtype=object)
        self._coefficients = np.array([[int(v) / self._denominator for v in line] for line in scaled], np.float64).T
        self._pivots = [self.names[column] for column in columns]
        forms = whole @ np.array(self.rows, dtype=object)
        self._others = [
            (name, [int(v) for v in forms[:, column]])
            for column, name in enumerate(self.names)
            if column not in columns
        ]


def _add(sums: Sums, name: str, size: int) -> None:
    sums[name] = sums.get(name, 0) + size


def _runs_of_equals(items: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """(first, length) of runs of items with equal sizes: the images of a microbatch are many and mostly alike."""
    first, count = None, 0
    for item in items:
        if first is not None and item.sizes == first.sizes and item.module == first.module:
            count += 1
            continue
        if first is not None:
            yield first, count
        first, count = item, 1
    if first is not None:
        yield first, count


def _runs(shapes: Sequence[object], copies: int) -> int:
    """Runs of equal neighbours, where one copy after the other may go on with the run before."""
    return copies * len(list(groupby(shapes))) - (copies - 1) * (shapes[0] == shapes[-1])


def _independent_columns(rows: Sequence[Sequence[int]]) -> list[int]:
    """The first columns that make the rows a square matrix of full rank."""
    reduced = [[Fraction(value) for value in row] for row in rows]
    columns: list[int] = []
    for column in range(len(rows[0])):
        place = len(columns)
        pivot = next((i for i in range(place, len(reduced)) if reduced[i][column]), None)
        if pivot is None:
            continue
        reduced[place], reduced[pivot] = reduced[pivot], reduced[place]
        for i in range(place + 1, len(reduced)):
            factor = reduced[i][column] / reduced[place][column]
            if factor:
                reduced[i] = [a - factor * b for a, b in zip(reduced[i], reduced[place], strict=True)]
        columns.append(column)
        if len(columns) == len(reduced):
            return columns
    raise AssertionError("samples are not independent")


def _inverse(square: list[list[Fraction]]) -> list[list[Fraction]]:
    n = len(square)
    work = [[*row, *(Fraction(int(i == j)) for j in range(n))] for i, row in enumerate(square)]
    for i in range(n):
        pivot = next(j for j in range(i, n) if work[j][i])
        work[i], work[pivot] = work[pivot], work[i]
        scale = work[i][i]
        work[i] = [value / scale for value in work[i]]
        for j in range(n):
            if j != i and work[j][i]:
                factor = work[j][i]
                work[j] = [a - factor * b for a, b in zip(work[j], work[i], strict=True)]
    return [row[n:] for row in work]
