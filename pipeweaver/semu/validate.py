"""Measured runs against the emulator: errors row by row, the worst ones, and all of it as one JSON object.

    validation = validate("b200_llama3_70b_measured.csv", "B200")
    print("\\n".join(render(validation)))

Errors are fractions, predicted / measured - 1. Memory is compared GPU by GPU. The last line of the rendering is
{"rows", "time_mape", "time_worst", "memory_mape", "memory_worst", "rank_correlation"} and what the machine's
factors rest on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeweaver.semu.job import Known, StepEstimate, estimate_job
from pipeweaver.semu.machine import Machine, load_machine
from pipeweaver.semu.measured import Measured, read_measured


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Rows with their estimates, in the order of the file."""

    machine: Machine
    rows: tuple[Measured, ...]
    estimates: tuple[StepEstimate, ...]

    @property
    def time_errors(self) -> list[float]:
        return time_errors(self.rows, self.estimates)

    @property
    def memory_errors(self) -> list[float]:
        """One per GPU of the rows whose memory was measured."""
        return [
            error
            for row, estimate in zip(self.rows, self.estimates, strict=True)
            for error in memory_errors(row, estimate)
        ]


def validate(path: str | Path, machine: str) -> Validation:
    """Estimate all rows of a file on a machine. Raises ValueError, naming the place, at rows that are no measurements."""
    loaded, rows = load_machine(machine), read_measured(path)
    known: Known = {}
    estimates = tuple(estimate_job(row.job, loaded, known) for row in rows)
    return Validation(machine=loaded, rows=rows, estimates=estimates)


def time_errors(rows: Sequence[Measured], estimates: Sequence[StepEstimate]) -> list[float]:
    """predicted / measured - 1 of the step time, row by row."""
    pairs = zip(rows, estimates, strict=True)
    return [estimate.step_ns / 1e6 / row.iteration_ms - 1 for row, estimate in pairs]


def memory_errors(row: Measured, estimate: StepEstimate) -> list[float]:
    """predicted / measured - 1 of the peak of each GPU; empty where it was not measured."""
    per_rank = row.job.num_devices // row.job.pipeline_parallel
    return [estimate.peak_bytes[gpu // per_rank] / 2**30 / measured - 1 for gpu, measured in enumerate(row.peak_gib)]


def summary(validation: Validation) -> dict[str, float | int | None]:
    """The figures of a validation."""
    times, memory = validation.time_errors, validation.memory_errors
    predicted = [estimate.step_ns for estimate in validation.estimates]
    return {
        "rows": len(validation.rows),
        "time_mape": mean_absolute(times),
        "time_worst": max(map(abs, times)),
        "memory_mape": mean_absolute(memory) if memory else None,
        "memory_worst": max(map(abs, memory)) if memory else None,
        "rank_correlation": rank_correlation([row.iteration_ms for row in validation.rows], predicted),
    }


def render(validation: Validation, *, worst: int = 5) -> list[str]:
    """A table of all rows, the worst ones, what was calibrated, and the figures as JSON."""
    machine, times = validation.machine, validation.time_errors
    width = max(len(row.name) for row in validation.rows)
    lines = [
        f"{'row':{width}} {'measured ms':>12} {'emulated ms':>12} {'error':>8}  memory GiB, error by pipeline rank"
    ]
    for row, estimate, error in zip(validation.rows, validation.estimates, times, strict=True):
        line = f"{row.name:{width}} {row.iteration_ms:12.1f} {estimate.step_ns / 1e6:12.1f} {error:+8.1%}"
        lines.append(f"{line}  {_memory(row, estimate)}".rstrip())
    order = sorted(range(len(times)), key=lambda i: -abs(times[i]))[:worst]
    lines += ["", "worst: " + "; ".join(f"{validation.rows[i].name} {times[i]:+.1%}" for i in order)]
    lines.append(f"machine {machine.name}: {machine.calibrated or 'not calibrated'}; {machine.source}")
    lines.append(json.dumps(summary(validation)))
    return lines


def rank_correlation(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Spearman's: correlation of the ranks, equal values sharing theirs."""
    if len(measured) < 2:
        return 1.0
    return float(np.corrcoef(_ranks(measured), _ranks(predicted))[0, 1])


def mean_absolute(errors: Sequence[float]) -> float:
    return float(np.mean(np.abs(errors)))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(order):
        places.setdefault(value, []).append(place)
    return [float(np.mean(places[value])) for value in values]


def _memory(row: Measured, estimate: StepEstimate) -> str:
    if not row.peak_gib:
        return ""
    per_rank = row.job.num_devices // row.job.pipeline_parallel
    errors = memory_errors(row, estimate)
    owners = [max(parts, key=lambda name: parts[name]) for parts in estimate.memory]
    return ", ".join(
        f"{peak / 2**30:.2f} {errors[rank * per_rank]:+.1%} (most: {owners[rank]})"
        for rank, peak in enumerate(estimate.peak_bytes)
    )
