"""How far the step emulator is off: published step times and memory, composition, and the cost of asking.

    python -m benchmarks.semu [--quick] [--data DIR]

Constants are fitted on one half of the vTrain rows, split by (hidden, layers), and scored on the other, both ways
round; nothing is fitted on B200. `rehearsal_error_median` is that of `benchmarks.rehearsal`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from msgspec.structs import replace as changed

from benchmarks.machine import cores, probe, report
from benchmarks.rehearsal import pipelines
from benchmarks.setups import WIDTHS, cases
from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Item, Share, linked
from pipeweaver.data_folder import data_folder
from pipeweaver.model.sizes import setup
from pipeweaver.planner.assign import share_out, single_share
from pipeweaver.policies import POLICIES
from pipeweaver.report.metrics import read_metrics
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.connect import Parts
from pipeweaver.schedule.stages import Orders, StepStages, orders_of
from pipeweaver.semu.compose import compose
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.fit import Constants, cross_fit
from pipeweaver.semu.job import pipeline_ns
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.measured import Measured, read_measured
from pipeweaver.semu.optimizer import Optimizer
from pipeweaver.semu.step import NO_WORK, StepEmulator
from pipeweaver.semu.validate import mean_absolute, memory_errors, summary, time_errors, validate

Figures = dict[str, float | int | None]

LAYER_MS = {"vision": 6.75, "language": 10.5}
"""Forward and backward of a layer in the static case of PipeWeaver's section 2: 64 of each over 16 workers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, within a minute")
    parser.add_argument("--data", help="folder of measured data")
    options = parser.parse_args()
    folder = data_folder(options.data)
    report("start", probe(cores(1)))
    every = 4 if options.quick else 1
    figures: Figures = {}
    figures |= vtrain("multi", folder / "vtrain_a100" / "multi_node.csv", exact=not options.quick, every=1)
    figures |= vtrain("single", folder / "vtrain_a100" / "single_node.csv", exact=not options.quick, every=every)
    figures |= composition(folder / "vtrain_a100" / "single_node.csv")
    figures |= b200(folder / "simumax" / "b200_llama3_70b_measured.csv")
    figures["case_37b_bubble"] = static_bubble()
    figures |= again(20, 8) if options.quick else again(100, 104)
    figures["cold_s"] = None if options.quick else cold_s()
    figures |= large_scale()
    figures["rehearsal_error_median"] = None if options.quick else pipelines()["rehearsal_error_median"]
    figures |= {"cpu_error_median": None, "cpu_uncorrected_median": None} if options.quick else on_this_machine()
    report("end", probe(cores(1)))
    print(f"\n{'figure':26} value")
    for name, value in figures.items():
        print(f"{name:26} {'not measured' if value is None else f'{value:.4g}'}")
    print(json.dumps(figures))


def vtrain(family: str, path: Path, *, exact: bool, every: int) -> Figures:
    """Rows predicted by constants that were fitted to the other half of them."""
    rows = read_measured(path)[::every]
    crossed = cross_fit(rows, load_machine("A100"), group=width_and_depth, exact=exact)
    errors = time_errors(rows, crossed.estimates)
    print(f"\nvTrain {family}-node, {len(rows)} rows, each predicted by constants of the other half")
    for half, constants in enumerate(crossed.constants):
        others = [abs(e) for e, h in zip(errors, crossed.half, strict=True) if h != half]
        print(f"  fitted on half {half}, {mean_absolute(others):.2%} on the other: {_listed(constants)}")
    print_families(
        rows,
        errors,
        {
            "hidden": lambda row: width_and_depth(row)[0],
            "tp": lambda row: row.job.tensor_parallel,
            "pp": lambda row: row.job.pipeline_parallel,
            "microbatch": lambda row: row.job.microbatch,
        },
    )
    for i in sorted(range(len(rows)), key=lambda i: -abs(errors[i]))[:6]:
        print(f"  worst: {rows[i].name} {rows[i].iteration_ms:.0f} ms {errors[i]:+.1%}")
    return {
        f"vtrain_{family}_mape": mean_absolute(errors),
        f"vtrain_{family}_worst": max(map(abs, errors)),
        f"vtrain_{family}_rows": len(rows),
        f"vtrain_{family}_constants": len(Constants.__dataclass_fields__),
    }


def composition(path: Path) -> Figures:
    """Rows with a pipeline, from layer times of rows without one."""
    rows = read_measured(path)
    predicted = compose(rows, load_machine("A100"))
    errors = [predicted[i] / rows[i].iteration_ms - 1 for i in predicted]
    print(f"\nvTrain single-node, {len(errors)} rows with a pipeline from those without")
    print_families(
        [rows[i] for i in predicted],
        errors,
        {"pp": lambda row: row.job.pipeline_parallel, "tp": lambda row: row.job.tensor_parallel},
    )
    return {"vtrain_compose": mean_absolute(errors), "vtrain_compose_worst": max(map(abs, errors))}


def b200(path: Path) -> Figures:
    """Nothing fitted: tables of the machine, habits of the framework."""
    validation = validate(path, "B200")
    print("\nB200, nothing fitted")
    print_families(
        validation.rows,
        validation.time_errors,
        {"tp": lambda row: row.job.tensor_parallel, "microbatches": lambda row: row.job.num_microbatches},
    )
    for row, estimate in zip(validation.rows[:4], validation.estimates[:4], strict=True):
        parts = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items())
            for rank, memory in enumerate(estimate.memory)
        )
        print(f"  memory {memory_errors(row, estimate)[0]:+.1%} GiB {parts}")
    found = summary(validation)
    return {"b200_time_mape": found["time_mape"], "b200_memory_mape": found["memory_mape"]}


def static_bubble() -> float:
    """Bubble of the best contiguous split of 64 ViT and 64 LM layers over 16 workers, 64 microbatches, 1F1B."""
    layers = [LAYER_MS["vision"]] * 64 + [LAYER_MS["language"]] * 64
    stages = best_split(layers, 16)
    makespan = pipeline_ns([ms / 3 * 1e6 for ms in stages], [ms * 2 / 3 * 1e6 for ms in stages], 0.0, 64)
    return 1 - sum(layers) * 64 * 1e6 / (16 * makespan)


def best_split(layers: Sequence[float], workers: int) -> list[float]:
    """Times of consecutive stages, the longest as short as possible; stages are filled up from the front."""
    candidates = sorted({sum(layers[i:j]) for i in range(len(layers)) for j in range(i + 1, len(layers) + 1)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(layers, candidates[middle])) <= workers else (middle + 1, high)
    return _filled(layers, candidates[low])


def _filled(layers: Sequence[float], most: float) -> list[float]:
    stages = [0.0]
    for layer in layers:
        if stages[-1] + layer > most + 1e-9:
            stages.append(0.0)
        stages[-1] += layer
    return stages


def again(rounds: int, batches: int) -> Figures:
    """Milliseconds to emulate a step of VLM-L with 64 microbatches again, warm: after its order changed, after the
    images of one part changed, and for a batch never seen. Parts and orders are given; medians of so many rounds, and of
    all batches but four, to warm up."""
    graph, draw = setup("VLM-L"), random.Random(0)
    costs = SemuCosts(graph, load_machine("H800"), tensor_parallel=8, widths=WIDTHS, workers=8)
    shares = [single_share(graph, cases()["VLM-L"].batch(seed=seed, microbatches=64)) for seed in range(batches)]
    policy = POLICIES["interleaved-1f1b"]
    placement = policy.place(graph, 8, costs, shares[:1], dtype="bfloat16")
    emulator = StepEmulator(graph, placement, costs, dtype="bfloat16")
    took: dict[str, list[float]] = {"new_order_ms": [], "one_part_changed_ms": [], "new_batch_ms": []}

    def timed(name: str, share: Share, parts: Parts, orders: Orders) -> None:
        start = time.perf_counter()
        emulator.emulate(share, parts, orders)
        took[name].append(1e3 * (time.perf_counter() - start))

    for share in shares:
        draft = policy.plan(graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0, dtype="bfloat16")
        made_up = FlatCosts(layers={})
        step = StepStages(graph, placement, share, draft.parts, made_up, dtype="bfloat16", work=NO_WORK)
        orders = orders_of(step, draft)
        timed("new_batch_ms", share, draft.parts, orders)
    emulator.emulate(share, draft.parts, orders)
    images = [part.items for parts in draft.parts for part in parts if share.items[part.items[0]].module == "vision"]
    warm = 8
    for _ in range(rounds + warm):
        orders = _swapped(orders, draw)
        timed("new_order_ms", share, draft.parts, orders)
        share = changed(share, items=_resized(share.items, draw.choice(images), draw))
        timed("one_part_changed_ms", share, draft.parts, orders)
    assert emulator.resized == rounds + warm, "a part that changed must not make the step anew"
    coverage = costs.coverage
    took["new_batch_ms"] = took["new_batch_ms"][4:]
    figures: Figures = {name: median(ms[-rounds:]) for name, ms in took.items()}
    listed = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    print(
        f"\nVLM-L on H800, 64 microbatches, {len(orders.stage)} stages, emulated again: {listed}; {costs.source}; {coverage}"
    )
    return figures


def _swapped(orders: Orders, draw: random.Random) -> Orders:
    """Two neighbouring forwards of one chunk's worker in the other order: nothing waits in a circle."""
    stage = orders.stage.copy()
    units = len(orders.split)
    while True:
        at = draw.randrange(len(stage) - 1)
        one, other = int(stage[at]), int(stage[at + 1])
        if at + 1 not in orders.start and one < units and other < units and abs(one - other) == 1:
            stage[at], stage[at + 1] = other, one
            return orders._replace(stage=stage)


def _resized(items: Sequence[Item], part: Sequence[int], draw: random.Random) -> tuple[Item, ...]:
    """The items, those of a part as pictures of another size."""
    found = list(items)
    side = draw.choice((40, 44, 48, 52))
    sizes = {"tokens": side * side, "height": side, "width": side, "features": side * side // 16}
    for i in part:
        found[i] = changed(found[i], sizes=found[i].sizes | sizes)
    return tuple(found)


def first_estimate() -> None:
    """A step of VLM-L from nothing: layers traced, placed, emulated."""
    graph = setup("VLM-L")
    costs = SemuCosts(graph, load_machine("H800"), tensor_parallel=8, widths=WIDTHS, workers=8)
    share = single_share(graph, cases()["VLM-L"].batch(seed=0, microbatches=64))
    policy = POLICIES["interleaved-1f1b"]
    placement = policy.place(graph, 8, costs, [share], dtype="bfloat16")
    draft = policy.plan(graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0, dtype="bfloat16")
    emulator = StepEmulator(graph, placement, costs, dtype="bfloat16")
    emulator.emulate(share, draft.parts, orders_of(emulator.stages(share, draft.parts), draft))


def cold_s() -> float:
    """Seconds of a fresh process from nothing to `first_estimate`."""
    start = time.perf_counter()
    code = "from benchmarks.semu import first_estimate; first_estimate()"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def on_this_machine(steps: int = 60) -> Figures:
    """Two workers train on the mix of `runtime.toml`: by how much a step takes another time than was predicted before it,
    with costs corrected by the steps before, and how far the same predictions had been off without."""
    config = Path(__file__).with_name("runtime.toml")
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--set=run.steps={steps}", f"--set=run.output={folder}"]
        command = [sys.executable, "-m", "pipeweaver", "train", str(config), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        trained = read_metrics(Path(folder) / "metrics.jsonl")
    errors = [abs(one.prediction_error) for one in trained[1:] if one.prediction_error is not None]
    plain = [abs(e) for one in trained[1:] if (e := one.uncorrected_prediction_error) is not None]
    found: Figures = {"cpu_error_median": median(errors), "cpu_uncorrected_median": median(plain)}
    print(
        f"\nThis machine, two workers, {len(errors)} steps: off by {median(errors):.1%} (first ten "
        f"{median(errors[:10]):.1%}), {median(plain):.1%} without correction; factors at the end {trained[-1].corrections}"
    )
    return found


def large_scale() -> Figures:
    """VLM-XL on 16384 H100 (data 128, tensor 8, pipeline 16): one replica's step of 64 microbatches, interleaved.

    Replicas draw alike, so one stands for all; gradients are reduced over all of them.
    """
    start = time.perf_counter()
    graph, machine = setup("VLM-XL"), load_machine("H100")
    costs = SemuCosts(
        graph,
        machine,
        tensor_parallel=8,
        widths=WIDTHS,
        workers=16,
        optimizer=Optimizer(gradient=4, state=12, shards=128),
    )
    batch = replace(cases()["VLM-L"], name="VLM-XL", workers=16).batch(seed=0, microbatches=64)
    (share,) = share_out(graph, batch, 1, costs)
    share = changed(share, num_replicas=128)
    policy = POLICIES["interleaved-1f1b"]
    placement = policy.place(graph, 16, costs, [share], dtype="bfloat16")
    draft = policy.plan(graph, placement, share, costs, budget_bytes=None, seed=0, rounds=0, dtype="bfloat16")
    plan = compile_plan(graph, share, draft, costs, dtype="bfloat16")
    took = time.perf_counter() - start
    assert plan.prediction is not None
    sources = linked(plan.items, plan.links)
    flops = 0.0
    for module in graph.by_name:
        mine = [i for i, item in enumerate(plan.items) if item.module == module]
        flops += costs.flops(module, [plan.items[i] for i in mine], [sources[i] for i in mine])
    mfu = flops / (128 * machine.peak("bfloat16") * plan.prediction.step_ns / 1e9)
    print(
        f"\nVLM-XL on 16384 H100, 64 microbatches per replica, {draft.policy}: step "
        f"{plan.prediction.step_ns / 1e9:.1f} s, bubble {plan.prediction.bubble:.1%}, MFU {mfu:.3f}, peak "
        f"{max(plan.prediction.peak_bytes) / 8 / 2**30:.0f} GiB a device; {costs.source}"
    )
    return {"large_scale_s": took, "large_scale_mfu": mfu}


def width_and_depth(row: Measured) -> tuple[int, int]:
    return row.job.layers.block.carries[0].width, row.job.num_layers


def print_families(
    rows: Sequence[Measured], errors: Sequence[float], families: dict[str, Callable[[Measured], int]]
) -> None:
    for name, key in families.items():
        groups: dict[int, list[float]] = {}
        for row, error in zip(rows, errors, strict=True):
            groups.setdefault(key(row), []).append(error)
        print(
            f"  by {name:12} "
            + "   ".join(
                f"{value}: {mean_absolute(found):.1%} of {len(found)} ({sum(found) / len(found):+.1%})"
                for value, found in sorted(groups.items())
            )
        )


def _listed(constants: Constants) -> str:
    return ", ".join(f"{name} {getattr(constants, name):.3g}" for name in Constants.__dataclass_fields__)


if __name__ == "__main__":
    main()
