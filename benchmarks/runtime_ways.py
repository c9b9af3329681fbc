"""Several ways of running training steps on one pair of workers, side by side, in alternating blocks of steps.

`OurWay` runs steps as training does: planned ahead by a planner service on the workers' own cores, proven, received,
loaded and run, each step correcting the costs of later plans. `TorchWay` runs them under torch's schedule.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from benchmarks.torch_pipeline import Padded, Shapes, TorchPipeline
from pipeweaver.calibrate import pack_costs
from pipeweaver.config import Job
from pipeweaver.data.items import Batch
from pipeweaver.model.build import materialise, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import Ahead, Order, Planning
from pipeweaver.runtime.exchange import Exchange, Finish, RunPlan
from pipeweaver.runtime.execution import Loader
from pipeweaver.runtime.join import Membership
from pipeweaver.runtime.orders import Corrections
from pipeweaver.runtime.service import Service
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.runtime.worker import Worker
from pipeweaver.schedule.ir import Measurement, Placement, Plan, Span
from pipeweaver.semu.correct import Factors, rounded
from pipeweaver.semu.costs import SemuCosts

APART = 1000
"""Numbers of orders begin at a multiple of it in every block: more than a block has steps."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a worker knows after a step; the loss of torch's schedule is known to its last stage alone."""

    plan: Plan | None
    spans: tuple[Span, ...]
    loss: float


class Reported(msgspec.Struct, frozen=True):
    """What a worker measured of a step."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A counted step: from the end of the one before, on both workers. No plan under torch's schedule."""

    plan: Plan | None
    step_ns: int
    spans: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A way runs a block of steps before the next has its turn; the first `skipped` of each block, one at least, are not counted: their
    plans are taken as soon as they are asked for, where those of later steps are searched for during the steps before.
    Before anything is counted every way runs `warm` steps."""

    warm: int
    blocks: int
    skipped: int
    counted: int
    microbatches: int

    @property
    def batches(self) -> int:
        return self.blocks * (self.skipped + self.counted)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What all ways have in common on one of the two workers."""

    membership: Membership
    exchange: Exchange
    transport: ProcessTransport
    graph: ModelGraph
    load: Loader
    batches: Sequence[Batch]


class Way(Protocol):
    """`run` yields what became of the steps of these batches, one after the other; orders have numbers from `base` on."""

    def run(self, numbers: Sequence[int], base: int) -> Iterator[Ran]: ...


class OurWay:
    """Steps of a job on a placement. `planning` is what the first worker knows; `opened` ends its planner processes."""

    def __init__(
        self, pair: Pair, job: Job, placement: Placement, planning: Planning | None, opened: ExitStack
    ) -> None:
        self.pair, self.job = pair, job
        self.worker = _worker(pair, job, placement)
        self.corrections = Corrections()
        self.service = opened.enter_context(_service(pair, job, planning)) if planning is not None else None
        self._has_memory = False

    def run(self, numbers: Sequence[int], base: int) -> Iterator[Ran]:
        """Plans are proven and handed out one step ahead by a thread of the first rank, as in training."""
        pair, ahead = self.pair, None
        behind: tuple[int, Order] | None = None  # the last order, whose reports are not there yet
        if self.service is not None:
            cores = pair.membership.helper_cores
            orders = self._orders(self.service, numbers)
            ahead = Ahead(orders, pair.exchange, num_replicas=1, readers=2, first=base, cores=cores)
        for number in range(base, base + len(numbers) + 1):
            message = pair.exchange.receive(number, 0)
            order = ahead.started(number) if ahead is not None else None
            if isinstance(message, Finish):
                break
            assert isinstance(message, RunPlan)
            if not self._has_memory:
                self.worker.reserve(message.plan)
                self._has_memory = True
            result = self.worker.run(message.plan)
            yield Ran(plan=message.plan, spans=result.spans, loss=sum(result.losses.values()))
            pair.exchange.send_report(number, 0, pair.membership.rank, Reported(spans=result.spans))
            if behind is not None:
                self._correct(*behind)
            behind = None if order is None else (number, order)
        if ahead is not None and behind is not None:
            self._correct(*behind)
            ahead.close()

    def _correct(self, number: int, order: Order) -> None:
        """Let what all workers measured of a step correct the costs of plans to come, as training does."""
        reports = [self.pair.exchange.take_report(number, 0, rank, Reported) for rank in range(2)]
        spans = tuple(report.spans for report in reports)
        measurement = Measurement(spans=spans, transfers=(), step_ns=max(of[-1].end_ns for of in spans))
        self.corrections.learn(order, [measurement])

    def _orders(self, service: Service, numbers: Sequence[int]) -> Generator[Order]:
        """Plans of the batches, which the service is told of some orders ahead."""
        told, batches = self.job.planner.ahead + 1, self.pair.batches
        asked: dict[int, Factors] = {}
        for position, number in enumerate(numbers):
            for coming in numbers[:told] if position == 0 else numbers[position + told - 1 : position + told]:
                asked[coming] = rounded(self.corrections.factors)
                service.want(coming, batches[coming], factors=asked[coming])
            yield Order(plans=service.take(number), step=batches[number].step, factors=asked[number])


class TorchWay:
    """Steps of the same batches, padded to one shape, under torch's `Schedule1F1B`."""

    def __init__(self, pair: Pair, pipeline: TorchPipeline, padded: Sequence[Padded], shape: Shapes) -> None:
        self.pair, self.pipeline, self.padded, self.shape = pair, pipeline, padded, shape

    def run(self, numbers: Sequence[int], base: int) -> Iterator[Ran]:
        self.pair.transport.barrier()
        for number in numbers:
            yield Ran(plan=None, spans=(), loss=self.pipeline.step(self.padded[number]))


def compare(ways: Mapping[str, Way], size: Size) -> tuple[dict[str, list[Step]], dict[str, float]]:
    """(counted steps, the loss of the first step of all) of every way over all batches, the order turning from block
    to block."""
    names = list(ways)
    steps: dict[str, list[Step]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    base = 0
    blocks = [range(size.warm)] if size.warm else []
    length = size.skipped + size.counted
    blocks += [range(block * length, (block + 1) * length) for block in range(size.blocks)]
    for turn, numbers in enumerate(blocks):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            base += APART
            ran, loss = _block(ways[name], numbers, base)
            losses.setdefault(name, loss)
            if turn or not size.warm:
                steps[name] += ran[size.skipped - 1 :]
    return steps, losses


def _block(way: Way, numbers: Sequence[int], base: int) -> tuple[list[Step], float]:
    """Run a way on these batches: (all steps but the first, the loss of the first)."""
    ends, results = [], []
    for result in way.run(numbers, base):
        ends.append(time.perf_counter_ns())
        results.append(result)
    # One clock for both, this machine's. A step ends when the later worker's does.
    together = [max(pair) for pair in zip(*gather(ends), strict=True)]
    spans = list(zip(*gather([result.spans for result in results]), strict=True))
    steps = [
        Step(plan=results[i].plan, step_ns=together[i] - together[i - 1], spans=spans[i])
        for i in range(1, len(numbers))
    ]
    return steps, gather(results[0].loss)[1]


def gather(mine):  # type: ignore[no-untyped-def]
    """What both workers have, by rank."""
    both = [None, None]
    dist.all_gather_object(both, mine)
    return both


def _service(pair: Pair, job: Job, planning: Planning) -> Service:
    assert isinstance(planning.costs, SemuCosts)
    setup = prepare.job_setup(job, planning, pack_costs(planning.costs))
    rounds, cores = job.rounds_of(planning.policy), pair.membership.helper_cores
    return Service(planning, setup, rounds=rounds, seconds=job.planner.seconds, cores=cores)


def _worker(pair: Pair, job: Job, placement: Placement) -> Worker:
    device = pair.membership.device
    chunks = [placement.chunks[number] for number in placement.on(pair.membership.address.worker)]
    modules = materialise(pair.graph, chunks, seed=job.run.seed, device=device, dtype=torch.float32)
    return Worker(
        pair.graph,
        modules=modules,
        parameters=named_parameters(pair.graph, modules),
        transport=pair.transport,
        load=pair.load,
        optimizer=job.optimizer,
        seed=job.run.seed,
        device=device,
    )
