"""The cost of a stage from those of its layers, for many parts at once.

    runs = (Run(layer=embedding, backward=True, repeats=1), Run(layer=block, backward=True, repeats=20))
    stage_costs(runs, [costs of the embedding, costs of a block], parts, machine, layout)     # one per part

Times are summed in whole nanoseconds, so that equal layers together take what they take one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from pipeweaver.costs import StageCost
from pipeweaver.semu.counts import Structure
from pipeweaver.semu.latency import (
    BACKWARD_LIVE,
    FORWARD_LIVE,
    LAUNCHES,
    SAVED_BYTES,
    SHARED_BYTES,
    WEIGHT_BYTES,
    LayerCosts,
    Layout,
)
from pipeweaver.semu.layer import LayerGraph
from pipeweaver.semu.machine import Machine
from pipeweaver.semu.symbolic import Sums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Run(NamedTuple):
    """`repeats` equal layers, one after the other; `backward`: they take part in the backward."""

    layer: LayerGraph
    backward: bool
    repeats: int


def stage_costs(
    runs: tuple[Run, ...], costs: Sequence[LayerCosts], parts: Sequence[Sums], machine: Machine, layout: Layout
) -> list[StageCost]:
    """Costs of a stage on each part, from costs of a layer of each run on all of them."""
    places = _places(runs, tuple(cost.structure for cost in costs), machine)
    tensors = [len(cost.structure.tensors) for cost in costs]
    sizes = np.zeros((len(runs), len(parts), max(tensors)))
    for number, (cost, count) in enumerate(zip(costs, tensors, strict=True)):
        sizes[number, :, :count] = cost.values[:, cost.values.shape[1] - count :]
    found = _stages(
        np.stack([cost.phase_ns for cost in costs]),
        np.stack([cost.numbers for cost in costs]),
        sizes,
        np.array([num_items(part) for part in parts], np.int64),
        places,
        layout.tensor_parallel,
        layout.row_cut,
    )
    return [StageCost(*row) for row in found.tolist()]


def num_items(part: Sums) -> int:
    """Of a part: all but its layers' counts that the cost of a stage depends on."""
    names = part.family.names
    return part.values[names.index("items")] if "items" in names else 0


class _Places(NamedTuple):
    """All of a stage that does not change with its sizes, as arrays over its R runs.

    `shares` [R]: whether a run's layers are the last of their kind, whose tables of the part count: each kind of layer
    has the part make its own. Rows of `between`: run before, place of a tensor that it hands on, run after, place of
    it as that one's input, how often it is held there for backward. Rows of `loads`: run, place of what is loaded (-1:
    nowhere), ns of a part, an item and a byte, and whether each device of the worker loads but its share. The rest as in
    `Overheads`.
    """

    repeats: Ints
    backward: NDArray[np.bool_]
    shares: NDArray[np.bool_]
    between: Ints
    loads: Floats
    stage_forward_ns: float
    stage_backward_ns: float
    split_ns: float
    split_weight: float


@lru_cache(maxsize=4096)
def _places(runs: tuple[Run, ...], structures: tuple[Structure, ...], machine: Machine) -> _Places:
    between, loads = [], []
    for number, (run, after) in enumerate(zip(runs, structures, strict=True)):
        for name in after.loaded:
            found = machine.loads.get(name)
            each = (0.0, 0.0, 1e9 / machine.host_bandwidth, 1) if found is None else (*astuple(found), 0)
            loads.append((number, after.boundary.get(name, -1), *each))
        for first, times in ((number - 1, 1), (number, run.repeats - 1)):
            if first >= 0 and times and run.backward:
                before = structures[first]
                for name in after.saved_inputs | before.saved_outputs:
                    if f"out.{name}" in before.boundary and name in after.boundary:
                        row = (first, before.boundary[f"out.{name}"], number, after.boundary[name], times)
                        between.append(row)
    kinds = [run.layer.spec.kind for run in runs]
    return _Places(
        repeats=np.array([run.repeats for run in runs], np.int64),
        backward=np.array([run.backward for run in runs], np.bool_),
        shares=np.array([kind not in kinds[number + 1 :] for number, kind in enumerate(kinds)], np.bool_),
        between=np.array(between, np.int64).reshape(-1, 5),
        loads=np.array(loads, np.float64).reshape(-1, 6),
        stage_forward_ns=machine.overheads.stage_forward_ns,
        stage_backward_ns=machine.overheads.stage_backward_ns,
        split_ns=machine.overheads.split_ns,
        split_weight=machine.overheads.split_weight,
    )


@numba.njit(cache=True)
def _stages(phase_ns, numbers, sizes, items, places, degree, row_cut):  # type: ignore[no-untyped-def]
    """[parts, 10] the first columns of `StageCost`. `phase_ns` [R, parts, 3], `numbers` [R, parts, .], `sizes` [R, parts,
    tensors], `items` [parts]."""
    num_runs, num_parts = phase_ns.shape[:2]
    found = np.zeros((num_parts, 10), np.int64)
    for p in range(num_parts):
        forward, first, second, load_ns = 0.0, 0.0, 0.0, 0.0
        loaded, weight, launches, shared = 0, 0, 0, 0
        learns = False
        held = np.zeros(num_runs, np.int64)
        for r in range(num_runs):
            repeats = places.repeats[r]
            forward += repeats * np.rint(phase_ns[r, p, 0])
            if places.shares[r]:
                shared += numbers[r, p, SHARED_BYTES]
            if places.backward[r]:
                learns = True
                first += repeats * np.rint(phase_ns[r, p, 1])
                second += repeats * np.rint(phase_ns[r, p, 2])
                weight += repeats * numbers[r, p, WEIGHT_BYTES] * degree
                launches += repeats * numbers[r, p, LAUNCHES]
                held[r] = repeats * numbers[r, p, SAVED_BYTES] * degree
        for row in places.between:
            if sizes[row[0], p, row[1]] > 0:
                held[row[2]] += row[4] * (int(sizes[row[2], p, row[3]]) * degree // row_cut)
        for row in places.loads:
            num_bytes = sizes[int(row[0]), p, int(row[1])] if row[1] >= 0 else 0.0
            loaded += int(num_bytes)
            load_ns += row[2] + items[p] * row[3] + num_bytes / (degree if row[5] else 1) * row[4]
        # What the stage needs beyond all that it saves: a layer that holds `live` while it runs keeps its own of it; the
        # layers after it hold nothing yet (forward) or nothing any more (backward). The last of equal layers peaks.
        after = np.sum(held)
        total, before_live, back_live = after, 0, 0
        for r in range(num_runs):
            after -= held[r]
            own = numbers[r, p, SAVED_BYTES] * degree * places.backward[r]
            before_live = max(before_live, numbers[r, p, FORWARD_LIVE] * degree - own - after)
            back_live = max(back_live, numbers[r, p, BACKWARD_LIVE] * degree * places.backward[r] - own - after)
        found[p, 0] = np.rint(forward + places.stage_forward_ns)
        if learns:
            found[p, 1] = np.rint(first + second + places.stage_backward_ns)
            found[p, 3] = np.rint(first + launches * places.split_ns + places.stage_backward_ns)
            total += shared * degree
        found[p, 2] = np.rint(load_ns)
        found[p, 4] = np.rint(second * places.split_weight)
        found[p, 5], found[p, 6] = loaded, total
        found[p, 7], found[p, 8], found[p, 9] = before_live, back_live, weight
    return found
