"""How fast and how predictable is a real training step: two workers, one core and one thread each.

    python -m benchmarks.runtime [--quick]

Three ways run the same batches of `runtime.toml` with the same initial parameters, in alternating blocks of
steps: our `dynamic` policy; our `1f1b` on the contiguous split that emulates fastest on this mix; and torch's
`Schedule1F1B` (torch_pipeline.py). Our steps are timed from optimizer end to optimizer end, planning ahead by the
planner service on the same two cores, receipt of the plan and loading included; for torch neither loading nor padding
is timed. A few steps of each way go before, uncounted. Every step corrects the costs of later plans, as in training.
Figures are medians of ratios between the same step of two ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.torch_pipeline import TorchPipeline, pad, padding_flops_share, shapes, torch_layers
from pipeweaver.calibrate import calibrated_costs, conditions, pack_costs
from pipeweaver.config import Job, load
from pipeweaver.costs import Costs
from pipeweaver.data.dataset import Dataset, load_part
from pipeweaver.data.items import Batch
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.build import materialise, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig
from pipeweaver.planner.assign import single_share
from pipeweaver.policies import POLICIES
from pipeweaver.report.metrics import padding_share
from pipeweaver.runtime import prepare, process
from pipeweaver.runtime.ahead import Ahead, Order, Planning, plan_batch, predicted_ns
from pipeweaver.runtime.exchange import Exchange, Finish, RunPlan
from pipeweaver.runtime.join import Membership, join
from pipeweaver.runtime.launch import launch
from pipeweaver.runtime.orders import Corrections
from pipeweaver.runtime.planner_messages import JobSetup
from pipeweaver.runtime.service import Service
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.runtime.worker import Worker
from pipeweaver.schedule.emulate import emulate
from pipeweaver.schedule.ir import Chunk, Compute, Measurement, Placement, Plan, Span
from pipeweaver.semu.correct import Factors, rounded
from pipeweaver.semu.costs import SemuCosts

TASK = "main"
CONFIG = Path(__file__).with_name("runtime.toml")
FULL, QUICK = (5, 5, 8), (1, 2, 4)
"""(blocks, steps in a block, microbatches): a way runs a block before the next has its turn; the first step is not counted."""
WARM_STEPS = 5
"""Steps of each way before anything is counted: planner processes load what they need, costs are corrected."""
SAMPLE = 8
"""Batches that static splits are compared on."""


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


def main() -> None:
    if process.is_worker():
        process.tie_to_parent()
        process.run_worker(lambda: work(Path(sys.argv[1]), *map(int, sys.argv[2:])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small step of each way, within a minute")
    chosen = QUICK if parser.parse_args().quick else FULL
    cores = machine.cores(2)
    before = machine.probe(cores)
    machine.report("start", before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        code = launch([sys.executable, "-m", "benchmarks.runtime", str(path), *map(str, chosen)], num_workers=2)
        if code:
            sys.exit(code)
        figures = json.loads(path.read_text())
    after = machine.probe(cores)
    machine.report("end", after)
    show(figures)
    machine.exit_if_busy(before, after)
    print(json.dumps(figures))


def work(path: Path, blocks: int, size: int, microbatches: int) -> None:
    """What each of the two workers does; the first writes the figures."""
    job = load(CONFIG, [f"tasks.{TASK}.microbatches={microbatches}"])
    membership = join(job.workers, job.run.device)
    torch.set_num_threads(1)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)["train"]
    batches = list(islice(TaskBatches(prepare.job_loaders(job, datasets)), blocks * size))
    load_items = partial(load_part, datasets)
    with exchange.heartbeat():
        costs = calibrated_costs(
            graph,
            batches[:SAMPLE],
            load_items,
            widths=prepare.job_widths(datasets),
            transport=transport,
            exchange=exchange,
            conditions=conditions(job.workers, membership.device, job.run.dtype),
            device=membership.device,
            cache=job.costs.cache,
        )
        membership.company.close()  # from here on only steps are running
        comparison = Comparison(job, membership, exchange, transport, datasets, batches, blocks, costs)
        with ExitStack() as opened:
            comparison.run(opened)
    if membership.is_first:
        path.write_text(json.dumps(figures(comparison)))
    transport.close()


class Comparison:
    """All ways of running a step, side by side in one pair of processes."""

    def __init__(
        self, job: Job, membership: Membership, exchange: Exchange, transport: ProcessTransport, datasets: Mapping[str, Dataset],
        batches: Sequence[Batch], num_blocks: int, costs: SemuCosts | None,
    ) -> None:  # fmt: skip
        self.job, self.membership, self.exchange, self.transport = job, membership, exchange, transport
        self.batches = batches
        self.num_blocks = num_blocks
        self.costs = costs
        self.corrections: dict[str, Corrections] = defaultdict(Corrections)
        graph = prepare.job_graph(job)
        self.load = partial(load_part, datasets)
        self.planning: dict[str, Planning] = {}
        self.services: dict[str, Service] = {}
        if costs is not None:
            shares = [single_share(graph, batch) for batch in batches[:SAMPLE]]
            dynamic = POLICIES["dynamic"].place(graph, 2, costs, shares, job.policy.options)
            static = best_split(job, graph, costs, batches[:SAMPLE])
            self.planning = {
                "dynamic": planning(job, graph, costs, "dynamic", dynamic),
                "1f1b": planning(job, graph, costs, "1f1b", static),
            }
        placements = [{name: way.placement for name, way in self.planning.items()}]
        dist.broadcast_object_list(placements)
        self.workers = {name: self._worker(graph, placement) for name, placement in placements[0].items()}
        vision, language = job.modules["vision"], job.modules["language"]
        assert isinstance(vision, VitConfig) and isinstance(language, LanguageConfig)
        self.shape = shapes(batches, job.tasks[TASK].tokens_per_microbatch)
        self.padded = [pad(batch, self.load, self.shape, vision.merge) for batch in batches]
        self.torch = TorchPipeline(
            membership.rank,
            torch_layers(graph, membership.rank, job.run.seed),
            self.shape,
            job.tasks[TASK].microbatches,
            self.padded[0],
            language.hidden,
            language.vocab,
            job.optimizer,
        )
        self.measured: dict[str, list[Step]] = {name: [] for name in (*self.workers, "torch")}
        self.losses: dict[str, float] = {}
        self._blocks = 0

    def run(self, opened: ExitStack) -> None:
        """Every way over all batches in blocks, the order turning from block to block; `opened` ends planner processes."""
        self.services = {way: opened.enter_context(self._service(chosen)) for way, chosen in self.planning.items()}
        ways = [*self.workers, "torch"]
        size = len(self.batches) // self.num_blocks
        if self.num_blocks > 1:
            for way in ways:
                self._block(way, range(WARM_STEPS))
        for block in range(self.num_blocks):
            turn = block % len(ways)
            for way in ways[turn:] + ways[:turn]:
                self.measured[way] += self._block(way, range(block * size, (block + 1) * size))

    def _correct(self, way: str, number: int, order: Order) -> None:
        """Let what all workers measured of a step correct the costs of plans to come, as training does."""
        reports = [self.exchange.take_report(number, 0, rank, Reported) for rank in range(2)]
        spans = tuple(report.spans for report in reports)
        measurement = Measurement(spans=spans, transfers=(), step_ns=max(of[-1].end_ns for of in spans))
        self.corrections[way].learn(order, [measurement])

    def _service(self, planning: Planning) -> Service:
        assert self.costs is not None
        setup = JobSetup(
            path=self.job.path,
            overrides=self.job.overrides,
            fingerprint=prepare.fingerprint(self.job),
            policy=planning.policy,
            placement=planning.placement,
            budget_bytes=None,
            costs=pack_costs(self.costs),
        )
        return Service(planning, setup, seconds=self.job.planner.seconds, cores=self.membership.helper_cores)

    def _worker(self, graph: ModelGraph, placement: Placement) -> Worker:
        job, device = self.job, self.membership.device
        chunks = [placement.chunks[number] for number in placement.on(self.membership.address.worker)]
        modules = materialise(graph, chunks, seed=job.run.seed, device=device, dtype=torch.float32)
        return Worker(
            graph,
            modules=modules,
            parameters=named_parameters(graph, modules),
            transport=self.transport,
            load=self.load,
            optimizer=job.optimizer,
            seed=job.run.seed,
            device=device,
        )

    def _block(self, way: str, numbers: Sequence[int]) -> list[Step]:
        """Run a way on these batches. All steps but the first: that one finds its plan ready, which is not typical."""
        self._blocks += 1
        ends, results = [], []
        for result in self._torch_block(numbers) if way == "torch" else self._our_block(way, numbers):
            ends.append(time.perf_counter_ns())
            results.append(result)
        # One clock for both, this machine's. A step ends when the later worker's does.
        together = [max(pair) for pair in zip(*_gather(ends), strict=True)]
        spans = list(zip(*_gather([result.spans for result in results]), strict=True))
        if way not in self.losses:
            self.losses[way] = _gather(results[0].loss)[1]
        return [
            Step(plan=results[i].plan, step_ns=together[i] - together[i - 1], spans=spans[i])
            for i in range(1, len(numbers))
        ]

    def _our_block(self, way: str, numbers: Sequence[int]) -> Iterator[Ran]:
        """Plans are proven and handed out one step ahead by a thread of the first rank, as in training."""
        worker, base = self.workers[way], self._blocks * 1000
        ahead, behind = None, None  # the orders to come, and the last one, whose reports are not there yet
        if self.membership.is_first:
            cores = self.membership.helper_cores
            orders = self._orders(way, numbers)
            ahead = Ahead(orders, self.exchange, num_replicas=1, readers=2, first=base, cores=cores)
        for number in range(base, base + len(numbers) + 1):
            message = self.exchange.receive(number, 0)
            order = ahead.started(number) if ahead is not None else None
            if isinstance(message, Finish):
                break
            assert isinstance(message, RunPlan)
            if (self._blocks, number) == (1, base):
                worker.reserve(message.plan)
            result = worker.run(message.plan)
            yield Ran(plan=message.plan, spans=result.spans, loss=sum(result.losses.values()))
            self.exchange.send_report(number, 0, self.membership.rank, Reported(spans=result.spans))
            if behind is not None:
                self._correct(way, *behind)
            behind = None if order is None else (number, order)
        if ahead is not None and behind is not None:
            self._correct(way, *behind)
            ahead.close()

    def _orders(self, way: str, numbers: Sequence[int]) -> Generator[Order]:
        """Plans of the batches, which the service is told of some orders ahead."""
        service, told = self.services[way], self.job.planner.ahead + 1
        asked: dict[int, Factors] = {}
        for position, number in enumerate(numbers):
            for coming in numbers[:told] if position == 0 else numbers[position + told - 1 : position + told]:
                asked[coming] = rounded(self.corrections[way].factors)
                service.want(coming, self.batches[coming], factors=asked[coming])
            yield Order(plans=service.take(number), step=self.batches[number].step, factors=asked[number])

    def _torch_block(self, numbers: Sequence[int]) -> Iterator[Ran]:
        self.transport.barrier()
        for number in numbers:
            yield Ran(plan=None, spans=(), loss=self.torch.step(self.padded[number]))


def _gather(mine):  # type: ignore[no-untyped-def]
    """What both workers have, by rank."""
    both = [None, None]
    dist.all_gather_object(both, mine)
    return both


def planning(job: Job, graph: ModelGraph, costs: Costs, policy: str, placement: Placement) -> Planning:
    return prepare.planning(job, policy, graph, placement, costs, None)


def best_split(job: Job, graph: ModelGraph, costs: Costs, batches: Sequence[Batch]) -> Placement:
    """Of all contiguous splits of the two modules over two workers, the one with the shortest emulated steps."""
    total = sum(len(module.layers) for module in graph.modules)

    def mean_ns(first: int) -> float:
        way = planning(job, graph, costs, "1f1b", contiguous(graph, first))
        return statistics.fmean(predicted_ns(plan_batch(way, batch)) for batch in batches)

    return contiguous(graph, min(range(1, total), key=mean_ns))


def contiguous(graph: ModelGraph, first: int) -> Placement:
    """`first` of all layers, one module after the other, on worker 0, the rest on worker 1."""
    chunks, left = [], first
    for module in graph.modules:
        size = len(module.layers)
        cut = min(left, size)
        left -= cut
        for worker, (start, stop) in enumerate(((0, cut), (cut, size))):
            if start < stop:
                chunks.append(Chunk(task="main", module=module.name, start=start, stop=stop, worker=worker))
    return Placement(workers=2, chunks=tuple(chunks))


def emulated_ns(step: Step) -> int:
    """The step emulated again, its stages taking as long as they were measured, all else as predicted."""
    assert step.plan is not None
    actions = tuple(
        tuple(
            msgspec.structs.replace(action, duration_ns=span.end_ns - span.start_ns)
            if isinstance(action, Compute)
            else action
            for action, span in zip(listed, spans, strict=True)
        )
        for listed, spans in zip(step.plan.actions, step.spans, strict=True)
    )
    (timeline,) = emulate([msgspec.structs.replace(step.plan, actions=actions)], "none")
    return max(spans[-1].end_ns for spans in timeline.spans)


def figures(comparison: Comparison) -> dict[str, object]:
    ours, static, theirs = (comparison.measured[way] for way in ("dynamic", "1f1b", "torch"))
    losses, graph = comparison.losses, prepare.job_graph(comparison.job)
    for loss in losses.values():
        assert abs(loss - losses["dynamic"]) < 1e-3 * losses["dynamic"], f"losses differ: {losses}"
    errors = [
        abs(step.plan.prediction.step_ns / step.step_ns - 1) for step in ours if step.plan and step.plan.prediction
    ]
    overheads = [step.step_ns / emulated_ns(step) - 1 for step in ours]
    return {
        "vs_torch_1f1b": ratio(theirs, ours),
        "vs_best_static": ratio(static, ours),
        "overhead": statistics.median(overheads),
        "prediction_error_median": statistics.median(errors),
        "padding_share": padding_share([step.plan for step in ours if step.plan]),
        "torch_padding_share": padding_flops_share(
            graph, single_share(graph, comparison.batches[0]), comparison.load, comparison.padded[0], comparison.shape
        ),
        "emulated_vs_best_static": statistics.median(
            b.plan.prediction.step_ns / a.plan.prediction.step_ns
            for a, b in zip(ours, static, strict=True)
            if a.plan and b.plan and a.plan.prediction and b.plan.prediction
        ),
        "steps": len(ours),
        "microbatches": comparison.job.tasks[TASK].microbatches,
        "step_ms": {
            way: round(statistics.median(s.step_ns for s in steps) / 1e6, 1)
            for way, steps in comparison.measured.items()
        },
        "loss": losses,
        "placement": {
            way: [str(chunk) for chunk in chosen.placement.chunks] for way, chosen in comparison.planning.items()
        },
    }


def ratio(slow: Sequence[Step], fast: Sequence[Step]) -> float:
    """Median over the steps of how much faster the second way ran the same batch."""
    return statistics.median(a.step_ns / b.step_ns for a, b in zip(slow, fast, strict=True))


def show(found: dict[str, object]) -> None:
    print(f"{'figure':28} {'value':>10}")
    for name, value in found.items():
        print(f"{name:28} {value:10.4f}" if isinstance(value, float) else f"{name:28} {json.dumps(value)}")


if __name__ == "__main__":
    main()
