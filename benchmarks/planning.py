"""Does planning hold up training, and how long does it take at the largest scale: the planner service, measured.

    python -m benchmarks.planning [--quick]

    wait_share          real training on 2 workers, one core each, with the service beside them on the same cores: share of
                        the step time that a worker waits for its plan
    service_slowdown    median over the steps: step time with the service on, over that with the same plans read from files
    plans_16k_gpus_s    seconds for all plans of one step of VLM-XL on 16384 GPUs (128 replicas of 16 workers of 8 devices,
                        32 microbatches each), H800 costs and memory: samples assigned, planned and compiled by two planner
                        processes, which have `SEARCH_S` for it, proven by the process that asked; kernels compiled, costs that
                        know other batches
    plans_16k_over_bound    median over these replicas: emulated makespan over the lower bound

Runs with the service and runs from files take turns. The first steps of a run, while libraries and the search's kernels
are loaded, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.setups import Case, cases
from pipeweaver.planner.assign import share_out
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.report.metrics import StepMetrics, read_metrics
from pipeweaver.runtime import planner_process
from pipeweaver.runtime.ahead import Planning, plan_batch
from pipeweaver.runtime.planner_messages import Begin
from pipeweaver.runtime.service import Service
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Placement

FIELDS = ("wait_share", "service_slowdown", "plans_16k_gpus_s", "plans_16k_over_bound")
JOB = Path(__file__).with_name("runtime.toml")
WARM_UP = 5
"""Steps at the beginning of a run that do not count."""
REPLICAS, WORKERS, MICROBATCHES = 128, 16, 32
PROCESSES = 2
SEARCH_S = 15.0
"""Of processor time that each of them has for its replicas' plans."""
CHUNKS = {"vision": 1, "language": 2}
"""Per worker, as the paper's floor rule has them for about the same work per chunk."""
PLANNER = "--planner"
"""First argument of a planner process of VLM-XL."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps of real training that count, of runs with the service and of runs with the same plans from files."""

    planned: tuple[StepMetrics, ...]
    replayed: tuple[StepMetrics, ...]

    @property
    def wait_share(self) -> float:
        return sum(step.waiting_ns for step in self.planned) / sum(step.step_ns for step in self.planned)

    @property
    def service_slowdown(self) -> float:
        pairs = zip(self.planned, self.replayed, strict=True)
        return statistics.median(planned.step_ns / replayed.step_ns for planned, replayed in pairs)


def training(runs: int = 3, steps: int = 25, microbatches: int = 8) -> Training:
    """Train `runs` times with the service, each time followed by a run with its plans from files."""
    planned: list[StepMetrics] = []
    replayed: list[StepMetrics] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            first, again = Path(folder) / f"planned-{number}", Path(folder) / f"replayed-{number}"
            settings = [f"run.steps={steps}", f"run.seed={number}", f"tasks.main.microbatches={microbatches}"]
            planned += _trained(first, settings)
            replayed += _trained(again, [*settings, f"run.plans={first}/plans"])
    return Training(planned=tuple(planned), replayed=tuple(replayed))


def plans_16k_gpus(replicas: int = REPLICAS) -> tuple[float, float]:
    """(seconds from the metadata of a batch to proven plans of all `replicas`, median of their makespans over bounds)."""
    case = xl_case()
    sample = share_out(case.graph, case.batch(seed=1, microbatches=MICROBATCHES), 1, case.costs)
    options = PolicyOptions(chunks_per_worker=CHUNKS)
    placement = POLICIES["dynamic"].place(
        case.graph, WORKERS, case.costs, sample, options, budget_bytes=case.budget_bytes
    )
    setup = XlSetup(placement=placement, replicas=replicas)
    with Service(
        xl_planning(setup),
        setup,
        processes=PROCESSES,
        seconds=SEARCH_S,
        command=(sys.executable, "-m", __spec__.name, PLANNER),
    ) as service:
        # Processes are started, kernels compiled and costs known before time counts, as in the middle of a run.
        for number, seed in enumerate(range(2, 6)):
            _take(service, number, case, seed, replicas)
        plan_batch(
            xl_planning(msgspec.structs.replace(setup, replicas=1)), case.batch(seed=6, microbatches=MICROBATCHES)
        )
        batch = case.batch(seed=7, microbatches=replicas * MICROBATCHES)
        begun = time.perf_counter()
        service.want(10, batch)
        service.wait(10, for_last=True)
        plans = service.take(10)
        seconds = time.perf_counter() - begun
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    assert len(predictions) == replicas
    return seconds, statistics.median(found.makespan_ns / found.lower_bound_ns for found in predictions)


def _take(service: Service, number: int, case: Case, seed: int, microbatches: int) -> tuple[FlatPlan, ...]:
    service.want(number, case.batch(seed=seed, microbatches=microbatches))
    service.wait(number)
    return service.take(number)


class XlSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner process of VLM-XL is told."""

    placement: Placement
    replicas: int


@cache
def xl_case() -> Case:
    """VLM-XL as the paper simulates it on 16384 GPUs, batches drawn as for its smaller setups."""
    return replace(cases()["VLM-L"], name="VLM-XL", workers=WORKERS)


def xl_planning(setup: XlSetup) -> Planning:
    case = xl_case()
    return Planning(
        graph=case.graph,
        placement=setup.placement,
        costs=case.costs,
        policy="dynamic",
        options=PolicyOptions(chunks_per_worker=CHUNKS),
        num_replicas=setup.replicas,
        budget_bytes=case.budget_bytes,
    )


def main() -> None:
    if sys.argv[1:2] == [PLANNER]:
        del sys.argv[1]
        planner_process.main(lambda begin: xl_planning(_setup_of(begin)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run of each kind, within a minute")
    quick = parser.parse_args().quick
    cores = machine.cores(2)
    before = machine.probe(cores)
    machine.report("start", before)
    figures: dict[str, object] = {}
    for line in measured(quick, figures):
        print(line, flush=True)
    after = machine.probe(cores)
    machine.report("end", after)
    machine.exit_if_busy(before, after)
    print(json.dumps(figures))


def measured(quick: bool, figures: dict[str, object]) -> Iterator[str]:
    """Lines to show; fills in `figures` on the way."""
    found = training(runs=1, steps=WARM_UP + 4, microbatches=4) if quick else training()
    figures["wait_share"], figures["service_slowdown"] = found.wait_share, found.service_slowdown
    seconds = statistics.median(step.step_ns for step in found.planned) / 1e9
    yield f"wait_share          {found.wait_share:8.4f}   target <= 0.01, {len(found.planned)} steps of {seconds:.2f} s"
    yield f"service_slowdown    {found.service_slowdown:8.4f}   target <= 1.03"
    figures["plans_16k_gpus_s"], figures["plans_16k_over_bound"] = taken, over = (
        (None, None) if quick else plans_16k_gpus()
    )
    yield f"plans_16k_gpus_s    {_figure(taken)}   target <= 30, {REPLICAS} replicas"
    yield f"plans_16k_over_bound {_figure(over)}"


def _figure(value: float | None) -> str:
    return " " * 8 if value is None else f"{value:8.2f}"


def _trained(output: Path, settings: list[str]) -> list[StepMetrics]:
    """The counted steps of one run."""
    command = [sys.executable, "-m", "pipeweaver", "train", str(JOB)]
    for setting in [f"run.output={output}", *settings]:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"training failed with exit code {done.returncode}:\n{done.stdout}")
    return read_metrics(output / "metrics.jsonl")[WARM_UP:]


def _setup_of(begin: Begin) -> XlSetup:
    return msgspec.msgpack.decode(begin.setup, type=XlSetup)


if __name__ == "__main__":
    main()
