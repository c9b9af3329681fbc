"""The orders of a run in sequence, handed out when they are asked for: planned from batches, or replayed from files.

    steps 0, 1 on training data | evaluation after 2 steps | step 2 | evaluation after 3 steps, the last

The planner service (`service.py`) is told of the batches to come some orders ahead. Where task sets come one after the
other, each has its own placement and service; plans say which placement they are for.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from pipeweaver.calibrate import pack_costs
from pipeweaver.cluster import available_cores
from pipeweaver.config import AUTO, Job
from pipeweaver.data.items import Batch, Sample
from pipeweaver.data.loader import Loader
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Order, Planning
from pipeweaver.runtime.compare import place
from pipeweaver.runtime.exchange import Data
from pipeweaver.runtime.recorded import Entry, load_recorded, read_index, replay
from pipeweaver.runtime.service import Service
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Measurement, Placement
from pipeweaver.semu.correct import Factors, gain, rounded, updated
from pipeweaver.semu.costs import SemuCosts


@dataclass
class Corrections:
    """Factors on the costs (`semu.correct`), from so many `steps`: replaced as a whole by whoever measures, read when
    planning."""

    factors: Factors = field(default_factory=dict)
    steps: int = 0

    def learn(self, order: Order, measurements: Sequence[Measurement]) -> None:
        """From a training step: what was measured of each of its replicas, whose plans were made with `order.factors`."""
        self.factors = updated(self.factors, order.factors, order.records, measurements, gain(self.steps))
        self.steps += 1


def planned_orders(
    job: Job,
    graph: ModelGraph,
    loaders: Mapping[Data, Mapping[str, Loader]],
    costs: SemuCosts,
    corrections: Corrections,
    budget_bytes: int | None,
    cores: Collection[int] = (),
) -> tuple[Generator[Order], Placement]:
    """The run's orders, planned by a service on `cores`, and the placement of the first.

    Every task set has a placement, all made beforehand. Its service is there from the first order of the set before until
    its own last one, or until the generator is closed. Each order is planned with the corrections of the time when it was
    told of; placements know none. Raises ValueError if the policy
    cannot place the model, or the held-out data does not fit the job.
    """
    held_out = {task: list(loader) for task, loader in loaders.get("held-out", {}).items()}
    packed = pack_costs(costs)
    plannings = [
        place(job, graph, prepare.job_sample(job, loaders["train"], task_set.tasks), costs, budget_bytes)
        for task_set in job.task_sets
    ]
    if job.policy.name == AUTO:
        for task_set, planning in zip(job.task_sets, plannings, strict=True):
            print(f"policy {AUTO} takes {planning.policy} for {', '.join(task_set.tasks)}", flush=True)

    def service(planning: Planning) -> Service:
        usable = cores or available_cores()
        return Service(
            planning,
            prepare.job_setup(job, planning, packed),
            processes=_num_processes(job, len(usable)),
            rounds=job.rounds_of(planning.policy),
            seconds=job.planner.seconds,
            cores=cores,
        )

    def orders() -> Generator[Order]:
        step = 0
        with ExitStack() as opened:
            coming = opened.enter_context(service(plannings[0]))
            for number, task_set in enumerate(job.task_sets):
                with opened.pop_all():
                    current = coming
                    # Processes take seconds to start: those of the next set do so beside this one.
                    if number + 1 < len(plannings):
                        coming = opened.enter_context(service(plannings[number + 1]))
                    batches = TaskBatches({task: loaders["train"][task] for task in task_set.tasks}, step)
                    evaluated = prepare.joined_rounds([held_out[task] for task in task_set.tasks if task in held_out])
                    yield from _planned(job, current, corrections, batches, task_set.steps, evaluated)
                step += task_set.steps

    return orders(), plannings[0].placement


def _num_processes(job: Job, cores: int) -> int:
    """Planner processes: as set, one per core at most; by default half the cores at most, and no more than there are plans
    to be made at a time."""
    if job.planner.processes is not None:
        return min(job.planner.processes, len(available_cores()))
    return max(1, min(cores // 2, job.workers.replicas * (job.planner.ahead + 1)))


def replayed_orders(
    job: Job, graph: ModelGraph, loaders: Mapping[Data, Mapping[str, Loader]], budget_bytes: int | None
) -> tuple[Generator[Order], Placement]:
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
        task_set_at=job.task_set_at,
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


@dataclass(frozen=True, kw_only=True)
class _Told:
    """An order to come. `number` is what its plans are wanted as; those of an evaluation serve the later ones."""

    number: int
    batch: Batch
    step: int
    data: Data = "train"
    is_last: bool = True


def _planned(
    job: Job,
    service: Service,
    corrections: Corrections,
    batches: TaskBatches,
    steps: int,
    held_out: Sequence[Batch],
) -> Generator[Order]:
    """The orders of one task set: its steps, and evaluations between them."""
    told: deque[_Told] = deque()
    to_tell = _to_tell(job, batches, steps, held_out, told)
    evaluated: dict[int, tuple[FlatPlan, ...]] = {}
    asked: dict[int, Factors] = {}  # what corrected the costs of an order
    while True:
        while len(told) <= job.planner.ahead and (one := next(to_tell, None)) is not None:
            first_time = one.number not in evaluated and all(other.number != one.number for other in told)
            told.append(one)
            if first_time:
                forward_only, asked[one.number] = one.data == "held-out", rounded(corrections.factors)
                service.want(one.number, one.batch, forward_only=forward_only, factors=asked[one.number])
        if not told:
            return
        one = told.popleft()
        plans = evaluated.get(one.number) or service.take(one.number)
        if one.data == "train":
            next(batches)  # the position in the data is behind what was handed out, not behind what is planned
        else:
            evaluated[one.number] = plans
        factors = asked.pop(one.number, {})
        yield Order(plans=plans, step=one.step, data=one.data, is_last=one.is_last, factors=factors)


def _to_tell(
    job: Job, batches: TaskBatches, steps: int, held_out: Sequence[Batch], told: Collection[_Told]
) -> Iterator[_Told]:
    """All orders of a task set. `told` are those that the data still stands before."""
    every = job.run.evaluate_every
    numbers = count()
    evaluation = [next(numbers) for _ in held_out]
    for _ in range(steps):
        batch = batches.peek(sum(one.data == "train" for one in told))
        if batch is None:
            return
        yield _Told(number=next(numbers), batch=batch, step=batch.step)
        done = batch.step + 1
        if held_out and (done == job.run.steps or (every and done % every == 0)):
            for number, held in zip(evaluation, held_out, strict=True):
                yield _Told(number=number, batch=held, step=done, data="held-out", is_last=number == evaluation[-1])
