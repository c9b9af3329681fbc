"""The cost of a stage from those of its layers, for many parts at once.

    runs = (Run(layer=embedding, backward=True, repeats=1), Run(layer=block, backward=True, repeats=20))
    stage_costs(runs, [costs of the embedding, costs of a block], parts, machine, layout)     # one per part

Times are summed in whole nanoseconds, so that equal layers together take what they take one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.costs import StageCost
from pipeweaver.semu.latency import LayerCosts, Layout
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
    runs: Sequence[Run], costs: Sequence[LayerCosts], parts: Sequence[Sums], machine: Machine, layout: Layout
) -> list[StageCost]:
    """Costs of a stage on each part, from costs of a layer of each run on all of them."""
    degree, beside = layout.tensor_parallel, machine.overheads
    none = np.zeros(len(parts), np.int64)
    forward, first, second, load_ns = (np.zeros(len(parts)) for _ in range(4))
    weight, loaded, put_off = none, none, none
    own: list[Ints] = []
    held: list[Ints] = []
    before = None
    for run, cost in zip(runs, costs, strict=True):
        phases = run.repeats * np.rint(cost.phase_ns)
        forward += phases[:, 0]
        for name in cost.structure.loaded:
            num_bytes = cost.tensor_bytes(name)
            loaded = loaded + num_bytes
            load_ns += _load_ns(name, _num_items(parts), num_bytes, machine, layout)
        own.append(none)
        held.append(none)
        if run.backward:
            first += phases[:, 1]
            second += phases[:, 2]
            weight = weight + run.repeats * cost.weight_bytes * degree
            put_off = put_off + run.repeats * cost.launches
            own[-1] = cost.saved_bytes * degree
            entering = _between_bytes(before, cost, layout) if before else none
            between = _between_bytes(cost, cost, layout)
            held[-1] = run.repeats * own[-1] + entering + (run.repeats - 1) * between
        before = cost
    learns = any(run.backward for run in runs)
    # Each kind of layer has the part make its own tables.
    shared = {run.layer.spec.kind: cost.shared_bytes for run, cost in zip(runs, costs, strict=True)}
    forward_live = [cost.forward_live * degree for cost in costs]
    backward_live = [cost.backward_live * degree * run.backward for run, cost in zip(runs, costs, strict=True)]
    backward = first + second + beside.stage_backward_ns if learns else none
    input_ns = first + put_off * beside.split_ns + beside.stage_backward_ns if learns else none
    columns = StageCost(
        forward_ns=forward + beside.stage_forward_ns,  # type: ignore[arg-type]
        backward_ns=backward,  # type: ignore[arg-type]
        load_ns=load_ns,  # type: ignore[arg-type]
        input_ns=input_ns,  # type: ignore[arg-type]
        weight_ns=second * beside.split_weight,  # type: ignore[arg-type]
        loaded_bytes=loaded,  # type: ignore[arg-type]
        saved_bytes=sum(held, none) + sum(shared.values(), none) * degree * learns,  # type: ignore[arg-type]
        forward_workspace_bytes=_workspace(forward_live, own, held),  # type: ignore[arg-type]
        backward_workspace_bytes=_workspace(backward_live, own, held),  # type: ignore[arg-type]
        weight_bytes=weight,  # type: ignore[arg-type]
    )
    known = [np.rint(column).astype(np.int64).tolist() for column in columns[:10]]
    return [StageCost(*row) for row in zip(*known, strict=True)]


def _num_items(parts: Sequence[Sums]) -> Ints:
    names = parts[0].family.names
    if "items" not in names:
        return np.zeros(len(parts), np.int64)
    return np.array([part.values[names.index("items")] for part in parts], np.int64)


def _load_ns(name: str, num_items: Ints, num_bytes: Ints, machine: Machine, layout: Layout) -> Floats:
    found = machine.loads.get(name)
    if found is None:
        return 1e9 * num_bytes / layout.tensor_parallel / machine.host_bandwidth
    return found.part_ns + num_items * found.item_ns + num_bytes * found.byte_ns


def _between_bytes(before: LayerCosts, after: LayerCosts, layout: Layout) -> Ints:
    """Bytes on a worker of the tensors between two layers that either of them holds for its backward."""
    total = np.zeros(len(after.values), np.int64)
    for name in after.structure.saved_inputs | before.structure.saved_outputs:
        sent = before.tensor_bytes(f"out.{name}") > 0
        total += sent * (after.tensor_bytes(name) * layout.tensor_parallel // layout.row_cut)
    return total


def _workspace(live: Sequence[Ints], own: Sequence[Ints], held: Sequence[Ints]) -> Ints:
    """What a stage needs beyond all that it saves, `held` by runs of equal layers, of which the last one peaks.

    A layer that holds `live` while it runs keeps `own` of it; the layers after it hold nothing yet (forward) or
    nothing any more (backward).
    """
    after: Ints = sum(held, np.zeros_like(held[0]))
    worst = np.zeros_like(after)
    for bytes_live, bytes_own, bytes_held in zip(live, own, held, strict=True):
        after = after - bytes_held
        worst = np.maximum(worst, bytes_live - bytes_own - after)
    return worst
