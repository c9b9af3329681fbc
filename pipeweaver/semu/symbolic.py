"""Counts of a layer as exact polynomials in the sizes of a part: a new batch costs an evaluation, not a trace.

What a layer costs depends on sums over the items of a part: how many there are, their rows, their squared
rows (attention), rows times rows of what they attend to, every other size. `measure` takes these sums; `Fit`
finds, in exact arithmetic, the linear form in them that traces of a few parts determine:

    parts of 1 item of 4 rows and of 1 item of 6 rows; FLOPs 2 * rows * 8 + 4 * squares
    measure  (parts 1, items 1, tokens 4, squares 16), (1, 1, 6, 36)      FLOPs 128, 240
    known for every part whose sums are a combination of these two; any other is traced and joins them
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from math import lcm
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.table import ItemTable, bounds, sums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Family(NamedTuple):
    """Parts in which the sums of these names are not zero. `alike`: whether all items have equally many tokens, and
    also equally many to attend to; some layers take such items at once. They run the same operators."""

    names: tuple[str, ...]
    alike: tuple[bool, bool]


class Sums(NamedTuple):
    """All of a part that counts may depend on: `values` of the sums that its family names."""

    family: Family
    values: tuple[int, ...]


def measure(
    table: ItemTable, parts: Sequence[Sequence[int]], copies: int = 1, *, by_length: bool = False
) -> list[Sums]:
    """Sums over the items of each part, `copies` times each; zeros left out.

    "parts" is 1. "items", "tokens", "features"…: how many, every size summed. "squares": tokens squared. Per module
    that items are linked to, "vision.tokens"…: its sizes summed over links, and "vision.cross": tokens times
    linked tokens. With `by_length`, for machines where attention makes a call for every run of sequences of equal
    length: "runs" of neighbours with equal tokens, "linked.runs" of those with equally many linked tokens too.
    """
    item = np.array(list(chain.from_iterable(parts)), np.int64)
    start = bounds(list(map(len, parts)))
    tokens = table.sizes("tokens")[item]
    columns = {name: np.maximum(table.sizes(name), 0)[item] for name in table.names}
    columns |= {"items": np.ones_like(item), "squares": tokens * tokens}
    totals = {name: sums(column, start) for name, column in columns.items()}
    # What flows into item i of the parts: sources from first[i] on.
    link_start, linked = table.linked
    first = bounds(link_start[item + 1] - link_start[item])
    to = np.repeat(np.arange(len(item)), np.diff(first))
    source = linked[np.arange(len(to)) + (link_start[item] - first[:-1])[to]]
    linked_start = first[start]
    attended = np.maximum(table.sizes("tokens"), 0)[source]
    module = table.module[source]
    for number in np.unique(module).tolist():
        here = module == number
        for name in table.names:
            column = np.where(here, np.maximum(table.sizes(name)[source], 0), 0)
            totals[f"{table.modules[number]}.{name}"] = sums(column, linked_start)
        totals[f"{table.modules[number]}.cross"] = sums(np.where(here, tokens[to] * attended, 0), linked_start)
    totals = {name: total * copies for name, total in totals.items()}
    totals["parts"] = np.ones(len(parts), np.int64)
    lengths = np.stack([tokens, sums(attended, first)])
    runs, both = _runs(lengths[:1], start), _runs(lengths, start)
    alike = np.stack([runs <= 1, both <= 1], axis=1).tolist()
    if by_length:
        totals["runs"] = _copied_runs(lengths[:1], runs, start, copies)
        totals["linked.runs"] = _copied_runs(lengths, both, start, copies) * (np.diff(linked_start) > 0)
    names = sorted(totals, key=_order)
    values = np.stack([totals[name] for name in names], axis=1).tolist()
    families: dict[object, Family] = {}
    found = []
    for of, same in zip(values, alike, strict=True):
        key = (tuple(map(bool, of)), *same)
        if key not in families:
            families[key] = Family(tuple(n for n, value in zip(names, of, strict=True) if value), tuple(same))
        found.append(Sums(families[key], tuple(filter(None, of))))
    return found


class Fit:
    """Linear forms through the samples so far, of parts of one family."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.values: list[Sequence[int]] = []
        self._coefficients: Floats = np.zeros((0, 0))
        self._pivots: list[int] = []
        self._others: list[int] = []
        self._forms: list[list[int]] = []
        self._denominator = 1

    def add(self, sums: tuple[int, ...], values: Sequence[int]) -> None:
        """A sample outside the span of the others."""
        assert not self.spans([sums])[0], "a sample that the others determine adds nothing"
        self.rows.append(sums)
        self.values.append(values)
        self._solve()

    def spans(self, parts: Sequence[tuple[int, ...]]) -> list[bool]:
        """Whether the samples so far determine the values at each of these sums."""
        if not self.rows:
            return [False] * len(parts)
        if not self._others:
            return [True] * len(parts)
        largest = max(map(max, parts))
        weights = max((sum(map(abs, form)) for form in self._forms), default=0)
        fits = largest * max(weights, self._denominator) < 2**62
        sums = np.array(parts, np.int64 if fits else object)
        forms = np.array(self._forms, np.int64 if fits else object)
        spanned = sums[:, self._pivots] @ forms.T == self._denominator * sums[:, self._others]
        return [bool(one) for one in spanned.all(axis=1)]

    def __call__(self, parts: Sequence[tuple[int, ...]]) -> Floats:
        """[parts, values]: the values at each of these sums, whole numbers."""
        found: Floats = _evaluate(self._coefficients, np.array(parts, np.float64)[:, self._pivots])
        return found

    def _solve(self) -> None:
        """Values and all sums as linear forms in the sums of the pivot columns, over one denominator."""
        self._pivots = _independent_columns(self.rows)
        inverse = _inverse([[Fraction(row[column]) for column in self._pivots] for row in self.rows])
        self._denominator = lcm(*(f.denominator for line in inverse for f in line))
        whole = np.array([[int(f * self._denominator) for f in line] for line in inverse], dtype=object)
        scaled = whole @ np.array(self.values, dtype=object)
        self._coefficients = np.array([[int(v) / self._denominator for v in line] for line in scaled], np.float64)
        forms = whole @ np.array(self.rows, dtype=object)
        self._others = [column for column in range(len(self.rows[0])) if column not in self._pivots]
        self._forms = [[int(v) for v in forms[:, column]] for column in self._others]


@numba.njit(cache=True)
def _evaluate(coefficients, sums):  # type: ignore[no-untyped-def]
    """sums @ coefficients in whole numbers: term by term, so that a part has the same values in any company."""
    found = np.zeros((len(sums), coefficients.shape[1]))
    for p in range(len(sums)):
        for j in range(len(coefficients)):
            for v in range(coefficients.shape[1]):
                found[p, v] += coefficients[j, v] * sums[p, j]
    return np.rint(found)


_FIRST = ("parts", "items", "tokens", "squares")


def _order(name: str) -> tuple[int, str]:
    """Sums that counts mostly depend on come first, so that they carry the coefficients."""
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _runs(shapes: Ints, start: Ints) -> Ints:
    """Runs of equal neighbours in each part. `shapes` [kinds of length, items]."""
    changes = np.ones(shapes.shape[1], np.int64)
    changes[1:] = (shapes[:, 1:] != shapes[:, :-1]).any(axis=0)
    heads = start[:-1][start[:-1] < start[1:]]
    changes[heads] = 1
    return sums(changes, start)


def _copied_runs(shapes: Ints, runs: Ints, start: Ints, copies: int) -> Ints:
    """The same in so many copies, where one copy after the other may go on with the run before."""
    if not shapes.shape[1]:
        return runs
    first, last = np.minimum(start[:-1], shapes.shape[1] - 1), np.maximum(start[1:] - 1, 0)
    goes_on = (shapes[:, first] == shapes[:, last]).all(axis=0) & (runs > 0)
    return copies * runs - (copies - 1) * goes_on


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
