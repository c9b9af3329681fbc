"""How fast and how predictable is a real training step: two workers, one core and one thread each.

    python -m benchmarks.runtime [--quick | --levers]

Three ways run the same batches of `runtime.toml` with the same initial parameters, in alternating blocks of
steps: our `dynamic` policy; our `1f1b` on the contiguous split that emulates fastest on this mix; and torch's
`Schedule1F1B` (torch_pipeline.py). Our steps are timed from optimizer end to optimizer end, planning ahead by the
planner service on the same two cores, receipt of the plan and loading included; for torch neither loading nor padding
is timed. A few steps of each way go before, uncounted, and so do the first two of each block, whose plans had no step
to be searched for in. Every step corrects the costs of later plans, as in training. Figures are medians of ratios
between the same step of two ways.

With `--levers`, what each part of `dynamic` brings: it runs beside itself without that part, placed anew, and beside
our `1f1b`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.runtime_ways import OurWay, Pair, Size, Step, TorchWay, Way, compare
from benchmarks.torch_pipeline import TorchPipeline, pad, padding_flops_share, shapes, torch_layers
from pipeweaver.calibrate import calibrated_costs, conditions
from pipeweaver.config import Job, load
from pipeweaver.costs import Costs
from pipeweaver.data.dataset import load_part
from pipeweaver.data.items import Batch
from pipeweaver.data.tasks import TaskBatches
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig
from pipeweaver.planner.assign import single_share
from pipeweaver.policies import POLICIES
from pipeweaver.report.metrics import padding_share
from pipeweaver.runtime import prepare, process
from pipeweaver.runtime.ahead import Planning, plan_batch, predicted_ns
from pipeweaver.runtime.exchange import Exchange
from pipeweaver.runtime.join import join
from pipeweaver.runtime.launch import launch
from pipeweaver.runtime.transport import ProcessTransport
from pipeweaver.schedule.emulate import emulate
from pipeweaver.schedule.ir import Chunk, Compute, Placement

TASK = "main"
CONFIG = Path(__file__).with_name("runtime.toml")
FULL = Size(warm=5, blocks=4, skipped=2, counted=5, microbatches=8)
SIZES = {
    "full": FULL,
    "quick": Size(warm=0, blocks=1, skipped=1, counted=1, microbatches=4),
    "levers": FULL,
}
SAMPLE = 8
"""Batches that static splits are compared on."""
LEVERS: dict[str, tuple[str, ...]] = {
    "split backward": ("policy.split_backward=false",),
    "regrouping of samples": ("policy.regroup=false",),
    "several chunks per worker": ("policy.chunks_per_worker.vision=1", "policy.chunks_per_worker.language=1"),
    "several parts per microbatch": ("policy.items_per_part.vision=1000000",),
    "parts even in cost": ("policy.even_parts=items",),
    "search beyond the first plan": ("policy.rounds=1",),
}
"""What switches a lever off."""


def main() -> None:
    if process.is_worker():
        process.tie_to_parent()
        process.run_worker(lambda: work(Path(sys.argv[1]), sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="one small step of each way, within a minute")
    only.add_argument("--levers", action="store_true", help="dynamic without each of its parts, instead of torch")
    chosen = parser.parse_args()
    mode = "quick" if chosen.quick else "levers" if chosen.levers else "full"
    cores = machine.cores(2)
    before = machine.probe(cores)
    machine.report("start", before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        code = launch([sys.executable, "-m", "benchmarks.runtime", str(path), mode], num_workers=2)
        if code:
            sys.exit(code)
        figures = json.loads(path.read_text())
    after = machine.probe(cores)
    machine.report("end", after)
    show(figures)
    machine.exit_if_busy(before, after)
    print(json.dumps(figures))


def work(path: Path, mode: str) -> None:
    """What each of the two workers does; the first writes the figures."""
    size = SIZES[mode]
    job = load(CONFIG, overrides(size))
    membership = join(job.workers, job.run.device)
    torch.set_num_threads(1)
    transport = ProcessTransport(membership.workers, membership.device)
    exchange = Exchange(membership.store, patience_s=job.run.watchdog_s)
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)["train"]
    batches = list(islice(TaskBatches(prepare.job_loaders(job, datasets)), max(size.batches, size.warm)))
    load_items = partial(load_part, datasets)
    pair = Pair(
        membership=membership, exchange=exchange, transport=transport, graph=graph, load=load_items, batches=batches
    )
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
        jobs = {"dynamic": job, "1f1b": job}
        if mode == "levers":
            jobs |= {f"without {lever}": load(CONFIG, [*overrides(size), *off]) for lever, off in LEVERS.items()}
        plannings = {} if costs is None else {name: planning(name, jobs[name], pair, costs) for name in jobs}
        placements = [{name: chosen.placement for name, chosen in plannings.items()}]
        dist.broadcast_object_list(placements)
        with ExitStack() as opened:
            ways: dict[str, Way] = {
                name: OurWay(pair, jobs[name], placement, plannings.get(name), opened)
                for name, placement in placements[0].items()
            }
            theirs = None if mode == "levers" else torch_way(job, pair)
            steps, losses = compare(ways | ({"torch": theirs} if theirs is not None else {}), size)
    if membership.is_first:
        for loss in losses.values():
            assert abs(loss - losses["dynamic"]) < 1e-3 * losses["dynamic"], f"losses differ: {losses}"
        found = figures(steps) if theirs is None else figures(steps) | against_torch(steps, pair, theirs)
        found |= {
            "steps": len(steps["dynamic"]),
            "microbatches": size.microbatches,
            "step_ms": {way: round(statistics.median(s.step_ns for s in ran) / 1e6, 1) for way, ran in steps.items()},
            "loss": losses,
            "placement": {way: [str(chunk) for chunk in chosen.chunks] for way, chosen in placements[0].items()},
        }
        path.write_text(json.dumps(found))
    transport.close()


def overrides(size: Size) -> list[str]:
    return [f"tasks.{TASK}.microbatches={size.microbatches}"]


def planning(way: str, job: Job, pair: Pair, costs: Costs) -> Planning:
    """What plans of a way are made from: `1f1b` on the best split, or `dynamic` on a placement of its own."""
    if way == "1f1b":
        return static_planning(job, pair.graph, costs, best_split(job, pair.graph, costs, pair.batches[:SAMPLE]))
    shares = [single_share(pair.graph, batch) for batch in pair.batches[:SAMPLE]]
    placement = POLICIES["dynamic"].place(pair.graph, 2, costs, shares, job.policy.options)
    return prepare.planning(job, "dynamic", pair.graph, placement, costs, None)


def static_planning(job: Job, graph: ModelGraph, costs: Costs, placement: Placement) -> Planning:
    return prepare.planning(job, "1f1b", graph, placement, costs, None)


def best_split(job: Job, graph: ModelGraph, costs: Costs, batches: Sequence[Batch]) -> Placement:
    """Of all contiguous splits of the two modules over two workers, the one with the shortest emulated steps."""
    total = sum(len(module.layers) for module in graph.modules)

    def mean_ns(first: int) -> float:
        way = static_planning(job, graph, costs, contiguous(graph, first))
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


def torch_way(job: Job, pair: Pair) -> TorchWay:
    vision, language = job.modules["vision"], job.modules["language"]
    assert isinstance(vision, VitConfig) and isinstance(language, LanguageConfig)
    shape = shapes(pair.batches, job.tasks[TASK].tokens_per_microbatch)
    padded = [pad(batch, pair.load, shape, vision.merge) for batch in pair.batches]
    rank = pair.membership.rank
    pipeline = TorchPipeline(
        rank,
        torch_layers(pair.graph, rank, job.run.seed),
        shape,
        job.tasks[TASK].microbatches,
        padded[0],
        language.hidden,
        language.vocab,
        job.optimizer,
    )
    return TorchWay(pair, pipeline, padded, shape)


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


def figures(steps: Mapping[str, Sequence[Step]]) -> dict[str, object]:
    ours, static = steps["dynamic"], steps["1f1b"]
    found: dict[str, object] = {
        "vs_best_static": ratio(static, ours),
        "emulated_vs_best_static": emulated_ratio(static, ours),
        "overhead": statistics.median(step.step_ns / emulated_ns(step) - 1 for step in ours),
        "prediction_error_median": statistics.median(abs(predicted(step) / step.step_ns - 1) for step in ours),
        "padding_share": padding_share([step.plan for step in ours if step.plan]),
    }
    levers = {
        lever: {
            "brings": ratio(steps[f"without {lever}"], ours),
            "emulated_brings": emulated_ratio(steps[f"without {lever}"], ours),
            "vs_best_static_without": ratio(static, steps[f"without {lever}"]),
        }
        for lever in LEVERS
        if f"without {lever}" in steps
    }
    return found | ({"levers": levers} if levers else {})


def against_torch(steps: Mapping[str, Sequence[Step]], pair: Pair, theirs: TorchWay) -> dict[str, object]:
    share, shape = single_share(pair.graph, pair.batches[0]), theirs.shape
    return {
        "vs_torch_1f1b": ratio(steps["torch"], steps["dynamic"]),
        "torch_padding_share": padding_flops_share(pair.graph, share, pair.load, theirs.padded[0], shape),
    }


def ratio(slow: Sequence[Step], fast: Sequence[Step]) -> float:
    """Median over the steps of how much faster the second way ran the same batch."""
    return statistics.median(a.step_ns / b.step_ns for a, b in zip(slow, fast, strict=True))


def emulated_ratio(slow: Sequence[Step], fast: Sequence[Step]) -> float:
    """The same of what was predicted for these steps."""
    return statistics.median(predicted(a) / predicted(b) for a, b in zip(slow, fast, strict=True))


def predicted(step: Step) -> int:
    assert step.plan is not None and step.plan.prediction is not None
    return step.plan.prediction.step_ns


def show(found: dict[str, object]) -> None:
    print(f"{'figure':28} {'value':>10}")
    for name, value in found.items():
        if name == "levers":
            assert isinstance(value, dict)
            show_levers(value)
        else:
            print(f"{name:28} {value:10.4f}" if isinstance(value, float) else f"{name:28} {json.dumps(value)}")


def show_levers(levers: Mapping[str, Mapping[str, float]]) -> None:
    print(f"{'lever':30} {'brings':>8} {'emulated':>9} {'vs best static without it':>26}")
    for lever, found in levers.items():
        brings, emulated, without = found["brings"], found["emulated_brings"], found["vs_best_static_without"]
        print(f"{lever:30} {brings:8.3f} {emulated:9.3f} {without:26.3f}")


if __name__ == "__main__":
    main()
