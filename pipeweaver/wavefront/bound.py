"""A lower bound on the makespan of any schedule, from device-time and longest paths.

A linear program over mixtures of counts: x[m, n] layers of MetaOp m run on n workers, which takes t[m], the sum of
x T(n). Along every path t adds up to at most C, and the device-time, the sum of n x T(n), is at most N C. The least C
is a bound, whatever the speedups look like. Example, N = 2, two MetaOps of one layer, T(1) = 10, T(2) = 9: 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import highspy
import numpy as np

from pipeweaver.highs import Silent
from pipeweaver.wavefront.metagraph import MetaGraph

NS_PER_UNIT = 1e6
"""Times enter the program in milliseconds, so that its numbers are of like size."""
SAFETY = 1e-7
"""Share of the optimum that the solver's tolerance may cost."""


class Mixture(NamedTuple):
    """`amount` equal pieces of work, each of which may be done in any of the ways `(path_ns, device_ns)`: how long it
    holds up what follows, and how much time of workers it takes."""

    amount: int
    ways: tuple[tuple[int, int], ...]


def area_bound_ns(graph: MetaGraph, workers: int) -> int:
    """The bound in ns, rounded down, for MetaOps on their valid counts.

    Raises ValueError if a MetaOp needs more than `workers` workers.
    """
    works = []
    for op in graph.ops:
        op.fastest(workers)
        works.append(
            [
                Mixture(amount, tuple((ns, n * ns) for n, ns in zip(op.counts, unit_ns, strict=True) if n <= workers))
                for amount, unit_ns in ((op.num_layers, op.layer_ns), (1, op.before_ns), (1, op.after_ns))
                if unit_ns
            ]
        )
    return least_makespan_ns(works, [flow[:2] for flow in graph.flows], workers)


def least_makespan_ns(works: Sequence[Sequence[Mixture]], flows: Sequence[tuple[int, int]], workers: int) -> int:
    """The optimum of the program, ns, rounded down. `works[i]` must be done before `works[j]` for each flow (i, j)."""
    if not works:
        return 0
    program = _Program()
    makespan = program.column(1.0)
    starts = [program.column() for _ in works]
    area: list[tuple[int, float]] = [(makespan, -float(workers))]
    paths: list[list[tuple[int, float]]] = []
    for mixtures in works:
        path: list[tuple[int, float]] = []
        for mixture in mixtures:
            columns = [program.column() for _ in mixture.ways]
            program.row([(column, 1.0) for column in columns], mixture.amount, mixture.amount)
            for column, (path_ns, device_ns) in zip(columns, mixture.ways, strict=True):
                path.append((column, path_ns / NS_PER_UNIT))
                area.append((column, device_ns / NS_PER_UNIT))
        paths.append(path)
    for start, path in zip(starts, paths, strict=True):
        program.row([(makespan, 1.0), (start, -1.0), *((column, -ms) for column, ms in path)], 0.0)
    for source, destination in flows:
        ends = [(starts[source], -1.0), *((column, -ms) for column, ms in paths[source])]
        program.row([(starts[destination], 1.0), *ends], 0.0)
    program.row(area, -highspy.kHighsInf, 0.0)
    return int(program.minimise() * NS_PER_UNIT * (1 - SAFETY))


class _Program:
    """A linear program, made row by row; its columns are at least zero."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def column(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, entries: list[tuple[int, float]], lower: float, upper: float = highspy.kHighsInf) -> None:
        self.rows.append((entries, lower, upper))

    def minimise(self) -> float:
        solver = Silent()
        count = len(self.costs)
        no_rows, no_values = np.zeros(0, np.int32), np.zeros(0)
        infinite = np.full(count, highspy.kHighsInf)
        solver.addCols(count, np.array(self.costs), np.zeros(count), infinite, 0, no_rows, no_rows, no_values)
        entries = [entry for row, _, _ in self.rows for entry in row]
        starts = np.cumsum([0, *(len(row) for row, _, _ in self.rows)])[:-1]
        solver.addRows(
            len(self.rows),
            np.array([lower for _, lower, _ in self.rows], np.float64),
            np.array([upper for _, _, upper in self.rows], np.float64),
            len(entries),
            starts.astype(np.int32),
            np.array([column for column, _ in entries], np.int32),
            np.array([value for _, value in entries], np.float64),
        )
        solver.run()
        assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, solver.getModelStatus()
        return float(solver.getInfo().objective_function_value)
