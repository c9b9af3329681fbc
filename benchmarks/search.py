"""How good and how fast is the planner: gaps to proven bounds and optima, time to plans, against the paper's method.

    python -m benchmarks.search [--quick | --held FILE]

The paper's setups on H800 (setups.py), within their memory and without limit, 8 to 64 microbatches, each on one core
(search_rows.py). Rows of policy `pipeweaver` are there to compare with: 16 microbatches within the memory only. The oracle
(oracle.py) solves small random instances exactly. `--held` plans the instances of a file (held.py) instead.

The service's figures (planning.py) come first, on both cores. The rest falls into sections that do not depend on each
other: two processes, each on a core of its own with one thread, take one after the other. Everything is printed as it is
found, the JSON object at the end. The whole takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import geometric_mean, mean, median

from benchmarks import planning
from benchmarks.held import held_problem, load_held
from benchmarks.oracle import optimum, random_instance
from benchmarks.search_ablation import READINGS, Ablation, dynamic_ablation, paper_ablation
from benchmarks.search_rows import COMPARED, HEADER, Batches, Row, row_text, setup_rows
from pipeweaver.planner.explore import TURN, Search
from pipeweaver.planner.listing import LimitError
from pipeweaver.planner.problem import Ints, Problem, bound_ns

CORES = 2
SEARCH_SECONDS = 1.0
HASTE = 0.9
"""Share of its time after which a search of an instance does not go on."""
MOST_AT_ONCE = 200_000
"""Stages times rounds after which the clock is looked at."""
BLOCK = 10
"""Instances of a section."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is measured: everything, or what fits into a minute."""

    setups: Sequence[str]
    batches: Batches
    instances: int
    most_stages: int
    oracle_seconds: float
    ablation: Ablation | None


WHOLE = Scope(
    setups=("VLM-L", "T2V-L", "VLM-M", "T2V-S", "VLM-S"),
    batches=Batches(),
    instances=80,
    most_stages=60,
    oracle_seconds=60.0,
    ablation=Ablation(),
)
QUICK = Scope(
    setups=("VLM-S",),
    batches=Batches(microbatches=(16, 32), sample=1, chunks=2, long_seconds=None, others=1),
    instances=6,
    most_stages=24,
    oracle_seconds=1.0,
    ablation=None,
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a section found; sections have something of one kind."""

    rows: tuple[Row, ...] = ()
    losses: tuple[float, ...] = ()
    """Of plans after a second against plans after a minute."""
    gaps: tuple[float, ...] = ()
    """To proven optima."""
    paper: tuple[dict[str, object], ...] = ()
    levers: tuple[dict[str, object], ...] = ()


_cores: SimpleQueue[int]
"""Of a section's process: the cores that no section is on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, within a minute")
    parser.add_argument("--held", type=Path, metavar="FILE", help="plan the instances of a file")
    chosen = parser.parse_args()
    if chosen.held is not None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        try:
            figures = held_figures(chosen.held)
        except ValueError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        print(json.dumps({"instances": figures}))
        sys.exit(2 if any("error" in one for one in figures) else 0)
    began = time.perf_counter()
    service = service_figures(quick=chosen.quick)
    found = all_figures(QUICK if chosen.quick else WHOLE) | service
    print(f"{time.perf_counter() - began:.0f} s in all")
    print(json.dumps(found))


def service_figures(quick: bool) -> dict[str, object]:
    """What benchmarks/planning.py measures; `null` where a minute does not suffice."""
    figures: dict[str, object] = dict.fromkeys(planning.FIELDS)
    if not quick:
        for line in planning.measured(quick, figures):
            print(line, flush=True)
    return figures


def held_figures(path: Path) -> list[dict[str, object]]:
    """Makespan, bound and seconds of every instance of a file, printed as they are found. One whose limits nothing fits
    has no makespan and an `error`, which is told on stderr."""
    instances = load_held(path)
    warm()
    found: list[dict[str, object]] = []
    for number, held in enumerate(instances):
        name, began = held.name or f"instance {number}", time.perf_counter()
        problem, limits = held_problem(held)
        one: dict[str, object] = {"name": held.name, "makespan": None, "bound": bound_ns(problem)}
        try:
            one["makespan"] = searched(problem, limits, seconds=SEARCH_SECONDS).best.makespan_ns
        except LimitError as error:
            one["error"] = f"no order was found that keeps to the limits: {error}"
            print(f"{name}: {one['error']}", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - began
        print(f"{name}: makespan {one['makespan']}, bound {one['bound']}, {seconds:.3f} s", flush=True)
        found.append(one | {"seconds": round(seconds, 4)})
    return found


def warm() -> None:
    """Compile and load all kernels of the search, beam and tabu search included, before time counts."""
    for limited in (False, True):
        Search(*held_problem(random_instance(1, most_stages=24, limited=limited))).run(2 * TURN)


def searched(problem: Problem, limits: Ints | None, *, seconds: float) -> Search:
    """A search within a time, or until it reaches its bound (`enough_ns`); some rounds at least."""
    began = time.perf_counter()
    search = Search(problem, limits, enough_ns=bound_ns(problem))
    rounds = max(1, min(50, MOST_AT_ONCE // max(1, problem.num_stages)))
    search.run(rounds)
    while time.perf_counter() - began < HASTE * seconds and search.best.makespan_ns > search.enough_ns:
        search.run(rounds)
    return search


def all_figures(scope: Scope) -> dict[str, object]:
    """Every field of the benchmark, by two processes at a time; tables are printed on the way.

    Each section has a process of its own: garbage that another left, uncollected, makes everything 1.5 times as slow.
    """
    print(HEADER, flush=True)
    spawned = multiprocessing.get_context("spawn")
    cores: SimpleQueue[int] = spawned.SimpleQueue()
    available = sorted(os.sched_getaffinity(0))[:CORES]
    for core in available:
        cores.put(core)
    os.environ["OMP_NUM_THREADS"] = "1"
    with spawned.Pool(len(available), initializer=_begin, initargs=(cores,), maxtasksperchild=1) as pool:
        found = list(pool.imap(_called, sections(scope), chunksize=1))
    figures = summary(found)
    for name, value in figures.items():
        print(f"{name:36} {value if not isinstance(value, float) else round(value, 5)}")
    rows = sorted((row for one in found for row in one.rows), key=lambda row: scope.setups.index(row.setup))
    asked = scope.ablation is not None
    return {
        "rows": [asdict(row) for row in rows],
        **figures,
        "ablation_paper": [step for one in found for step in one.paper] if asked else None,
        "ablation_dynamic": [lever for one in found for lever in one.levers] if asked else None,
    }


def sections(scope: Scope) -> list[Callable[[], Found]]:
    """What may run side by side, the longest first."""
    found: list[Callable[[], Found]] = []
    found += [partial(row_section, name, "dynamic", scope.batches) for name in scope.setups]
    if scope.ablation is not None:
        found += [partial(lever_section, replace(scope.ablation, setups=(name,))) for name in scope.ablation.setups]
        found += [partial(paper_section, scope.ablation, reading) for reading in READINGS]
    for first in range(0, scope.instances, BLOCK):
        seeds = range(first, min(first + BLOCK, scope.instances))
        found.append(partial(oracle_section, seeds, scope.most_stages, scope.oracle_seconds))
    found += [partial(row_section, name, "pipeweaver", scope.batches) for name in scope.setups]
    return found


def row_section(name: str, policy: str, batches: Batches) -> Found:
    rows, losses = [], []
    for row, loss in setup_rows(name, policy, batches):
        print(row_text(row, loss), flush=True)
        rows.append(row)
        losses += [loss] if loss is not None else []
    return Found(rows=tuple(rows), losses=tuple(losses))


def lever_section(chosen: Ablation) -> Found:
    return Found(levers=tuple(dynamic_ablation(chosen)))


def paper_section(chosen: Ablation, reading: str) -> Found:
    return Found(paper=tuple(paper_ablation(chosen, reading)))


def oracle_section(seeds: Sequence[int], most_stages: int, seconds: float) -> Found:
    """Gaps of the search to optima that CP-SAT proves, on random instances."""
    gaps: list[float] = []
    warm()
    for seed in seeds:
        held = random_instance(seed, most_stages=most_stages)
        problem, limits = held_problem(held)
        search = searched(problem, limits, seconds=SEARCH_SECONDS)
        best, bound = search.best, search.enough_ns
        exact = optimum(held, seconds=seconds, known=best.start_ns.tolist(), bound=bound)
        if exact.is_proven:
            gaps.append(best.makespan_ns / exact.makespan - 1)
        print(
            f"{held.name}: {problem.num_stages} stages, {'limited' if limits is not None else 'unlimited'}: "
            f"{best.makespan_ns}, exact {exact.makespan} {'proven' if exact.is_proven else 'not proven'}",
            flush=True,
        )
    return Found(gaps=tuple(gaps))


def summary(found: Sequence[Found]) -> dict[str, object]:
    """Medians, ratios and extremes; None where there is nothing to tell from."""
    rows = [row for one in found for row in one.rows]
    gaps = [gap for one in found for gap in one.gaps]

    def chosen(**fields: object) -> Iterator[Row]:
        return (row for row in rows if all(getattr(row, name) == value for name, value in fields.items()))

    def over(value: Callable[[Row], float], rows: Iterator[Row]) -> float | None:
        found = [value(row) for row in rows if row.microbatches >= 32]
        return median(found) if found else None

    theirs = {row.setup: row for row in chosen(policy="pipeweaver", unlimited=False, microbatches=COMPARED)}
    speeds = [
        theirs[row.setup].makespan_ns / row.makespan_ns
        for row in chosen(policy="dynamic", unlimited=False, microbatches=COMPARED)
        if row.setup in theirs
    ]
    large = [row.bubble for row in chosen(policy="dynamic", unlimited=True, setup="VLM-L", microbatches=16)]
    ours = list(chosen(policy="dynamic"))
    return {
        "oracle_gap_mean": mean(gaps) if gaps else None,
        "oracle_gap_max": max(gaps, default=None),
        "oracle_proven": len(gaps),
        "gap_layout_p50_m32_unlimited": over(lambda row: row.gap_layout, chosen(policy="dynamic", unlimited=True)),
        "gap_free_p50_m32_unlimited": over(lambda row: row.gap_free, chosen(policy="dynamic", unlimited=True)),
        "gap_layout_p50_m32": over(lambda row: row.gap_layout, chosen(policy="dynamic", unlimited=False)),
        "bubble_vlm_l_m16_unlimited": large[0] if large else None,
        "bubble_vlm_l_m16_unlimited_p50": median(large) if large else None,
        "dynamic_over_pipeweaver_m16": geometric_mean(speeds) if speeds else None,
        "dynamic_over_pipeweaver_m16_worst": min(speeds, default=None),
        "seconds_max": max((row.seconds for row in ours), default=None),
        "first_plan_ms_max": max((row.first_plan_ms for row in ours), default=None),
        "one_second_loss": max((loss for one in found for loss in one.losses), default=None),
    }


def _begin(cores: SimpleQueue[int]) -> None:
    """`cores` are those that no section is on."""
    global _cores
    _cores = cores


def _called(section: Callable[[], Found]) -> Found:
    """What a section found, on a core that no other one is on."""
    core = _cores.get()
    os.sched_setaffinity(0, {core})
    try:
        return section()
    finally:
        _cores.put(core)


if __name__ == "__main__":
    main()
