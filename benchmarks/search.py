"""How good and how fast is the planner: gaps to proven bounds and optima, time to plans, against the paper's method.

    python -m benchmarks.search [--quick | --held FILE]

The paper's setups on H800 (setups.py), within their memory and without limit, 8 to 64 microbatches, on one core. A row's
time runs from metadata to a compiled and proven plan, with costs that know earlier batches. The oracle (oracle.py)
solves small random instances exactly. `--held` plans the instances of a file (held.py) instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Protocol

from benchmarks import planning
from benchmarks.held import held_problem, load_held
from benchmarks.oracle import optimum, random_instance
from benchmarks.search_ablation import Ablation, ablation
from benchmarks.setups import Case, cases
from pipeweaver.data.items import Share
from pipeweaver.planner.assign import single_share
from pipeweaver.planner.explore import Search
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.planner.problem import Ints, Problem, bound_ns
from pipeweaver.planner.segment_plan import SegmentPlanner
from pipeweaver.planner.step_search import StepPlanner
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Draft, Placement
from pipeweaver.schedule.verify import verify_flat

DTYPE = "bfloat16"
SECONDS = {"dynamic": 1.0, "pipeweaver": 10.0}
LONG_SECONDS = 60.0
SAMPLE = 4
"""Batches of 16 microbatches that a placement is made for."""
SEARCH_SECONDS, ORACLE_SECONDS = 1.0, 60.0
HASTE = 0.9
"""Share of its time after which a search does not begin another try."""


ROUNDS = {"dynamic": 4, "pipeweaver": 1}
"""Rounds between looks at the clock."""
WARM_ROUNDS = {"dynamic": 80, "pipeweaver": 1}


class Planner(Protocol):
    """What the planners of policies that search have in common."""

    @property
    def evaluations(self) -> int:
        """Schedules scored so far."""
        ...

    def run(self, rounds: int) -> None: ...

    def plan(self) -> tuple[Draft, FlatPlan]: ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch planned by one policy. `gap_layout` is to the bound of the same stages, `gap_free` to useful work
    shared out evenly."""

    setup: str
    microbatches: int
    policy: str
    unlimited: bool
    makespan_ns: int
    lower_bound_ns: int
    gap_layout: float
    gap_free: float
    bubble: float
    seconds: float
    first_plan_ms: float
    evaluations_per_s: float


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is measured: everything, or what fits into a minute."""

    setups: Sequence[str] = ("VLM-S", "VLM-M", "VLM-L", "T2V-S", "T2V-L")
    microbatches: Sequence[int] = (8, 16, 32, 64)
    instances: int = 80
    most_stages: int = 60
    oracle_seconds: float = ORACLE_SECONDS
    long_seconds: float | None = LONG_SECONDS
    sample: int = SAMPLE
    chunks: int | None = None
    """Of each module on each worker; chosen by the policy if left out."""
    ablation: Ablation | None = None


QUICK = Scope(
    setups=("VLM-S",),
    microbatches=(16, 32),
    instances=6,
    most_stages=24,
    oracle_seconds=1.0,
    long_seconds=None,
    sample=1,
    chunks=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, within a minute")
    parser.add_argument("--held", type=Path, metavar="FILE", help="plan the instances of a file")
    chosen = parser.parse_args()
    service = {} if chosen.held is not None else service_figures(quick=chosen.quick)  # on two cores; the rest is on one
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if chosen.held is not None:
        try:
            figures = held_figures(chosen.held)
        except ValueError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
    else:
        figures = all_figures(QUICK if chosen.quick else Scope(ablation=Ablation()))
    print(json.dumps(figures | service))


def service_figures(quick: bool) -> dict[str, object]:
    """What benchmarks/planning.py measures; `null` where a minute does not suffice."""
    figures: dict[str, object] = dict.fromkeys(planning.FIELDS)
    if not quick:
        for line in planning.measured(quick, figures):
            print(line, flush=True)
    return figures


def held_figures(path: Path) -> dict[str, object]:
    """Makespan, bound and seconds of every instance of a file, printed as they are found."""
    instances = load_held(path)
    for limited in (False, True):  # kernels are compiled before time counts
        searched(*held_problem(random_instance(0, most_stages=24, limited=limited)), seconds=0)
    found = []
    for held in instances:
        began = time.perf_counter()
        problem, limits = held_problem(held)
        search = searched(problem, limits, seconds=SEARCH_SECONDS)
        makespan, bound, seconds = search.best.makespan_ns, search.enough_ns, time.perf_counter() - began
        print(f"{held.name}: makespan {makespan}, bound {bound}, {seconds:.3f} s")
        found.append({"name": held.name, "makespan": makespan, "bound": bound, "seconds": round(seconds, 4)})
    return {"instances": found}


def searched(problem: Problem, limits: Ints | None, *, seconds: float) -> Search:
    """A search within a time, or until it reaches its bound (`enough_ns`); several rounds at least."""
    began = time.perf_counter()
    search = Search(problem, limits, enough_ns=bound_ns(problem))
    search.run(50)
    while time.perf_counter() - began < HASTE * seconds and search.best.makespan_ns > search.enough_ns:
        search.run(50)
    return search


def all_figures(scope: Scope) -> dict[str, object]:
    """Every field of the benchmark, tables printed on the way."""
    oracle = oracle_figures(scope)
    rows: list[Row] = []
    losses: list[float] = []
    print(f"{'setup':6} {'mb':>3} {'memory':9} {'policy':10} {'makespan':>11} {'layout':>7} {'free':>7} {'bubble':>7}")
    for name, policy in product(scope.setups, SECONDS):
        case = cases()[name]
        placement = placed(case, policy, count=scope.sample, chunks=scope.chunks)
        warm(case, policy, placement)
        # The other policy is there to compare with.
        ours = policy == "dynamic"
        for unlimited, microbatches in product(
            (False, True) if ours else (False,), scope.microbatches if ours else (16,)
        ):
            share = single_share(case.graph, case.batch(seed=0, microbatches=microbatches))
            other = single_share(case.graph, case.batch(seed=1, microbatches=microbatches))
            planned(case, policy, placement, other, unlimited=unlimited, seconds=SECONDS["dynamic"])
            row = planned(case, policy, placement, share, unlimited=unlimited, seconds=SECONDS[policy])
            rows.append(row)
            print_row(row)
            if ours and microbatches == 16 and scope.long_seconds is not None:
                long = planned(case, policy, placement, share, unlimited=unlimited, seconds=scope.long_seconds)
                losses.append(row.makespan_ns / long.makespan_ns - 1)
                print(f"       after {scope.long_seconds:.0f} s {losses[-1]:.2%} shorter")
    figures = oracle | summary(rows) | {"one_second_loss": max(losses, default=None)}
    for name, value in figures.items():
        print(f"{name:36} {value if not isinstance(value, float) else round(value, 5)}")
    steps = ablation(scope.ablation) if scope.ablation else {"ablation_paper": None, "ablation_dynamic": None}
    return {"rows": [asdict(row) for row in rows], **figures, **steps}


def placed(case: Case, policy: str, *, count: int, chunks: int | None = None) -> Placement:
    """The policy's placement for a sample of batches, within the memory; no part of a row's time."""
    shares = [single_share(case.graph, case.batch(seed=1000 + i, microbatches=16)) for i in range(count)]
    place = POLICIES[policy].place
    options = PolicyOptions(chunks_per_worker={} if chunks is None else dict.fromkeys(case.graph.by_name, chunks))
    return place(case.graph, case.workers, case.costs, shares, options, dtype=DTYPE, budget_bytes=case.budget_bytes)


def warm(case: Case, policy: str, placement: Placement) -> None:
    """Compile kernels, and let costs trace the kinds of parts that there are, on batches that are not measured."""
    for seed, budget in product((1, 2), (None, case.budget_bytes)):
        share = single_share(case.graph, case.batch(seed=seed, microbatches=16))
        planner_of(policy, case, placement, share, budget).run(WARM_ROUNDS[policy])
    # As processes that plan do: garbage is collected between batches (`runtime/planner_process.py`).
    gc.collect()
    gc.freeze()
    gc.disable()


def planned(case: Case, policy: str, placement: Placement, share: Share, *, unlimited: bool, seconds: float) -> Row:
    """Plan one batch within a time."""
    budget = None if unlimited else case.budget_bytes
    gc.collect()
    began = time.perf_counter()
    planner = planner_of(policy, case, placement, share, budget)

    def proven() -> FlatPlan:
        _, plan = planner.plan()
        verify_flat([plan], case.graph, [share], dtype=DTYPE, budget_bytes=budget)
        return plan

    planner.run(1)
    proven()
    first = time.perf_counter() - began
    improve(planner, ROUNDS[policy], began + HASTE * seconds - first / 2)
    plan = proven()
    spent = time.perf_counter() - began
    found = plan.prediction
    assert found is not None
    return Row(
        setup=case.name,
        microbatches=len(share.microbatches),
        policy=policy,
        unlimited=unlimited,
        makespan_ns=found.makespan_ns,
        lower_bound_ns=found.lower_bound_ns,
        gap_layout=found.makespan_ns / found.lower_bound_ns - 1,
        gap_free=found.makespan_ns * case.workers / found.useful_ns - 1,
        bubble=1 - found.useful_ns / (case.workers * found.makespan_ns),
        seconds=spent,
        first_plan_ms=1e3 * first,
        evaluations_per_s=planner.evaluations / spent,
    )


def planner_of(policy: str, case: Case, placement: Placement, share: Share, budget: int | None) -> Planner:
    """The anytime planner behind a policy."""
    if policy == "pipeweaver":
        return SegmentPlanner(case.graph, placement, share, case.costs, budget_bytes=budget, dtype=DTYPE)
    return StepPlanner(case.graph, placement, share, case.costs, budget_bytes=budget, dtype=DTYPE)


def improve(planner: Planner, rounds: int, until: float) -> None:
    """Rounds until a time of `perf_counter`, none that would end after it as far as the last ones tell."""
    longest = 0.0
    while (began := time.perf_counter()) + longest < until:
        planner.run(rounds)
        longest = max(0.8 * longest, time.perf_counter() - began)


def oracle_figures(scope: Scope) -> dict[str, object]:
    """Gaps of the search to optima that CP-SAT proves, on random instances."""
    gaps: list[float] = []
    searched(*held_problem(random_instance(1, most_stages=24)), seconds=0)
    for seed in range(scope.instances):
        held = random_instance(seed, most_stages=scope.most_stages)
        problem, limits = held_problem(held)
        search = searched(problem, limits, seconds=SEARCH_SECONDS)
        exact = optimum(held, seconds=scope.oracle_seconds, known=search.best.start_ns.tolist())
        if exact.is_proven:
            gaps.append(search.best.makespan_ns / exact.makespan - 1)
        print(
            f"{held.name}: {problem.num_stages} stages, {'limited' if limits is not None else 'unlimited'}: "
            f"{search.best.makespan_ns}, exact {exact.makespan} {'proven' if exact.is_proven else 'not proven'}"
        )
    return {
        "oracle_gap_mean": mean(gaps) if gaps else None,
        "oracle_gap_max": max(gaps, default=None),
        "oracle_proven": len(gaps),
    }


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Medians, ratios and extremes over the rows; None where there are none to tell from."""

    def chosen(**fields: object) -> Iterator[Row]:
        return (row for row in rows if all(getattr(row, name) == value for name, value in fields.items()))

    def over(value: Callable[[Row], float], rows: Iterator[Row]) -> float | None:
        found = [value(row) for row in rows if row.microbatches >= 32]
        return median(found) if found else None

    theirs = {row.setup: row for row in chosen(policy="pipeweaver", unlimited=False, microbatches=16)}
    speeds = [
        theirs[row.setup].makespan_ns / row.makespan_ns
        for row in chosen(policy="dynamic", unlimited=False, microbatches=16)
        if row.setup in theirs
    ]
    large = [row.bubble for row in chosen(policy="dynamic", unlimited=True, setup="VLM-L", microbatches=16)]
    ours = list(chosen(policy="dynamic"))
    return {
        "gap_layout_p50_m32_unlimited": over(lambda row: row.gap_layout, chosen(policy="dynamic", unlimited=True)),
        "gap_free_p50_m32_unlimited": over(lambda row: row.gap_free, chosen(policy="dynamic", unlimited=True)),
        "gap_layout_p50_m32": over(lambda row: row.gap_layout, chosen(policy="dynamic", unlimited=False)),
        "bubble_vlm_l_m16_unlimited": large[0] if large else None,
        "dynamic_over_pipeweaver_m16": geometric_mean(speeds) if speeds else None,
        "dynamic_over_pipeweaver_m16_worst": min(speeds, default=None),
        "seconds_max": max((row.seconds for row in ours), default=None),
        "first_plan_ms_max": max((row.first_plan_ms for row in ours), default=None),
    }


def print_row(row: Row) -> None:
    memory = "unlimited" if row.unlimited else "80 GB"
    print(
        f"{row.setup:6} {row.microbatches:3} {memory:9} {row.policy:10} {row.makespan_ns / 1e6:8.1f} ms "
        f"{row.gap_layout:7.2%} {row.gap_free:7.2%} {row.bubble:7.2%} {row.seconds:6.3f} s, first "
        f"{row.first_plan_ms:5.0f} ms, {row.evaluations_per_s:6.0f}/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
