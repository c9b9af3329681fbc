"""One setup's rows of `benchmarks.search`: batches planned by a policy within a time, each plan compiled and proven.

    for row, loss in setup_rows(scope, "VLM-S", "dynamic"): ...

A row's time runs from metadata to a compiled and proven plan, on one core, kernels compiled and costs knowing earlier
batches. The search runs round by round until its time is over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from benchmarks.setups import Case, cases
from pipeweaver.data.items import Share
from pipeweaver.planner.assign import single_share
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.planner.segment_plan import SegmentPlanner
from pipeweaver.planner.step_search import StepPlanner
from pipeweaver.policies import POLICIES
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Placement
from pipeweaver.schedule.verify import verify_flat

DTYPE = "bfloat16"
SECONDS = {"dynamic": 1.0, "pipeweaver": 10.0}
COMPARED = 16
"""Microbatches of the rows that are run for a minute as well, and of those of `pipeweaver`, within the memory."""
SPREAD = ("VLM-L", 16, True)
"""Setup, microbatches, and whether memory is unlimited, of the row that is also planned for other batches."""
HASTE = 0.9
"""Share of its time after which a search does not go on."""
WARM_ROUNDS = {"dynamic": 80, "pipeweaver": 1}


class Planner(Protocol):
    """What the planners of policies that search have in common."""

    @property
    def evaluations(self) -> int:
        """Schedules scored so far."""
        ...

    def run(self, rounds: int) -> None: ...

    def plan(self) -> FlatPlan: ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch planned by one policy. `gap_layout` is to the bound of the same stages, `gap_free` to useful work
    shared out evenly."""

    setup: str
    microbatches: int
    seed: int
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
class Batches:
    """Which batches are planned, and how. A placement is made for `sample` batches of 16 microbatches; `chunks` of each
    module on each worker are chosen by the policy if left out. `long_seconds`: of the rows that are run for long too.
    `others`: so many batches more of `SPREAD`, to see how far one batch speaks for all."""

    microbatches: Sequence[int] = (8, 16, 32, 64)
    sample: int = 4
    chunks: int | None = None
    long_seconds: float | None = 60.0
    others: int = 11


def setup_rows(name: str, policy: str, batches: Batches) -> Iterator[tuple[Row, float | None]]:
    """Rows of a setup, as they are found, each with what it loses against the plan after `long_seconds`, if that is asked
    for. Of policy `pipeweaver` only what others are compared with: 16 microbatches within the memory."""
    case = cases()[name]
    ours = policy == "dynamic"
    placements = {
        unlimited: placed(case, policy, batches, unlimited) for unlimited in ((False, True) if ours else (False,))
    }
    warm(case, policy, placements)
    for unlimited, microbatches in product((False, True), batches.microbatches):
        if not ours and (unlimited or microbatches != COMPARED):
            continue
        placement = placements[unlimited]
        share = single_share(case.graph, case.batch(seed=0, microbatches=microbatches))
        other = single_share(case.graph, case.batch(seed=1, microbatches=microbatches))
        planned(case, policy, placement, other, unlimited=unlimited, seconds=SECONDS["dynamic"])
        row = planned(case, policy, placement, share, unlimited=unlimited, seconds=SECONDS[policy])
        loss = None
        if ours and microbatches == COMPARED and batches.long_seconds is not None:
            long = planned(case, policy, placement, share, unlimited=unlimited, seconds=batches.long_seconds)
            loss = row.makespan_ns / long.makespan_ns - 1
        yield row, loss
        if ours and (name, microbatches, unlimited) == SPREAD:
            for seed in range(1, 1 + batches.others):
                share = single_share(case.graph, case.batch(seed=seed, microbatches=microbatches))
                yield planned(case, policy, placement, share, unlimited=unlimited, seconds=SECONDS[policy]), None


def placed(case: Case, policy: str, batches: Batches, unlimited: bool) -> Placement:
    """The policy's placement for a sample of batches, with the memory of the rows that it is for; no part of a row's
    time."""
    shares = [single_share(case.graph, case.batch(seed=1000 + i, microbatches=16)) for i in range(batches.sample)]
    place, chunks = POLICIES[policy].place, batches.chunks
    options = PolicyOptions(chunks_per_worker={} if chunks is None else dict.fromkeys(case.graph.by_name, chunks))
    budget = None if unlimited else case.budget_bytes
    return place(case.graph, case.workers, case.costs, shares, options, dtype=DTYPE, budget_bytes=budget)


def warm(case: Case, policy: str, placements: Mapping[bool, Placement]) -> None:
    """Compile kernels, and let costs trace the kinds of parts that there are, on batches that are not measured.
    `placements` by whether memory is unlimited."""
    for seed, (unlimited, placement) in product((1, 2), placements.items()):
        share = single_share(case.graph, case.batch(seed=seed, microbatches=16))
        budget = None if unlimited else case.budget_bytes
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
        plan = planner.plan()
        verify_flat([plan], case.graph, [share], dtype=DTYPE, budget_bytes=budget)
        return plan

    planner.run(1)
    proven()
    first = time.perf_counter() - began
    improve(planner, began + HASTE * seconds - first / 2)
    plan = proven()
    spent = time.perf_counter() - began
    found = plan.prediction
    assert found is not None
    return Row(
        setup=case.name,
        microbatches=len(share.microbatches),
        seed=share.step,
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


def improve(planner: Planner, until: float) -> None:
    """Rounds until a time of `perf_counter`, none that would end after it as far as the last ones tell."""
    longest = 0.0
    while (began := time.perf_counter()) + longest < until:
        planner.run(1)
        longest = max(0.8 * longest, time.perf_counter() - began)


HEADER = f"{'setup':6} {'mb':>3} {'seed':>4} {'memory':9} {'policy':10} {'makespan':>11} {'layout':>7} {'free':>7} {'bubble':>7}"


def row_text(row: Row, loss: float | None) -> str:
    memory = "unlimited" if row.unlimited else "80 GB"
    return (
        f"{row.setup:6} {row.microbatches:3} {row.seed:4} {memory:9} {row.policy:10} {row.makespan_ns / 1e6:8.1f} ms "
        f"{row.gap_layout:7.2%} {row.gap_free:7.2%} {row.bubble:7.2%} {row.seconds:6.3f} s, first "
        f"{row.first_plan_ms:5.0f} ms, {row.evaluations_per_s:6.0f}/s"
        + ("" if loss is None else f"; {loss:.2%} over a long run")
    )
