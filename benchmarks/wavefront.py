"""How good are wavefront plans: the reference case, other cases in its format.

    python -m benchmarks.wavefront [--quick] [--data DIR]
    python -m benchmarks.wavefront --held FILE

Prints a table and, as its last line, one JSON object. All times are milliseconds; planning is timed with compiled
kernels warm, bound included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeweaver.data_folder import data_folder
from pipeweaver.wavefront.baselines import sequential, task_parallel
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.case import WavefrontCase, read_case
from pipeweaver.wavefront.levels import plan_levels, relaxed_optimum_ns
from pipeweaver.wavefront.metagraph import Schedule, check_schedule
from pipeweaver.wavefront.plan import plan_wavefront

REPEATS = 5
"""Times that planning is timed; the median counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="answer within a minute; what is left out is null")
    parser.add_argument("--held", type=Path, metavar="FILE", help="a case in the format of the reference case")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of measured data")
    arguments = parser.parse_args()
    try:
        if arguments.held is not None:
            print(json.dumps(held(read_case(arguments.held))))
            return
        case = read_case(data_folder(arguments.data) / "spindle" / "planner_reference.json")
    except ValueError as error:
        parser.error(str(error))
    found: dict[str, Any] = {"reference": reference(case)}
    print(json.dumps(found))


def held(case: WavefrontCase) -> dict[str, dict[str, float]]:
    """Makespans, bound and planning time of a case, ms, by number of workers."""
    rows = _rows(case)
    _print("case", rows)
    kept = ("wavefront", "wavefront-levels", "bound", "plan_ms")
    return {workers: {key: row[key] for key in kept} for workers, row in rows.items()}


def reference(case: WavefrontCase) -> dict[str, dict[str, float]]:
    """The same for the reference case, the authors' makespan and ratios beside it."""
    rows = _rows(case)
    for workers, row in rows.items():
        row["authors"] = round(case.published_ms[int(workers)], 3)
        row["area_bound"] = _ms(area_bound_ns(case.graph, int(workers)))
        row["relaxed"] = _ms(relaxed_optimum_ns(case.graph, int(workers)))
    _print("reference case", rows)
    return rows


def _rows(case: WavefrontCase) -> dict[str, dict[str, float]]:
    plan_wavefront(case.graph, case.workers[0])  # Compiles the kernels, or loads them.
    rows = {}
    for workers in case.workers:
        ours, seconds = timed(lambda workers=workers: plan_wavefront(case.graph, workers))  # type: ignore[misc]
        plans = [ours, *(plan(case.graph, workers) for plan in (plan_levels, sequential, task_parallel))]
        for plan in plans:
            check_schedule(case.graph, plan)
        rows[str(workers)] = {plan.policy: _ms(plan.makespan_ns) for plan in plans} | {
            "bound": _ms(ours.lower_bound_ns),
            "over_bound": round(ours.makespan_ns / ours.lower_bound_ns, 4),
            "plan_ms": round(1e3 * seconds, 1),
            "evaluations_per_s": round(ours.evaluations / seconds),
        }
    return rows


def timed(plan: Callable[[], Schedule]) -> tuple[Schedule, float]:
    """A plan, and the median of the seconds that it takes to make it."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        schedule = plan()
        seconds.append(time.perf_counter() - start)
    return schedule, statistics.median(seconds)


def _print(title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title=title)
    table.add_column("workers", justify="right")
    for key in next(iter(rows.values())):
        table.add_column(key, justify="right")
    for workers, row in rows.items():
        table.add_row(workers, *(f"{value:g}" for value in row.values()))
    Console(width=200).print(table)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


if __name__ == "__main__":
    main()
