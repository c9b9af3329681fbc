"""How the emulator composes a pipeline: layer times from runs without one predict runs with one.

Rows without a pipeline are sums: of a step, per microbatch, x for each layer and y for embedding and head, and once
per step u for each layer and w besides (update, reduction over replicas). x and y by (hidden, tensor-parallel degree,
microbatch size), u and w by (hidden, degree, replicas) are found from all of them together; 1F1B over stages of L / p
layers with y on the last then has to give the step times of the rows with a pipeline, of which it saw none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeweaver.semu.job import pipeline_ns, stage_transfer_ns
from pipeweaver.semu.machine import Machine
from pipeweaver.semu.measured import Measured

Floats = NDArray[np.float64]

FORWARD_SHARE = 1 / 3
"""Of a stage's time, with two matmuls in backward for each in forward."""


def compose(rows: Sequence[Measured], machine: Machine) -> dict[int, float]:
    """Predicted step time in ms, by number, of the rows with a pipeline; the machine gives transfer times."""
    times = {key: _LayerTimes(kept) for key, kept in _by_width(rows).items()}
    predicted = {}
    for number, row in enumerate(rows):
        job = row.job
        if job.pipeline_parallel == 1:
            continue
        found = times[_width(row), job.tensor_parallel]
        if job.data_parallel in found.once:
            per_layer, rest = found.once[job.data_parallel]
        else:
            # One replica of one device is no pipeline's neighbour: half the parameters, half the update.
            per_layer, rest = 2 * times[_width(row), 2 * job.tensor_parallel].once[job.data_parallel]
        layer, ends = found.microbatch[job.microbatch]
        layers = job.num_layers // job.pipeline_parallel
        stages = [layers * layer * 1e6] * job.pipeline_parallel
        stages[-1] += ends * 1e6
        makespan = pipeline_ns(
            [ns * FORWARD_SHARE for ns in stages],
            [ns * (1 - FORWARD_SHARE) for ns in stages],
            stage_transfer_ns(job, machine),
            job.num_microbatches,
        )
        predicted[number] = makespan / 1e6 + layers * per_layer + rest
    return predicted


class _LayerTimes:
    """Times in ms of one width and degree: `microbatch[size]` is (x, y), `once[replicas]` is (u, w)."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        sizes = sorted({row.job.microbatch for row in rows})
        replicas = sorted({row.job.data_parallel for row in rows})
        table = np.zeros((len(rows), 2 * len(sizes) + 2 * len(replicas)))
        for line, row in zip(table, rows, strict=True):
            size = 2 * sizes.index(row.job.microbatch)
            once = 2 * len(sizes) + 2 * replicas.index(row.job.data_parallel)
            layers, microbatches = row.job.num_layers, row.job.num_microbatches
            line[[size, size + 1, once, once + 1]] = layers * microbatches, microbatches, layers, 1
            line /= row.iteration_ms
        # Where rows do not tell x and y apart, embedding and head take a time per sample that others have too.
        ties = np.zeros((len(sizes), table.shape[1]))
        for i, size in enumerate(sizes):
            ties[i, 2 * i + 1] = 1e-4 / size
            ties[i, 2 * (i - 1) + 1] = -1e-4 / sizes[i - 1]
        solved = np.linalg.lstsq(
            np.concatenate([table, ties]), np.concatenate([np.ones(len(rows)), np.zeros(len(sizes))]), rcond=None
        )[0]
        pairs: list[Floats] = [solved[2 * i : 2 * i + 2] for i in range(len(solved) // 2)]
        self.microbatch = dict(zip(sizes, pairs[: len(sizes)], strict=True))
        self.once = dict(zip(replicas, pairs[len(sizes) :], strict=True))


def _by_width(rows: Sequence[Measured]) -> dict[tuple[int, int], list[Measured]]:
    found: dict[tuple[int, int], list[Measured]] = {}
    for row in rows:
        if row.job.pipeline_parallel == 1:
            found.setdefault((_width(row), row.job.tensor_parallel), []).append(row)
    return found


def _width(row: Measured) -> int:
    return row.job.layers.block.carries[0].width
