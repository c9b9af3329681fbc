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
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.table import ItemTable, bounds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Needed = tuple[tuple[int, ...], tuple[int, ...]]

MOST_ASKED = 20_000
"""Sums of which it is kept what of them is needed."""


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
    if not parts:
        return []
    sizes = table.names or ("tokens",)
    names, order = _columns(sizes, table.modules, by_length)
    totals, alike = _measure(
        np.stack([np.maximum(table.sizes(name), 0) for name in sizes]),
        sizes.index("tokens"),
        table.module,
        len(table.modules),
        *table.linked,
        np.array(list(chain.from_iterable(parts)), np.int64),
        bounds(list(map(len, parts))),
        copies,
    )
    found = []
    for values, same in zip(totals[:, order].tolist(), alike.tolist(), strict=True):
        present = tuple([name for name, value in zip(names, values, strict=True) if value])
        found.append(Sums(_family(present, tuple(same)), tuple(filter(None, values))))
    return found


class Fit:
    """Linear forms through the samples so far, of parts of one family."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.values: list[Sequence[int]] = []
        self._coefficients: Floats = np.zeros((0, 0))
        self._pivots: Ints = np.zeros(0, np.int64)
        self._others: Ints = np.zeros(0, np.int64)
        self._forms: Ints = np.zeros((0, 0), np.int64)
        self._weight = 0
        self._denominator = 1
        self._needed: tuple[int, ...] = ()
        self._checks: list[tuple[int, list[tuple[int, int]]]] = []
        self._asked: dict[tuple[int, ...], Needed | None] = {}

    def add(self, sums: tuple[int, ...], values: Sequence[int]) -> None:
        """A sample outside the span of the others."""
        assert not self.spans([sums])[0], "a sample that the others determine adds nothing"
        self.rows.append(sums)
        self.values.append(values)
        self._asked.clear()
        self._solve()

    def spans(self, parts: Sequence[tuple[int, ...]]) -> list[bool]:
        """Whether the samples so far determine the values at each of these sums."""
        if not self.rows:
            return [False] * len(parts)
        if not len(self._others):
            return [True] * len(parts)
        largest = max(map(max, parts))
        if largest * max(self._weight, self._denominator) < 2**62:
            spanned = _spans(np.array(parts, np.int64), self._pivots, self._others, self._forms, self._denominator)
            return spanned.tolist()  # type: ignore[no-any-return]
        sums = np.array(parts, object)
        exact = sums[:, self._pivots] @ self._forms.astype(object).T == self._denominator * sums[:, self._others]
        return [bool(one) for one in exact.all(axis=1)]

    def needed(self, sums: tuple[int, ...]) -> Needed | None:
        """Columns of the sums that values depend on, and the sums there: parts that agree in both have the same values.
        None where the samples so far do not determine them."""
        if sums not in self._asked:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            self._asked[sums] = self._needed_of(sums)
        return self._asked[sums]

    def _needed_of(self, sums: tuple[int, ...]) -> Needed | None:
        if not self.rows:
            return None
        for column, form in self._checks:
            if sum([weight * sums[pivot] for pivot, weight in form]) != self._denominator * sums[column]:
                return None
        return self._needed, tuple([sums[column] for column in self._needed])

    def __call__(self, parts: Sequence[tuple[int, ...]]) -> Floats:
        """[parts, values]: the values at each of these sums, whole numbers."""
        found: Floats = _evaluate(self._coefficients, np.array(parts, np.int64), self._pivots)
        return found

    def _solve(self) -> None:
        """Values and all sums as linear forms in the sums of the pivot columns, over one denominator."""
        pivots = _independent_columns(self.rows)
        inverse = _inverse([[Fraction(row[column]) for column in pivots] for row in self.rows])
        self._denominator = lcm(*(f.denominator for line in inverse for f in line))
        whole = np.array([[int(f * self._denominator) for f in line] for line in inverse], dtype=object)
        scaled = whole @ np.array(self.values, dtype=object)
        self._coefficients = np.array([[int(v) / self._denominator for v in line] for line in scaled], np.float64)
        forms = whole @ np.array(self.rows, dtype=object)
        others = [column for column in range(len(self.rows[0])) if column not in pivots]
        self._forms = forms[:, others].T
        self._weight = max((sum(map(abs, form)) for form in self._forms), default=0)
        if self._weight < 2**62:
            self._forms = np.ascontiguousarray(self._forms.astype(np.int64))
        self._pivots, self._others = np.array(pivots, np.int64), np.array(others, np.int64)
        self._needed = tuple([pivot for pivot, line in zip(pivots, self._coefficients, strict=True) if line.any()])
        self._checks = [
            (column, [(pivot, int(weight)) for pivot, weight in zip(pivots, form, strict=True) if weight])
            for column, form in zip(others, self._forms, strict=True)
        ]


@numba.njit(cache=True)
def _spans(sums, pivots, others, forms, denominator):  # type: ignore[no-untyped-def]
    """[parts] whether all other sums are these forms in those of the pivots."""
    found = np.ones(len(sums), np.bool_)
    for p in range(len(sums)):
        for i in range(len(others)):
            formed = 0
            for j in range(len(pivots)):
                formed += forms[i, j] * sums[p, pivots[j]]
            if formed != denominator * sums[p, others[i]]:
                found[p] = False
                break
    return found


@numba.njit(cache=True)
def _evaluate(coefficients, sums, pivots):  # type: ignore[no-untyped-def]
    """sums @ coefficients in whole numbers: term by term, so that a part has the same values in any company."""
    found = np.zeros((len(sums), coefficients.shape[1]))
    for p in range(len(sums)):
        for j in range(len(coefficients)):
            for v in range(coefficients.shape[1]):
                found[p, v] += coefficients[j, v] * float(sums[p, pivots[j]])
    return np.rint(found)


_FIRST = ("parts", "items", "tokens", "squares")


@lru_cache(maxsize=256)
def _columns(sizes: tuple[str, ...], modules: tuple[str, ...], by_length: bool) -> tuple[tuple[str, ...], Ints]:
    """Names of all sums in order, and the columns of `_measure` that they are. Sums that counts mostly depend on come
    first, so that they carry the coefficients."""
    listed = ["parts", "items", "squares", "runs", "linked.runs", *sizes]
    for module in modules:
        listed += [*(f"{module}.{name}" for name in sizes), f"{module}.cross"]
    column = {name: number for number, name in enumerate(listed) if by_length or name not in ("runs", "linked.runs")}
    names = sorted(column, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    return tuple(names), np.array([column[name] for name in names], np.int64)


@lru_cache(maxsize=4096)
def _family(names: tuple[str, ...], alike: tuple[bool, bool]) -> Family:
    return Family(names, alike)


@numba.njit(cache=True)
def _measure(sizes, tokens, module, num_modules, link_start, linked, items, start, copies):  # type: ignore[no-untyped-def]
    """(sums [parts, columns], whether items are alike [parts, 2]). `sizes` [names, items], `tokens` the row of the
    tokens; part p has `items[start[p] : start[p + 1]]`."""
    num_names, num_parts = len(sizes), len(start) - 1
    totals = np.zeros((num_parts, 5 + num_names + num_modules * (num_names + 1)), np.int64)
    alike = np.zeros((num_parts, 2), np.bool_)
    for p in range(num_parts):
        row = totals[p]
        length, attended, links = np.int64(-1), np.int64(-1), 0
        first_length, first_attended, runs, linked_runs = length, attended, 0, 0
        for at in range(start[p], start[p + 1]):
            i = items[at]
            rows, sources = sizes[tokens, i], np.int64(0)
            row[1] += 1
            row[2] += rows * rows
            for n in range(num_names):
                row[5 + n] += sizes[n, i]
            for of in range(link_start[i], link_start[i + 1]):
                source = linked[of]
                base = 5 + num_names + module[source] * (num_names + 1)
                for n in range(num_names):
                    row[base + n] += sizes[n, source]
                row[base + num_names] += rows * sizes[tokens, source]
                sources += sizes[tokens, source]
                links += 1
            if at == start[p]:
                first_length, first_attended = rows, sources
            runs += rows != length
            linked_runs += rows != length or sources != attended
            length, attended = rows, sources
        row *= copies
        row[0] = 1
        alike[p] = runs <= 1, linked_runs <= 1
        # One copy after the other may go on with the run before.
        joined = copies - 1 if runs and length == first_length else 0
        row[3] = copies * runs - joined
        if links:
            row[4] = copies * linked_runs - (joined if attended == first_attended else 0)
    return totals, alike


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
