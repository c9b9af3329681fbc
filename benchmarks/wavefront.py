"""How good are wavefront plans: the reference case, planning time, speed over one task after another.

    python -m benchmarks.wavefront [--quick] [--data DIR]
    python -m benchmarks.wavefront --held FILE

Prints rows as they are found and, as its last line, one JSON object. `reference` plans the MetaOps of a file, without transfers.
`plan_ms_64` and `plan_ms_256` time a search, its bounds and the choice of workers for ten tasks, kernels warm; and
`policy_s_64` all that policy `wavefront` does when it places them: several searches, compiled and emulated, beside
levels and baselines. `speedup` emulates compiled, verified plans of jobs shaped like the paper's (wavefront_cases.py) on
A800s: step time of `sequential` over that of `wavefront`, and makespan over a bound for any plan of the step.
`placement` is what data costs: the share of the makespan that transfers add, with workers chosen by data flows and
with the next free ones. `real_ratio`, `real_over_sequential` and `switch_s` are measured on two workers, one core each
(wavefront_run.py), `rehearsed_over_sequential` on eight, whose kernels wait (rehearsal.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import wavefront_run
from benchmarks.rehearsal import over_sequential
from benchmarks.wavefront_cases import JOBS, PUBLISHED, Job, share_of
from pipeweaver.data.items import Share
from pipeweaver.data_folder import data_folder
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Plan
from pipeweaver.schedule.verify import verify
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine
from pipeweaver.wavefront.baselines import sequential, task_parallel
from pipeweaver.wavefront.bind import bind, cluster_of, step_bound_ns
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.case import WavefrontCase, read_case
from pipeweaver.wavefront.levels import plan_levels, relaxed_optimum_ns
from pipeweaver.wavefront.metagraph import FREE, Schedule, check_schedule
from pipeweaver.wavefront.place import place, retimed
from pipeweaver.wavefront.plan import plan_wavefront

MACHINE = "A800"
DTYPE = "bfloat16"
SCALES = (0.5, 1.0, 2.0)
QUICK_JOBS = {"CLIP-4": (8,)}
PLACED_JOBS = {"CLIP-10": (8, 16), "OFASys-7": (8, 16), "QWen-VAL-3": (32, 64)}
REPEATS = 5
"""Times that planning is timed; the median counts."""

REAL = ("real_ratio", "real_over_sequential", "emulated_over_sequential", "switch_s", "real_steps")

Row = dict[str, Any]


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
    found |= planning_times(policy_too=not arguments.quick)
    jobs = QUICK_JOBS if arguments.quick else {name: tuple(PUBLISHED[name]) for name in JOBS}
    found["speedup"] = speedups(jobs, (1.0,) if arguments.quick else SCALES)
    found["over_bound_max"] = max(row["over_bound"] for row in found["speedup"])
    found["placement"] = None if arguments.quick else placements()
    found["rehearsed_over_sequential"] = None if arguments.quick else over_sequential()
    found |= dict.fromkeys(REAL) if arguments.quick else wavefront_run.figures()
    _shown("examples/multitask.toml on two workers", [{key: found[key] for key in REAL}])
    print(json.dumps(found))


def held(case: WavefrontCase) -> dict[str, Row]:
    """Makespans, bound and planning time of a case, ms, by number of workers."""
    kept = ("wavefront", "wavefront-levels", "bound", "plan_ms")
    rows = _shown("case, ms", _planned(case))
    return {str(row["workers"]): {key: row[key] for key in kept} for row in rows}


def reference(case: WavefrontCase) -> dict[str, Row]:
    """The same for the reference case, the authors' makespan and ratios beside it."""
    rows = (
        row
        | {
            "authors": round(case.published_ms[row["workers"]], 3),
            "area_bound": _ms(area_bound_ns(case.graph, row["workers"])),
            "relaxed": _ms(relaxed_optimum_ns(case.graph, row["workers"])),
        }
        for row in _planned(case)
    )
    return {str(row["workers"]): row for row in _shown("reference case, ms", rows)}


def planning_times(*, policy_too: bool) -> dict[str, float | None]:
    """Planning time of CLIP-10 on 64 and 256 workers, and of the whole policy on 64."""
    job = JOBS["CLIP-10"]()
    costs, share = _costs(job), share_of(job)
    found: dict[str, float | None] = {}
    for workers in (64, 256):
        graph = bind(job.graph, share, costs, workers, dtype=DTYPE)
        cluster = cluster_of(costs, workers)
        _, seconds = timed(lambda g=graph, c=cluster: place(g, plan_wavefront(g, c.workers, c.inside), c))  # type: ignore[misc]
        found[f"plan_ms_{workers}"] = round(1e3 * seconds, 1)
    start = time.perf_counter()
    if policy_too:
        POLICIES["wavefront"].place(job.graph, 64, costs, [share], dtype=DTYPE)
    found["policy_s_64"] = round(time.perf_counter() - start, 2) if policy_too else None
    _shown("planning time of ten tasks", [found])
    return found


def speedups(jobs: Mapping[str, Sequence[int]], scales: Sequence[float]) -> list[Row]:
    """One row per job, number of devices and scale of the batch: emulated, compiled and verified plans."""

    def rows() -> Iterator[Row]:
        for name, devices in jobs.items():
            job = JOBS[name]()
            costs = _costs(job)
            for scale in scales:
                share = share_of(job, scale)
                for count in devices:
                    row: Row = {"job": name, "devices": count, "scale": scale}
                    yield row | _speedup(job, costs, share, count) | {"paper": PUBLISHED[name].get(count)}

    return _shown("step time of `sequential` over that of each policy, emulated", rows())


def placements() -> list[Row]:
    """What transfers add to the makespan of a search's plan, %, by data flows and on the next free workers."""

    def rows() -> Iterator[Row]:
        for name, devices in PLACED_JOBS.items():
            job = JOBS[name]()
            costs, share = _costs(job), share_of(job)
            for count in devices:
                workers = count // job.tensor_parallel
                graph, cluster = bind(job.graph, share, costs, workers, dtype=DTYPE), cluster_of(costs, workers)
                plan = plan_wavefront(graph, workers, cluster.inside)
                row: Row = {"job": name, "devices": count}
                for key, by_flow in (("by_flow_pct", True), ("next_free_pct", False)):
                    placed = place(graph, plan, cluster, by_flow=by_flow)
                    nowhere = type(cluster)(workers=workers, island=workers, inside=FREE, across=FREE)
                    free = retimed(graph, placed, nowhere)
                    row[key] = round(100 * (1 - free.makespan_ns / placed.makespan_ns), 2)
                yield row

    return _shown("share of transfers in the makespan", rows())


def _speedup(job: Job, costs: SemuCosts, share: Share, devices: int) -> Row:
    workers = devices // job.tensor_parallel
    budget = costs.machine.memory_bytes * job.tensor_parallel
    plans: dict[str, Plan] = {}
    seconds = 0.0
    for name in ("sequential", "task-parallel", "wavefront-levels", "wavefront"):
        start = time.perf_counter()
        policy = POLICIES[name]
        placement = policy.place(job.graph, workers, costs, [share], dtype=DTYPE, budget_bytes=budget)
        draft = policy.plan(job.graph, placement, share, costs, budget_bytes=budget, seed=0, rounds=0, dtype=DTYPE)
        plans[name] = compile_plan(job.graph, share, draft, costs, dtype=DTYPE)
        verify([plans[name]], job.graph, [share], dtype=DTYPE, budget_bytes=budget)
        seconds = time.perf_counter() - start
    predicted = {name: plan.prediction for name, plan in plans.items() if plan.prediction is not None}
    one_after_another = predicted["sequential"].step_ns
    bound = step_bound_ns(job.graph, share, costs, workers)
    row: Row = {
        "sequential_ms": round(one_after_another / 1e6, 1),
        "wavefront_ms": round(predicted["wavefront"].step_ns / 1e6, 1),
        "bound_ms": round(bound / 1e6, 1),
        "over_bound": round(predicted["wavefront"].makespan_ns / bound, 4),
        "passes": len({part.microbatch for parts in plans["wavefront"].parts for part in parts}),
        "peak_gb": round(max(predicted["wavefront"].peak_bytes) / job.tensor_parallel / 1e9, 1),
        "place_and_prove_s": round(seconds, 2),
    }
    for name in ("task-parallel", "wavefront-levels", "wavefront"):
        row[name] = round(one_after_another / predicted[name].step_ns, 3)
    return row


def _costs(job: Job) -> SemuCosts:
    return SemuCosts(
        job.graph,
        load_machine(MACHINE),
        tensor_parallel=job.tensor_parallel,
        dtype=DTYPE,
        widths={"pixels": job.pixels},
    )


def _planned(case: WavefrontCase) -> Iterator[Row]:
    plan_wavefront(case.graph, case.workers[0])  # Compiles the kernels, or loads them.
    for workers in case.workers:
        ours, seconds = timed(lambda workers=workers: plan_wavefront(case.graph, workers))  # type: ignore[misc]
        plans = [ours, *(plan(case.graph, workers) for plan in (plan_levels, sequential, task_parallel))]
        for plan in plans:
            check_schedule(case.graph, plan)
        yield (
            {"workers": workers}
            | {plan.policy: _ms(plan.makespan_ns) for plan in plans}
            | {
                "bound": _ms(ours.lower_bound_ns),
                "over_bound": round(ours.makespan_ns / ours.lower_bound_ns, 4),
                "plan_ms": round(1e3 * seconds, 1),
                "evaluations_per_s": round(ours.evaluations / seconds),
            }
        )


def timed(plan: Callable[[], Schedule]) -> tuple[Schedule, float]:
    """A plan, and the median of the seconds that it takes to make it."""
    plan()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        schedule = plan()
        seconds.append(time.perf_counter() - start)
    return schedule, statistics.median(seconds)


def _shown(title: str, rows: Iterable[Row]) -> list[Row]:
    """The rows, each printed when it is there, under a line with the names of its columns."""
    print(title, flush=True)
    kept: list[Row] = []
    for row in rows:
        if not kept:
            print("  ".join(f"{key:>{_width(key)}}" for key in row))
        texts = (
            "" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()
        )
        print("  ".join(f"{text:>{_width(key)}}" for key, text in zip(row, texts, strict=True)), flush=True)
        kept.append(row)
    return kept


def _width(key: str) -> int:
    return max(len(key), 10)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


if __name__ == "__main__":
    main()
