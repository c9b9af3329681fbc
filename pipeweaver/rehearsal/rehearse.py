"""Rehearse plans: run them with real workers, processes and transfers, on devices and links that only take their time.

    found = rehearse([Case(name="1f1b", graph=graph, steps=[plans], dtype="bfloat16")])
    found[0].steps[0].error          rehearsed over emulated step time - 1
    found[0].steps[0].worst          where the two are furthest apart

The plans say how long everything takes, on whatever machine their costs are of. Kernels are replaced by waiting and
tensors are one column wide, so 8 to 16 workers share the cores of a laptop; all else is the runtime that trains:
`runtime/worker.py`, `runtime/execution.py`, processes, Gloo, the watchdog.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeweaver.cluster import available_cores
from pipeweaver.model.graph import ModelGraph
from pipeweaver.rehearsal.links import marks_for
from pipeweaver.rehearsal.script import Report, Script, read_reports, scene, write_script
from pipeweaver.rehearsal.stretch import LEAST_STAGE_NS, stretch, stretched
from pipeweaver.runtime.launch import launch
from pipeweaver.runtime.process import RunError
from pipeweaver.schedule.ir import Measurement, Plan, Span

MOST_PER_CORE = 8
"""Workers that share a core without being late for it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Plans to rehearse, of one placement: steps[s][r] is that of replica r in step s. `name` is for reports."""

    name: str
    graph: ModelGraph
    steps: Sequence[Sequence[Plan]]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how much later (or earlier) an action ended than emulated, as a share of the emulated step."""

    share: float
    replica: int
    worker: int
    action: int


@dataclass(frozen=True, kw_only=True)
class RehearsedStep:
    """The stretched plans of all replicas, with what is emulated of them, and what was measured."""

    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]

    @property
    def emulated_ns(self) -> int:
        return max(plan.prediction.step_ns for plan in self.plans if plan.prediction is not None)

    @property
    def rehearsed_ns(self) -> int:
        return max(measurement.step_ns for measurement in self.measurements)

    @property
    def error(self) -> float:
        return self.rehearsed_ns / self.emulated_ns - 1

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Of all actions of all workers."""
        return tuple(
            Difference(
                share=(measured.end_ns - emulated.end_ns) / self.emulated_ns,
                replica=plan.replica,
                worker=worker,
                action=number,
            )
            for plan, measurement in zip(self.plans, self.measurements, strict=True)
            if plan.prediction is not None
            for worker, lanes in enumerate(zip(plan.prediction.spans, measurement.spans, strict=True))
            for number, (emulated, measured) in enumerate(zip(*lanes, strict=True))
        )

    @property
    def median(self) -> float:
        """Of the differences, signs left out."""
        return statistics.median(abs(difference.share) for difference in self.differences)

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda difference: abs(difference.share))


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A case, `factor` times as slow as its plans say. `overslept_ns`: how much too long each sleep of each worker was."""

    name: str
    factor: float
    steps: tuple[RehearsedStep, ...]
    overslept_ns: tuple[int, ...]


def rehearse(
    cases: Sequence[Case], *, watchdog_s: float = 60.0, least_stage_ns: int = LEAST_STAGE_NS
) -> list[Rehearsed]:
    """Rehearse all cases, one after the other, by the same workers, which are started on this machine.

    Raises ValueError if cases differ in workers or replicas, or a plan has no stage; RunError if a worker ends badly,
    which has then said why on stderr, with the exit code of the one that was first: a hang ends with the watchdog's.
    """
    if len({(len(plans), plan.placement.workers) for case in cases for plans in case.steps for plan in plans}) != 1:
        raise ValueError("cases of one rehearsal need the same number of workers and replicas, and at least one step")
    factors = [stretch(case.steps, least_stage_ns) for case in cases]
    steps = [[stretched(plans, factor) for plans in case.steps] for case, factor in zip(cases, factors, strict=True)]
    script = Script(
        scenes=tuple(scene(case.graph, plans, dtype=case.dtype) for case, plans in zip(cases, steps, strict=True)),
        watchdog_s=watchdog_s,
    )
    num_ranks = script.num_workers * script.num_replicas
    cores = len(available_cores())
    if num_ranks > MOST_PER_CORE * cores:
        warnings.warn(
            f"{num_ranks} worker processes on {cores} cores: the runtime itself will be late, and differences from the "
            f"emulation say little; {MOST_PER_CORE * cores} are fine",
            stacklevel=2,
        )
    with tempfile.TemporaryDirectory(prefix="pipeweaver-rehearsal-") as name:
        folder = Path(name)
        write_script(folder, script)
        marks_for(script.steps, folder / "marks")
        command = [sys.executable, "-m", "pipeweaver.rehearsal.process", name]
        code = launch(command, num_workers=num_ranks)
        if code == 130:  # said by the launcher
            raise KeyboardInterrupt
        if code:
            raise RunError("the rehearsal did not come to its end", code=code)
        reports = list(read_reports(folder, num_ranks))
    found, first = [], 0
    for case, factor, plans in zip(cases, factors, steps, strict=True):
        here = range(first, first + len(plans))
        first = here.stop
        found.append(
            Rehearsed(
                name=case.name,
                factor=factor,
                steps=tuple(put_together(plans[i - here.start], i, reports) for i in here),
                overslept_ns=tuple(ns for report in reports for ns in report.overslept_ns),
            )
        )
    return found


def put_together(plans: tuple[Plan, ...], step: int, reports: Sequence[Report]) -> RehearsedStep:
    """One step from the reports of all workers, replica by replica."""
    measurements = []
    for plan in plans:
        first = plan.replica * plan.placement.workers
        mine = [report.steps[step] for report in reports[first : first + plan.placement.workers]]
        measurements.append(
            Measurement(
                spans=tuple(times.spans for times in mine),
                transfers=tuple(
                    Span(*mine[transfer.receiver].moved[number]) for number, transfer in enumerate(plan.transfers)
                ),
                step_ns=max((times.spans[-1].end_ns for times in mine if times.spans), default=0),
            )
        )
    return RehearsedStep(plans=plans, measurements=tuple(measurements))
