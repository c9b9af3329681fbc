"""A few constants of a machine and a framework, fitted to measured step times; scored on others.

What the tables do not say of a cluster is how well memory and network are used there: `Constants` scales those and
nothing else, matmuls keep the factors of the machine. The fit is a least squares of log(predicted / measured), outliers
weighted down, each constant drawn to what one expects of it; the number of rows does not matter to how many there
are. `cross_fit` splits rows by group in two halves and predicts each half with the constants of the other:

    cross_fit(rows, load_machine("A100"), group=lambda row: (row.job.layers, row.job.num_layers))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as changed
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pipeweaver.semu.job import Job, Known, StepEstimate, balanced_pipeline_ns, estimate_job
from pipeweaver.semu.machine import CollectiveFactors, Link, Machine
from pipeweaver.semu.measured import Measured

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is fitted: seven numbers for all rows of a family.

    `memory`: share of the memory bandwidth; `floor_ns`: least time of a kernel; `island` and `cluster`: shares of
    the links that all-reduces reach inside and between nodes; `hop_ns`: latency of a hop of a ring inside a node;
    `transfer`: share of the links that sends from stage to stage reach; `step_ns`: once per step.
    """

    memory: float
    floor_ns: float
    island: float
    cluster: float
    hop_ns: float
    transfer: float
    step_ns: float


EXPECTED = Constants(
    memory=0.9, floor_ns=20_000.0, island=0.74, cluster=0.6, hop_ns=5_500.0, transfer=0.6, step_ns=50e6
)
"""Where a fit starts and is drawn to: memory as in the table of A100-PCIe, the island as in that of B200."""

DEVIATION = Constants(memory=0.2, floor_ns=1.0, island=0.25, cluster=0.5, hop_ns=1.0, transfer=0.5, step_ns=1.0)
"""Deviations of the logarithms: shares are known to tens of percent, latencies to a factor of three."""

_NAMES = tuple(EXPECTED.__dataclass_fields__)


def apply_constants(machine: Machine, job: Job, constants: Constants) -> tuple[Machine, Job]:
    """The machine with these shares and latencies, the job with the framework's time per step."""
    island = _link(machine.links.island, constants.island, constants.hop_ns, constants.transfer)
    cluster = _link(machine.links.cluster, constants.cluster, None, constants.transfer)
    return (
        changed(
            machine,
            memory=changed(machine.memory, factor=constants.memory, access_ns=0.0),
            floor_ns=constants.floor_ns,
            links=changed(machine.links, island=island, cluster=cluster),
        ),
        replace(job, framework=replace(job.framework, step_ns=constants.step_ns)),
    )


def predict(
    rows: Sequence[Measured], machine: Machine, constants: Constants, *, exact: bool = True
) -> tuple[StepEstimate, ...]:
    """Estimates of rows with these constants; not `exact`: 1F1B by its closed form for equal middle stages."""
    known: Known = {}
    fitted: Machine | None = None
    found = []
    for row in rows:
        again, job = apply_constants(machine, row.job, constants)
        fitted = fitted or again
        if exact:
            found.append(estimate_job(job, fitted, known))
        else:
            found.append(estimate_job(job, fitted, known, compose=balanced_pipeline_ns))
    return tuple(found)


def fit(rows: Sequence[Measured], machine: Machine) -> Constants:
    """Constants of the rows' step times."""
    measured = np.array([row.iteration_ms for row in rows])
    expected, deviation = _logs(EXPECTED), np.array([getattr(DEVIATION, name) for name in _NAMES])

    def residuals(logs: Floats) -> Floats:
        estimates = predict(rows, machine, _constants(logs), exact=False)
        off = np.log(np.array([estimate.step_ns for estimate in estimates]) / 1e6 / measured)
        # Rows are off by about 6 %: so much a constant has to explain to move by its deviation.
        return np.concatenate([off, 0.06 * (logs - expected) / deviation])

    solved = least_squares(residuals, expected, loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=10)
    return _constants(solved.x)


@dataclass(frozen=True, kw_only=True)
class CrossFit:
    """`estimates` in the order of the rows, each with `constants[1 - half[i]]`, fitted on the other half."""

    constants: tuple[Constants, Constants]
    half: tuple[int, ...]
    estimates: tuple[StepEstimate, ...]


def cross_fit(
    rows: Sequence[Measured], machine: Machine, *, group: Callable[[Measured], Hashable], exact: bool = True
) -> CrossFit:
    """Fit each half of the groups, taken alternately in their order, and predict it with the constants of the other."""
    groups = sorted({group(row) for row in rows})  # type: ignore[type-var]
    half = [groups.index(group(row)) % 2 for row in rows]
    halves = [[row for row, h in zip(rows, half, strict=True) if h == which] for which in (0, 1)]
    constants = (fit(halves[0], machine), fit(halves[1], machine))
    predicted = [iter(predict(halves[which], machine, constants[1 - which], exact=exact)) for which in (0, 1)]
    return CrossFit(constants=constants, half=tuple(half), estimates=tuple(next(predicted[h]) for h in half))


def _link(link: Link, all_reduce: float, hop_ns: float | None, transfer: float) -> Link:
    hop = link.all_reduce.hop_ns if hop_ns is None else hop_ns
    return changed(
        link,
        all_reduce=CollectiveFactors(factor=min(all_reduce, 2.0), hop_ns=hop),
        point_to_point=changed(link.point_to_point, factor=min(transfer, 2.0)),
    )


def _logs(constants: Constants) -> Floats:
    return np.log([getattr(constants, name) for name in _NAMES])


def _constants(logs: Floats) -> Constants:
    return Constants(**dict(zip(_NAMES, np.exp(logs).tolist(), strict=True)))
