"""What `pipeweaver calibrate` and `pipeweaver plan` do.

calibrate_as_worker(job)                         in every worker, at the same time
plans = plan_step(job, step=0, calibrate=...)    in one process; `calibrate` starts those workers if need be
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch.distributed as dist

from pipeweaver.calibrate import cached_costs, calibrated_costs, conditions
from pipeweaver.config import Job
from pipeweaver.costs import Costs
from pipeweaver.data.dataset import load_part
from pipeweaver.data.loader import Loader
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import plan_batch
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.join import choose_device, join
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.schedule.ir import Plan


def calibrate_as_worker(job: Job) -> None:
    """Take part in measuring this machine anew. Blocks until all workers of the job do."""
    membership = join(job.workers, job.run.device)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    dataset = prepare.job_datasets(job)["train"]
    calibrated_costs(
        prepare.job_graph(job),
        prepare.sample_batches(prepare.job_loader(job, dataset)),
        partial(load_part, {job.task.name: dataset}),
        transport=transport,
        exchange=exchange,
        conditions=conditions(job.workers, membership.device, job.run.dtype),
        device=membership.device,
        cache=job.costs.cache,
        anew=True,
    )
    transport.barrier()
    transport.close()
    dist.destroy_process_group()


def plan_step(job: Job, step: int, calibrate: Callable[[], None]) -> tuple[Plan, ...]:
    """Proven plans of all replicas for the batch of `step`, as `train` would make them.

    Calls `calibrate` if there are no costs yet that hold here. Raises ValueError if the policy cannot place the
    model or finds no plan within the memory budget.
    """
    graph = prepare.job_graph(job)
    loader = prepare.job_loader(job, prepare.job_datasets(job)["train"])
    costs = _costs(job, graph, loader)
    if costs is None:
        calibrate()
        costs = _costs(job, graph, loader)
        assert costs is not None, "calibration leaves what is looked for"
    planning = prepare.place(job, graph, loader, costs, job.workers.memory_bytes)
    return plan_batch(planning, next(islice(loader, step, None)))


def _costs(job: Job, graph: ModelGraph, loader: Loader) -> Costs | None:
    device = choose_device(job.run.device, 0, job.workers.total)
    return cached_costs(
        graph, prepare.sample_batches(loader), conditions(job.workers, device, job.run.dtype), job.costs.cache
    )
