"""The orders of a run in sequence, made when they are asked for: planned from batches, or replayed from files.

steps 0, 1 on training data | evaluation after 2 steps | step 2 | evaluation after 3 steps, the last
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from pipeweaver.config import Job
from pipeweaver.data.items import Batch, Sample
from pipeweaver.data.loader import Loader
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.graph import ModelGraph
from pipeweaver.profile.table import TableCosts
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Order, Planning, plan_batch
from pipeweaver.runtime.evaluate import evaluation_orders
from pipeweaver.runtime.exchange import Data
from pipeweaver.runtime.recorded import Entry, load_recorded, read_index, replay
from pipeweaver.schedule.ir import Placement, Plan


@dataclass
class Corrections:
    """Factors on the costs by module (`profile.correct`): replaced as a whole by whoever measures, read when planning."""

    factors: Mapping[str, float] = field(default_factory=dict)


def planned_orders(
    job: Job,
    graph: ModelGraph,
    loaders: Mapping[Data, Mapping[str, Loader]],
    costs: TableCosts,
    corrections: Corrections,
    budget_bytes: int | None,
) -> tuple[Iterator[Order], Placement]:
    """The run's orders, each planned when it is asked for, and the placement that they are for.

    Each is planned with the corrections of that time; the placement knows none. Raises ValueError if the policy
    cannot place the model, or the held-out data does not fit the job.
    """
    planning = prepare.place(job, graph, prepare.job_sample(job, loaders["train"]), costs, budget_bytes)
    evaluated = prepare.held_out_batches(loaders.get("held-out", {}))

    def corrected() -> Planning:
        factors = corrections.factors
        return replace(planning, costs=costs.corrected(factors)) if factors else planning

    return _planned(job, corrected, TaskBatches(loaders["train"]), evaluated), planning.placement


def replayed_orders(
    job: Job, graph: ModelGraph, loaders: Mapping[Data, Mapping[str, Loader]], budget_bytes: int | None
) -> tuple[Iterator[Order], Placement]:
    """The recorded orders of `job.run.plans` up to its last step, each proven again when it is asked for, and their
    placement. `loaders` of each task say what the job's data is.

    Raises ValueError if there are none, or they are for another job.
    """
    folder = Path(job.run.plans)
    entries = recorded_entries(job, tuple(loaders))

    def sample(data: Data, record: int, task: str, draw: int) -> Sample:
        fitted = loaders[data][task].fitted if task in loaders[data] else None
        if fitted is None or not 0 <= record < (fitted.dataset.num_records or record + 1):
            raise ValueError(f"the job's data has no record {record} of task {task}")
        return fitted.sample(record, task=task, draw=draw)

    orders = replay(
        folder,
        entries,
        graph,
        sample=sample,
        num_replicas=job.workers.replicas,
        num_workers=job.workers.pipeline,
        dtype=job.run.dtype,
        budget_bytes=budget_bytes,
    )
    return orders, load_recorded(folder, entries[0])[0].placement


def recorded_entries(job: Job, datas: Collection[Data]) -> list[Entry]:
    """What is replayed for a job that has these `datas`: its own number of steps, and evaluations between them.

    Warns if there are fewer. Raises ValueError if there is nothing to replay.
    """
    folder = Path(job.run.plans)
    entries = [
        e for e in read_index(folder) if (e.step < job.run.steps if e.data == "train" else e.step <= job.run.steps)
    ]
    steps = sum(entry.data == "train" for entry in entries)
    if not steps:
        raise ValueError(f"{folder} holds no plan of a training step")
    if any(entry.data not in datas for entry in entries):
        raise ValueError(f"{folder} holds plans for held-out data, which the job has not")
    if steps < job.run.steps:
        warnings.warn(f"{folder} holds {steps} steps, so the run ends before run.steps = {job.run.steps}", stacklevel=2)
    return entries


def _planned(
    job: Job, planning: Callable[[], Planning], batches: TaskBatches, held_out: Sequence[Batch]
) -> Iterator[Order]:
    steps, every = job.run.steps, job.run.evaluate_every
    evaluated: list[tuple[Plan, ...]] = []
    for batch in islice(batches, steps):
        yield Order(plans=plan_batch(planning(), batch), step=batch.step)
        done = batch.step + 1
        if held_out and (done == steps or (every and done % every == 0)):
            yield from evaluation_orders(planning(), held_out, evaluated, done)
