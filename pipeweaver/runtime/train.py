"""Train a job: what every worker process does, from joining the others to the last report.

    1. join      rank, device, process group
    2. prepare   model graph, data sets; the first rank: costs, placement, made known to all
    3. build     this worker's layers with parameters, optimizer
    4. run       orders until there are no more: receive a plan, run it, report
    5. report    the first rank puts the reports together, while the next order runs, and tells observers

Only the first rank hands out plans (`ahead.py`), which processes of their own make (`service.py`), and hears reports
(`collect.py`), each on a thread of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from pipeweaver.calibrate import calibrated_costs, conditions
from pipeweaver.config import Job
from pipeweaver.data.dataset import load_part
from pipeweaver.data.loader import Loader
from pipeweaver.model.build import materialise, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.report.metrics import StepMetrics, step_metrics
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Ahead, Order
from pipeweaver.runtime.collect import Collected, Collector, WorkerReport
from pipeweaver.runtime.evaluate import Evaluation, averages, summed, weighted
from pipeweaver.runtime.exchange import Data, Exchange, Failure, Finish, FirstRankFailed, RunPlan, Setup
from pipeweaver.runtime.execution import Loader as Load
from pipeweaver.runtime.join import join
from pipeweaver.runtime.offsets import clock_offsets
from pipeweaver.runtime.optimizer import learning_rate
from pipeweaver.runtime.orders import Corrections, planned_orders, replayed_orders
from pipeweaver.runtime.process import exit_code, in_words
from pipeweaver.runtime.recorded import Recorder
from pipeweaver.runtime.relocate import homes_of, relocate, relocation
from pipeweaver.runtime.transport import ProcessTransport, lost_workers_told
from pipeweaver.runtime.watchdog import Watchdog, watched
from pipeweaver.runtime.worker import Worker
from pipeweaver.schedule.ir import Measurement, Placement, Plan
from pipeweaver.semu.correct import uncorrected_ns
from pipeweaver.semu.costs import SemuCosts


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step: its figures, and what they were taken from, replica by replica."""

    metrics: StepMetrics
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]


Observer = Callable[[StepReport | Evaluation], None]
"""Told on the first rank, in the order of the run, on a thread of its own: it holds up no worker, but does take the
first one's time."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to: the last step's figures and the last evaluation, None where there was none."""

    metrics: StepMetrics | None
    evaluation: Evaluation | None


@lost_workers_told()
def train(job: Job, observers: Sequence[Observer] = ()) -> Result | None:
    """Run the job as one of its workers; the result on the first rank, None on the others.

    Raises ValueError for what the job, its data or its environment have wrong; RunErrors, such as WorkerError and
    FirstRankFailed, for what happens on the way. After an error the process is of no further use.
    """
    membership = join(job.workers, job.run.device, patience_s=job.run.watchdog_s)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    budget_bytes = _budget_bytes(job, membership.device)
    offsets = clock_offsets()
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)
    loads = {data: partial(load_part, of_tasks) for data, of_tasks in datasets.items()}
    with exchange.heartbeat() if membership.is_first else nullcontext():
        loaders = {data: prepare.job_loaders(job, of_tasks, data) for data, of_tasks in datasets.items()}
        widths = prepare.job_widths(datasets["train"])
        costs = None
        if not job.run.plans:
            costs = _costs(job, graph, loaders["train"], loads["train"], widths, transport, exchange)
        first = None
        if membership.is_first:
            corrections = Corrections()
            with _failure_told(job, exchange):
                if costs is None:
                    orders, placement = replayed_orders(job, graph, loaders, budget_bytes)
                else:
                    orders, placement = planned_orders(
                        job, graph, loaders, costs, corrections, budget_bytes, membership.helper_cores
                    )
                    print(f"costs: {costs.source}; {costs.coverage}", flush=True)
            _publish(job, exchange, Setup(job=prepare.fingerprint(job), placement=placement))
            ahead_ns, cores = [offset.ahead_ns for offset in offsets], membership.helper_cores
            first = FirstRank(job, exchange, graph, orders, corrections, observers, ahead_ns, cores)
        setup = exchange.receive(0, membership.address.replica)
        assert isinstance(setup, Setup)
        if setup.job != prepare.fingerprint(job):
            raise ValueError(f"{job.path} is not the job that the first worker runs; give all hosts the same file")
        watchdog = Watchdog(job.run.watchdog_s)
        worker = _build_worker(job, graph, setup.placement, transport, loads["train"], watchdog)
        # The first step begins when all can, and have its plan: it is measured like every other.
        exchange.wait(1, membership.address.replica, _late if first else None)
        transport.barrier()
        membership.company.close()
        try:
            _run_orders(job, worker, setup.placement, exchange, loads, first)
        except FirstRankFailed:
            if first is None or first.error is None:
                raise
            first.close()  # what was run before is reported
            raise first.error from None
        result = first.close() if first else None
        with watched(watchdog, "waiting for the other workers to finish"):
            transport.barrier()
    watchdog.close()
    transport.close()
    dist.destroy_process_group()
    return result


class FirstRank:
    """What the first rank does beside its own work: it gives the orders and puts the reports together.

    It hands out plans on one thread (`ahead.py`) and collects reports on another (`collect.py`), both on `cores` if given.
    """

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        graph: ModelGraph,
        orders: Generator[Order],
        corrections: Corrections,
        observers: Sequence[Observer],
        ahead_ns: Sequence[int],
        cores: Collection[int],
    ) -> None:
        self._job = job
        self._corrections = corrections
        self._observers = observers
        self._weights = {
            f"{task}/{module.name}": module.loss.weight_in(task)
            for module in graph.modules
            if module.loss is not None
            for task in job.tasks
        }
        self._evaluating: list[Collected] = []
        self._last_metrics: StepMetrics | None = None
        self._last_evaluation: Evaluation | None = None
        folder = job.output / "plans"
        # Plans that are replayed from there are there already.
        replayed_there = job.run.plans and Path(job.run.plans).resolve() == folder.resolve()
        self._recorder = Recorder(folder) if job.run.record_plans and not replayed_there else None
        replicas, workers = job.workers.replicas, job.workers.pipeline
        self._collector = Collector(exchange, self._take, ahead_ns, workers, cores)
        self._ahead = Ahead(orders, exchange, num_replicas=replicas, readers=workers, first=1, cores=cores)

    @property
    def error(self) -> Exception | None:
        """What ended planning before its time."""
        return self._ahead.error

    def started(self, number: int) -> None:
        """All workers turn to order `number`."""
        order = self._ahead.started(number)
        if order is not None:
            self._collector.expect(number, order)

    def close(self) -> Result:
        """When all orders have been run and reported."""
        self._collector.close()
        self._ahead.close()
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
            order.records,
            collected.measurements,
            switching_ns=collected.switching_ns,
            loss=weighted(collected.losses, self._weights),
            learning_rate=learning_rate(self._job.optimizer, order.step, self._job.run.steps),
            gradient_norm=collected.gradient_norm,
            losses=collected.losses,
            reported=averages(collected.metrics),
            uncorrected_step_ns=uncorrected_ns(order.records, order.factors) if self._job.costs.correct else None,
            corrections=order.factors,
        )
        if self._job.costs.correct:
            self._corrections.learn(order, collected.measurements)
        self._tell(StepReport(metrics=self._last_metrics, plans=order.records, measurements=collected.measurements))

    def _tell(self, report: StepReport | Evaluation) -> None:
        for observer in self._observers:
            observer(report)


@contextmanager
def _failure_told(job: Job, exchange: Exchange) -> Iterator[None]:
    """What goes wrong on the first rank before the first order ends the others too."""
    try:
        yield
    except Exception as error:
        _publish(job, exchange, Failure(error=in_words(error), code=exit_code(error)))
        raise


def _publish(job: Job, exchange: Exchange, message: Setup | Failure) -> None:
    exchange.publish(0, [message] * job.workers.replicas, readers=job.workers.pipeline)


def _budget_bytes(job: Job, device: torch.device) -> int | None:
    """What a worker may hold: by the job, else what is free on its GPU now, else no limit."""
    if job.workers.memory_bytes is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return job.workers.memory_bytes


def _costs(
    job: Job,
    graph: ModelGraph,
    loaders: Mapping[str, Loader],
    load: Load,
    widths: Mapping[str, int],
    transport: ProcessTransport,
    exchange: Exchange,
) -> SemuCosts | None:
    """Costs on the first rank; all workers measure them together if that was not done before."""
    return calibrated_costs(
        graph,
        prepare.job_sample(job, loaders),
        load,
        widths=widths,
        transport=transport,
        exchange=exchange,
        conditions=conditions(job.workers, transport.device, job.run.dtype),
        device=transport.device,
        cache=job.costs.cache,
    )


def _build_worker(
    job: Job, graph: ModelGraph, placement: Placement, transport: ProcessTransport, load: Load, watchdog: Watchdog
) -> Worker:
    dtype = getattr(torch, job.run.dtype)
    chunks = [placement.chunks[number] for number in placement.on(transport.address.worker)]
    modules = materialise(graph, chunks, seed=job.run.seed, device=transport.device, dtype=dtype)
    return Worker(
        graph,
        modules=modules,
        parameters=named_parameters(graph, modules),
        transport=transport,
        load=load,
        optimizer=job.optimizer,
        seed=job.run.seed,
        device=transport.device,
        dtype=dtype,
        watchdog=watchdog,
    )


def _run_orders(
    job: Job,
    worker: Worker,
    placement: Placement,
    exchange: Exchange,
    loads: Mapping[Data, Load],
    first: FirstRank | None,
) -> None:
    """Run the orders of this worker's replica until there are no more; it holds what is on it in `placement`."""
    address = worker.transport.address
    homes = homes_of(worker.graph, placement)
    turned_ns = time.perf_counter_ns()
    for number in count(1):
        message = exchange.receive(number, address.replica, _late if first else None)
        plan = message.plan if isinstance(message, RunPlan) else None  # made of the message here
        waiting_ns = time.perf_counter_ns() - turned_ns
        if first is not None:
            first.started(number)
        if isinstance(message, Finish):
            return
        assert isinstance(message, RunPlan) and plan is not None
        switching_ns = 0
        if plan.placement != placement:  # another task set
            placement, start_ns = plan.placement, time.perf_counter_ns()
            with watched(worker.watchdog, f"moving parameters for the tasks of step {plan.step}"):
                homes, moves = relocation(worker.graph, homes, placement)
                relocate(worker, homes, moves, placement)
            switching_ns = time.perf_counter_ns() - start_ns
            turned_ns += switching_ns
        worker.load = loads[message.data]
        if number == 1:
            worker.reserve(plan)
        rate = None if plan.forward_only else learning_rate(job.optimizer, plan.step, job.run.steps)
        result = worker.run(plan, learning_rate=rate)
        end_ns = time.perf_counter_ns()
        report = WorkerReport(
            turned_ns=turned_ns,
            waiting_ns=waiting_ns,
            switching_ns=switching_ns,
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


def _late(seconds: float) -> None:
    print(f"still planning: all workers have waited {seconds:.0f} s for the next plan", file=sys.stderr, flush=True)
