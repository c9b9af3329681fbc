"""Train a job: what every worker process does, from joining the others to the last report.

    1. join      rank, device, process group
    2. prepare   model graph, data sets; the first rank: costs, placement, made known to all
    3. build     this worker's layers with parameters, optimizer
    4. run       orders until there are no more: receive a plan, run it, report
    5. report    the first rank puts the reports together, while the next order runs, and tells observers

Only the first rank plans (`ahead.py`) and hears reports (`collect.py`), each on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist

from pipeweaver.config import Job
from pipeweaver.costs import FlatCosts
from pipeweaver.data.dataset import Dataset, load_part
from pipeweaver.data.items import Batch
from pipeweaver.data.loader import Loader
from pipeweaver.model.build import materialise, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.report.metrics import StepMetrics, step_metrics
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Ahead, Order, Planning, plan_batch
from pipeweaver.runtime.collect import Collected, Collector, WorkerReport
from pipeweaver.runtime.evaluate import (
    Evaluation,
    averages,
    evaluation_orders,
    evaluation_plans,
    summed,
    weighted,
)
from pipeweaver.runtime.exchange import Data, Exchange, Failure, Finish, FirstRankFailed, RunPlan, Setup
from pipeweaver.runtime.execution import Loader as Load
from pipeweaver.runtime.join import Membership, join
from pipeweaver.runtime.offsets import clock_offsets
from pipeweaver.runtime.optimizer import learning_rate
from pipeweaver.runtime.recorded import Recorder, load_recorded, read_index, replay
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.runtime.watchdog import Watchdog
from pipeweaver.runtime.worker import Worker
from pipeweaver.schedule.ir import Measurement, Placement, Plan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step: its figures, and what they were taken from, replica by replica."""

    metrics: StepMetrics
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]


Observer = Callable[[StepReport | Evaluation], None]
"""Told on the first rank, in the order of the run, on a thread of its own: it delays nothing but other observers."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to: the last step's figures and the last evaluation, None where there was none."""

    metrics: StepMetrics | None
    evaluation: Evaluation | None


def train(job: Job, observers: Sequence[Observer] = ()) -> Result | None:
    """Run the job as one of its workers; the result on the first rank, None on the others.

    Raises ValueError for what the job, its data or its environment have wrong; WorkerError, FirstRankFailed and
    FirstRankSilent for what happens on the way. After an error the process is of no further use.
    """
    membership = join(job.workers, job.run.device)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    offsets = clock_offsets()
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)
    with exchange.heartbeat() if membership.is_first else nullcontext():
        first = None
        if membership.is_first:
            first = FirstRank(job, exchange, graph, datasets, observers, [offset.ahead_ns for offset in offsets])
        setup = exchange.receive(0, membership.address.replica)
        assert isinstance(setup, Setup)
        if setup.job != prepare.fingerprint(job):
            raise ValueError(f"{job.path} is not the job that the first worker runs; give all hosts the same file")
        loads = {data: partial(load_part, {job.task.name: dataset}) for data, dataset in datasets.items()}
        worker = _build_worker(job, graph, setup.placement, transport, membership, loads["train"])
        try:
            _run_orders(job, worker, exchange, loads, first)
        except FirstRankFailed:
            if first is None or first.ahead.error is None:
                raise
            raise first.ahead.error from None  # the error itself is known here
        result = first.close() if first else None
        transport.barrier()
    transport.close()
    dist.destroy_process_group()
    return result


class FirstRank:
    """What the first rank does beside its own work: it gives the orders and puts the reports together."""

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        graph: ModelGraph,
        datasets: Mapping[Data, Dataset],
        observers: Sequence[Observer],
        ahead_ns: Sequence[int],
    ) -> None:
        self._job = job
        self._observers = observers
        self._weights = {module.name: module.loss.weight for module in graph.modules if module.loss}
        self._evaluating: list[Collected] = []
        self._last_metrics: StepMetrics | None = None
        self._last_evaluation: Evaluation | None = None
        replicas, workers = job.workers.replicas, job.workers.pipeline
        try:
            orders, placement = _planned(job, graph, datasets)
        except Exception as error:
            failure = Failure(error=f"{type(error).__name__}: {error}")
            exchange.publish(0, [failure] * replicas, readers=workers)
            raise
        setup = Setup(job=prepare.fingerprint(job), placement=placement)
        exchange.publish(0, [setup] * replicas, readers=workers)
        folder = job.output / "plans"
        # Plans that are replayed from there are there already.
        replayed_there = job.run.plans and Path(job.run.plans).resolve() == folder.resolve()
        self._recorder = Recorder(folder) if job.run.record_plans and not replayed_there else None
        self._collector = Collector(exchange, self._take, ahead_ns, workers)
        self.ahead = Ahead(orders, exchange, num_replicas=replicas, readers=workers, first=1)

    def started(self, number: int) -> None:
        """All workers turn to order `number`."""
        order = self.ahead.started(number)
        if order is not None:
            self._collector.expect(number, order)

    def close(self) -> Result:
        """When all orders have been run and reported."""
        self._collector.close()
        self.ahead.close()
        if self._recorder is not None:
            self._recorder.close()
        return Result(metrics=self._last_metrics, evaluation=self._last_evaluation)

    def _take(self, collected: Collected) -> None:
        order = collected.order
        if self._recorder is not None:
            self._recorder.write(collected.number, order)
        if order.data == "held-out":
            self._evaluating.append(collected)
            if order.is_last:
                self._last_evaluation = summed(self._evaluating, self._weights)
                self._evaluating = []
                self._tell(self._last_evaluation)
            return
        self._last_metrics = step_metrics(
            order.plans,
            collected.measurements,
            loss=weighted(collected.losses, self._weights),
            learning_rate=learning_rate(self._job.optimizer, order.step, self._job.run.steps),
            gradient_norm=collected.gradient_norm or 0.0,
            reported=averages(collected.metrics),
        )
        self._tell(StepReport(metrics=self._last_metrics, plans=order.plans, measurements=collected.measurements))

    def _tell(self, report: StepReport | Evaluation) -> None:
        for observer in self._observers:
            observer(report)


def _planned(job: Job, graph: ModelGraph, datasets: Mapping[Data, Dataset]) -> tuple[Iterator[Order], Placement]:
    """The run's orders, made when they are asked for, and the placement that they are for."""
    budget_bytes = job.workers.memory_bytes
    if job.run.plans:
        folder = Path(job.run.plans)
        entries = read_index(folder)
        orders = replay(
            folder,
            entries,
            graph,
            num_replicas=job.workers.replicas,
            num_workers=job.workers.pipeline,
            dtype=job.run.dtype,
            budget_bytes=budget_bytes,
        )
        return orders, load_recorded(folder, entries[0])[0].placement
    loader = prepare.job_loader(job, datasets["train"])
    costs = FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})
    planning = prepare.place(job, graph, loader, costs, budget_bytes)
    held_out = prepare.held_out_batches(job, datasets["held-out"]) if "held-out" in datasets else []
    return _orders(job, planning, loader, held_out), planning.placement


def _orders(job: Job, planning: Planning, loader: Loader, held_out: Sequence[Batch]) -> Iterator[Order]:
    steps, every = job.run.steps, job.run.evaluate_every
    evaluation: list[tuple[Plan, ...]] = []
    for batch in islice(loader, steps):
        yield Order(plans=plan_batch(planning, batch), step=batch.step)
        done = batch.step + 1
        if held_out and (done == steps or (every and done % every == 0)):
            evaluation = evaluation or evaluation_plans(planning, held_out)
            yield from evaluation_orders(evaluation, done)


def _build_worker(
    job: Job,
    graph: ModelGraph,
    placement: Placement,
    transport: ProcessTransport,
    membership: Membership,
    load: Load,
) -> Worker:
    dtype = getattr(torch, job.run.dtype)
    chunks = [placement.chunks[number] for number in placement.on(membership.address.worker)]
    modules = materialise(graph, chunks, seed=job.run.seed, device=membership.device, dtype=dtype)
    return Worker(
        graph,
        modules=modules,
        parameters=named_parameters(graph, modules),
        transport=transport,
        load=load,
        optimizer=job.optimizer,
        seed=job.run.seed,
        device=membership.device,
        dtype=dtype,
        watchdog=Watchdog(job.run.watchdog_s),
    )


def _run_orders(
    job: Job, worker: Worker, exchange: Exchange, loads: Mapping[Data, Load], first: FirstRank | None
) -> None:
    """Run the orders of this worker's replica until there are no more."""
    address = worker.transport.address
    turned_ns = time.perf_counter_ns()
    for number in count(1):
        message = exchange.receive(number, address.replica)
        waiting_ns = time.perf_counter_ns() - turned_ns
        if first is not None:
            first.started(number)
        if isinstance(message, Finish):
            return
        assert isinstance(message, RunPlan)
        plan = message.plan
        worker.load = loads[message.data]
        rate = None if plan.forward_only else learning_rate(job.optimizer, plan.step, job.run.steps)
        result = worker.run(plan, learning_rate=rate)
        end_ns = time.perf_counter_ns()
        report = WorkerReport(
            turned_ns=turned_ns,
            waiting_ns=waiting_ns,
            end_ns=end_ns,
            start_ns=result.start_ns,
            spans=result.spans,
            posted_ns=result.posted_ns,
            finished_ns=result.finished_ns,
            losses=result.losses,
            gradient_norm=result.gradient_norm,
            metrics=result.metrics,
            peak_bytes=result.peak_bytes,
        )
        exchange.send_report(number, address.replica, address.worker, report)
        turned_ns = end_ns
