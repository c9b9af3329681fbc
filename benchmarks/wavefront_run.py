"""Wavefront plans of `examples/multitask.toml` on two real workers, one core and one thread each; `benchmarks.wavefront`
calls this.

    figures()  ->  {"real_ratio": 1.04, "real_over_sequential": 1.01, "switch_s": 0.05, ...}

Policies `wavefront` and `sequential` train on the same batches, block by block in turn; a block's plans know what the
blocks before have measured, as in training, and its first step is not counted. `real_ratio` is measured over emulated step
time of `wavefront`, `real_over_sequential` the step time of `sequential` over that of `wavefront`, both medians over the
batches. `switch_s` is the longest of some changes of the task set, from the last step before to all parameters in place.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from pipeweaver.calibrate import calibrated_costs, conditions
from pipeweaver.config import Job, load
from pipeweaver.costs import Costs
from pipeweaver.data.dataset import load_part
from pipeweaver.data.items import Batch
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.build import materialise, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare, process
from pipeweaver.runtime.ahead import Planning, plan_batch
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.execution import Loader as Load
from pipeweaver.runtime.join import join
from pipeweaver.runtime.launch import launch
from pipeweaver.runtime.relocate import homes_of, relocate, relocation
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.runtime.worker import Worker
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.ir import Measurement, Placement, Plan
from pipeweaver.semu.correct import Factors, updated

CONFIG = Path(__file__).parents[1] / "examples" / "multitask.toml"
BLOCKS, SIZE = 6, 6
"""Blocks, and steps in a block."""
WAYS = ("wavefront", "sequential")
SETS = (("caption", "text"), ("caption", "text", "paint", "match"), ("paint", "match"))
"""Task sets that the worker changes between, in a ring."""


def figures(blocks: int = BLOCKS) -> dict[str, Any]:
    """Raises ValueError if there are fewer than two cores."""
    machine.cores(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.wavefront_run", str(path), str(blocks), str(SIZE)]
        code = launch(command, num_workers=2)
        if code:
            sys.exit(code)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def work(path: Path, blocks: int, size: int) -> None:
    """What each of the two workers does; the first writes the figures."""
    job = load(CONFIG, ["workers.pipeline=2"])
    membership = join(job.workers, job.run.device)
    torch.set_num_threads(1)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)["train"]
    loaders = prepare.job_loaders(job, datasets)
    sample = prepare.job_sample(job, loaders)
    load_items = partial(load_part, datasets)
    with exchange.heartbeat():
        costs = calibrated_costs(
            graph,
            sample,
            load_items,
            widths=prepare.job_widths(datasets),
            transport=transport,
            exchange=exchange,
            conditions=conditions(job.workers, membership.device, job.run.dtype),
            device=membership.device,
            cache=job.costs.cache,
        )
        membership.company.close()
        comparison = Comparison(job, graph, transport, load_items, sample, costs)
        batches = list(islice(TaskBatches(loaders), blocks * size))
        for block in range(blocks):
            comparison.run(block, batches[block * size : (block + 1) * size])
        switches = comparison.switches(batches[0])
    if membership.is_first:
        path.write_text(json.dumps(comparison.figures() | {"switch_s": round(max(switches), 3)}))
    transport.close()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A counted step of one way."""

    plan: Plan
    step_ns: int


class Comparison:
    """Both ways side by side in one pair of processes. Only the first has costs, and plans."""

    def __init__(
        self, job: Job, graph: ModelGraph, transport: ProcessTransport, load_items: Load, sample: Sequence[Batch],
        costs: Any,
    ) -> None:  # fmt: skip
        self.job, self.graph, self.transport, self.load_items, self.costs = job, graph, transport, load_items, costs
        self.plannings: dict[str, Planning] = {}
        self.sets: list[Planning] = []
        if costs is not None:
            self.plannings = {way: prepare.place(job, way, graph, sample, costs, None) for way in WAYS}
            self.sets = [self._of_set(tasks, sample, costs) for tasks in SETS]
        placements = _from_first({way: planning.placement for way, planning in self.plannings.items()})
        self.workers = {way: self._worker(placement) for way, placement in placements.items()}
        self.measured: dict[str, list[Step]] = {way: [] for way in WAYS}
        self.factors: dict[str, Factors] = {way: {} for way in WAYS}

    def run(self, block: int, batches: Sequence[Batch]) -> None:
        turn = block % len(WAYS)
        for way in WAYS[turn:] + WAYS[:turn]:
            plans: list[Plan] = _from_first([records(plan_batch(self.plannings[way], batch)[0]) for batch in batches]
                                            if self.plannings else [])  # fmt: skip
            self.transport.barrier()
            used = self.factors[way]
            ends, spans = [], []
            for plan in plans:
                spans.append(self.workers[way].run(plan).spans)
                ends.append(time.perf_counter_ns())
            # One clock for both, this machine's. A step ends when the later worker's does.
            together = [max(pair) for pair in zip(*_gathered(ends), strict=True)]
            lanes = list(zip(*_gathered(spans), strict=True))
            for i in range(1, len(plans)):
                step = Step(plan=plans[i], step_ns=together[i] - together[i - 1])
                self.measured[way].append(step)
                measurement = Measurement(spans=lanes[i], transfers=(), step_ns=step.step_ns)
                self.factors[way] = updated(self.factors[way], used, [step.plan], [measurement])
            if self.plannings:
                corrected = self.costs.corrected(self.factors[way])
                self.plannings[way] = replace(self.plannings[way], costs=corrected)

    def switches(self, batch: Batch) -> list[float]:
        """Seconds that each change of the task set takes, round the ring, a step between them."""
        plans: list[Plan] = _from_first(
            [
                records(plan_batch(planning, _only(batch, tasks))[0])
                for planning, tasks in zip(self.sets, SETS, strict=True)
            ]
            if self.sets
            else []
        )
        worker = self._worker(plans[0].placement)
        homes = homes_of(self.graph, plans[0].placement)
        worker.run(plans[0])
        seconds = []
        for plan in (*plans[1:], plans[0]):
            self.transport.barrier()
            begun = time.perf_counter()
            homes, moves = relocation(self.graph, homes, plan.placement)
            relocate(worker, homes, moves, plan.placement)
            self.transport.barrier()
            seconds.append(time.perf_counter() - begun)
            worker.run(plan)
        return seconds

    def figures(self) -> dict[str, Any]:
        ours, theirs = self.measured["wavefront"], self.measured["sequential"]
        return {
            "real_ratio": statistics.median(step.step_ns / _predicted_ns(step.plan) for step in ours),
            "real_over_sequential": statistics.median(b.step_ns / a.step_ns for a, b in zip(ours, theirs, strict=True)),
            "emulated_over_sequential": statistics.median(
                _predicted_ns(b.plan) / _predicted_ns(a.plan) for a, b in zip(ours, theirs, strict=True)
            ),
            "real_steps": len(ours),
            "real_step_ms": {
                way: round(statistics.median(step.step_ns for step in steps) / 1e6, 1)
                for way, steps in self.measured.items()
            },
        }

    def _of_set(self, tasks: Sequence[str], sample: Sequence[Batch], costs: Costs) -> Planning:
        return prepare.place(self.job, "wavefront", self.graph, [_only(batch, tasks) for batch in sample], costs, None)

    def _worker(self, placement: Placement) -> Worker:
        chunks = [placement.chunks[number] for number in placement.on(self.transport.address.worker)]
        modules = materialise(self.graph, chunks, seed=self.job.run.seed)
        return Worker(
            self.graph,
            modules=modules,
            parameters=named_parameters(self.graph, modules),
            transport=self.transport,
            load=self.load_items,
            optimizer=self.job.optimizer,
            seed=self.job.run.seed,
        )


def _only(batch: Batch, tasks: Sequence[str]) -> Batch:
    """The samples of some tasks; a microbatch is of one task."""
    kept = [number for number, sample in enumerate(batch.samples) if sample.task in tasks]
    place = {number: position for position, number in enumerate(kept)}
    groups = [tuple(place[i] for i in group) for group in batch.microbatches if group[0] in place]
    return Batch(step=batch.step, samples=tuple(batch.samples[i] for i in kept), microbatches=tuple(groups))


def _predicted_ns(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.step_ns


def _from_first(mine):  # type: ignore[no-untyped-def]
    """What the first worker has."""
    found = [mine]
    dist.broadcast_object_list(found)
    return found[0]


def _gathered(mine):  # type: ignore[no-untyped-def]
    """What both workers have, by rank."""
    both = [None, None]
    dist.all_gather_object(both, mine)
    return both


if __name__ == "__main__":
    process.tie_to_parent()
    process.run_worker(lambda: work(Path(sys.argv[1]), *map(int, sys.argv[2:])))
