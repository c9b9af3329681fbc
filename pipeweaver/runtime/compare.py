"""Interleaved pipeline and wavefront side by side: the same batches, emulated under each policy that can run the job.

    for found in compare(job, graph, batches, costs, budget_bytes): ...
    Candidate(policy="dynamic", step_ns=412_000_000, peak_bytes=..., reason="")
    Candidate(policy="wavefront", step_ns=388_000_000, ...)         policy `auto` takes this one

Two ways differ in kind: chunks that stay where they are while parts stream through them, and slices of tasks that run side
by side on numbers of workers of their own. Policies that were published before compete within the first (`docs/planning.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeweaver.config import AUTO, Job
from pipeweaver.costs import Costs
from pipeweaver.data.items import Batch
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Planning, plan_batch

CANDIDATES = ("dynamic", "wavefront")
"""The best of each kind; `wavefront` never takes longer than `wavefront-levels`, `task-parallel` and `sequential`."""
COMPARED = 3
"""So many batches of the sample are planned; those in its middle are as good as any."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy on a sample of batches: mean step time and the most that a worker holds at any time, as emulated; or the
    reason why it cannot run the job."""

    policy: str
    planning: Planning | None
    step_ns: int = 0
    peak_bytes: int = 0
    reason: str = ""


def compare(
    job: Job, graph: ModelGraph, batches: Sequence[Batch], costs: Costs, budget_bytes: int | None
) -> tuple[Candidate, ...]:
    """Every candidate on the same batches, the fastest first, those that cannot run the job last."""
    found = [_emulated(job, policy, graph, batches, costs, budget_bytes) for policy in CANDIDATES]
    return tuple(sorted(found, key=lambda one: (one.planning is None, one.step_ns)))


def place(job: Job, graph: ModelGraph, batches: Sequence[Batch], costs: Costs, budget_bytes: int | None) -> Planning:
    """As `prepare.place`, for policy `auto` too: then by the policy with the fastest step.

    Raises ValueError if the policy, or for `auto` every candidate, cannot run the job.
    """
    if job.policy.name != AUTO:
        return prepare.place(job, job.policy.name, graph, batches, costs, budget_bytes)
    return fastest(compare(job, graph, batches, costs, budget_bytes))


def fastest(candidates: Sequence[Candidate]) -> Planning:
    """What plans of the first candidate depend on. Raises ValueError, with all reasons, if none can run the job."""
    if candidates[0].planning is None:
        reasons = "; ".join(f"{one.policy}: {one.reason}" for one in candidates)
        raise ValueError(f"policy {AUTO}: none of {', '.join(CANDIDATES)} can run the job: {reasons}")
    return candidates[0].planning


def in_words(candidates: Sequence[Candidate], chosen: str) -> list[str]:
    """Which is faster, by how much, at what memory, and what to set if it is not the `chosen` policy; a line each."""
    lines = []
    for one in candidates:
        if one.planning is None:
            lines.append(f"{one.policy} cannot run this job: {one.reason}")
        else:
            mean_ms, most = one.step_ns / 1e6, one.peak_bytes / 2**20
            lines.append(f"{one.policy}: {mean_ms:.1f} ms per step, mean of sampled batches; {most:.1f} MiB at most")
    able = [one for one in candidates if one.planning is not None]
    if len(able) > 1:
        first, second = able[:2]
        lines.append(
            f"{first.policy} is {second.step_ns / first.step_ns:.2f} times as fast as {second.policy}, "
            f"with {first.peak_bytes / second.peak_bytes:.2f} times its memory"
        )
        if chosen == second.policy:
            lines[-1] += (
                f'; policy.name = "{first.policy}" is the faster one for this job, and "{AUTO}" finds it by itself'
            )
    return lines


def _emulated(
    job: Job, policy: str, graph: ModelGraph, batches: Sequence[Batch], costs: Costs, budget_bytes: int | None
) -> Candidate:
    first = max(0, (len(batches) - COMPARED) // 2)
    steps: list[int] = []
    peak = 0
    try:
        planning = prepare.place(job, policy, graph, batches, costs, budget_bytes)
        for batch in batches[first : first + COMPARED]:
            predictions = [plan.prediction for plan in plan_batch(planning, batch) if plan.prediction is not None]
            steps.append(max(prediction.step_ns for prediction in predictions))
            peak = max(peak, *(num_bytes for prediction in predictions for num_bytes in prediction.peak_bytes))
    except ValueError as error:
        return Candidate(policy=policy, planning=None, reason=str(error))
    return Candidate(policy=policy, planning=planning, step_ns=sum(steps) // len(steps), peak_bytes=peak)
