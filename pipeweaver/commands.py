"""What `pipeweaver plan` and `pipeweaver calibrate` do, and what every command checks first.

calibrate_as_worker(job)                         in every worker, at the same time
ready = ready_step(job, step=0, calibrate=...)   in one process; `calibrate` starts those workers if need be
explain_step(ready, ready.plan())                where the bubble of the plans is
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import msgspec
import torch.distributed as dist

from pipeweaver.agreement import check_agreement, check_model
from pipeweaver.calibrate import cached_costs, calibrated_costs, conditions
from pipeweaver.config import AUTO, Job
from pipeweaver.data.dataset import load_part
from pipeweaver.data.items import Batch
from pipeweaver.model.graph import ModelGraph
from pipeweaver.policies.levers import levers
from pipeweaver.report.explain import Explanation, explain, longest_ns
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Planning, plan_batch
from pipeweaver.runtime.compare import Candidate, compare, fastest, place
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.join import choose_device, join
from pipeweaver.runtime.orders import recorded_entries
from pipeweaver.runtime.transport import ProcessTransport, lost_workers_told
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.ir import Plan
from pipeweaver.semu.costs import SemuCosts


def check(job: Job, *, runs_here: bool = True) -> None:
    """What is wrong with the job's model, data or device is told here, once, before any worker starts.

    Scans the data. A job that is not to run here needs none of the devices and packages that it asks for. Raises
    ValueError, one line that begins with the job's file.
    """
    try:
        if runs_here and job.run.tensorboard and find_spec("tensorboard") is None:
            raise ValueError('run.tensorboard = true needs TensorBoard: pip install "pipeweaver[tensorboard]"')
        if runs_here:
            choose_device(job.run.device, 0, int(os.environ.get("LOCAL_WORLD_SIZE", job.workers.total)))
        check_model(job, prepare.job_graph(job))
        datasets = prepare.job_datasets(job)
        if runs_here and job.run.plans:
            recorded_entries(job, tuple(datasets))
        for data, of_tasks in datasets.items():
            for task, dataset in of_tasks.items():
                check_agreement(job, task, dataset)
            prepare.job_loaders(job, of_tasks, data)
    except ValueError as error:
        raise ValueError(f"{job.path}: {str(error).removeprefix(f'{job.path}: ')}") from error


@lost_workers_told()
def calibrate_as_worker(job: Job) -> None:
    """Take part in measuring this machine anew. Blocks until all workers of the job do."""
    membership = join(job.workers, job.run.device, patience_s=job.run.watchdog_s)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    datasets = prepare.job_datasets(job)["train"]
    calibrated_costs(
        prepare.job_graph(job),
        prepare.job_sample(job, prepare.job_loaders(job, datasets)),
        partial(load_part, datasets),
        widths=prepare.job_widths(datasets),
        transport=transport,
        exchange=exchange,
        conditions=conditions(job.workers, membership.device, job.run.dtype),
        device=membership.device,
        cache=job.costs.cache,
        anew=True,
    )
    transport.barrier()
    membership.company.close()
    transport.close()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A step that can be planned: its batch, all else that plans depend on, and what the placement was made from.

    `candidates`, if any, are the two ways to run the job, side by side.
    """

    job: Job
    planning: Planning
    batch: Batch
    sample: Sequence[Batch]
    candidates: tuple[Candidate, ...] = ()

    def plan(self) -> tuple[Plan, ...]:
        """Proven plans of all replicas, as `train` would make them. Raises ValueError if none fits the memory budget."""
        return tuple(map(records, plan_batch(self.planning, self.batch)))


def ready_step(job: Job, step: int, calibrate: Callable[[], None]) -> ReadyStep:
    """Everything to plan the batch of `step`.

    Calls `calibrate` if there are no costs yet that hold here. Raises ValueError if there is no such step, or the policy
    cannot place the model.
    """
    steps = range(step, step + 1)
    tasks = prepare.task_set_of(job, steps).tasks
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)["train"]
    loaders, widths = prepare.job_loaders(job, datasets), prepare.job_widths(datasets)
    of_all = prepare.job_sample(job, loaders)
    costs = _costs(job, graph, of_all, widths)
    if costs is None:
        calibrate()
        costs = _costs(job, graph, of_all, widths)
        assert costs is not None, "calibration leaves what is looked for"
    sample = prepare.job_sample(job, loaders, tasks)
    (batch,) = prepare.step_batches(job, loaders, steps)
    candidates = compare(job, graph, sample, costs, job.workers.memory_bytes)
    planning = next((one.planning for one in candidates if one.policy == job.policy.name), None)
    if planning is None and job.policy.name == AUTO:
        planning = fastest(candidates)
    elif planning is None:
        planning = place(job, graph, sample, costs, job.workers.memory_bytes)
    return ReadyStep(job=job, planning=planning, batch=batch, sample=sample, candidates=candidates)


def explain_step(ready: ReadyStep, plans: Sequence[Plan]) -> Explanation:
    """Where the bubble of these plans is, and what the policy's levers bring: the batch is planned again without each."""
    planning = ready.planning
    found: list[tuple[str, int | None]] = []
    for lever in levers(
        planning.policy,
        planning.graph,
        planning.placement,
        planning.options,
        planning.rounds,
        limited=planning.budget_bytes is not None,
        replicas=planning.num_replicas,
    ):
        try:
            if lever.anew:
                policy = msgspec.structs.replace(ready.job.policy, options=lever.options, rounds=lever.rounds)
                job = msgspec.structs.replace(ready.job, policy=policy)
                other = prepare.place(
                    job, planning.policy, planning.graph, ready.sample, planning.costs, planning.budget_bytes
                )
            else:
                other = replace(planning, options=lever.options, rounds=lever.rounds)
            found.append((lever.name, longest_ns(plan_batch(other, ready.batch))))
        except ValueError:
            found.append((lever.name, None))
    return Explanation(
        bubbles=tuple(explain(plan, planning.costs, planning.budget_bytes) for plan in plans), without=tuple(found)
    )


def _costs(job: Job, graph: ModelGraph, sample: Sequence[Batch], widths: Mapping[str, int]) -> SemuCosts | None:
    device = choose_device(job.run.device, 0, job.workers.total)
    here = conditions(job.workers, device, job.run.dtype)
    return cached_costs(graph, sample, here, job.costs.cache, widths=widths)
