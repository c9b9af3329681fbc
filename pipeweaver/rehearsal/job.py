"""Rehearse a job: its own plans, batches, workers and policy, on a machine that need not be here."""

from __future__ import annotations

from pipeweaver.config import Job
from pipeweaver.rehearsal.rehearse import Case, Rehearsed, rehearse
from pipeweaver.semu.estimate import emulated_plans


def rehearse_job(job: Job, machine: str, *, tensor_parallel: int, steps: range) -> Rehearsed:
    """Some steps of a job with the times of a machine. Raises as `semu.estimate.estimate` and `rehearse` do."""
    graph, costs, plans = emulated_plans(job, machine, tensor_parallel=tensor_parallel, steps=steps)
    case = Case(name=costs.source, graph=graph, steps=plans, dtype=job.run.dtype)
    return rehearse([case], watchdog_s=job.run.watchdog_s)[0]
