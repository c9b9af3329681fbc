"""Rules "edges" and "transfers": every input row is the right row of the right item, and travels once.

What must enter each chunk follows from graph and placement; which rows, from the items of its parts (`rows.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeweaver.model.graph import ModelGraph, TensorSpec, positions
from pipeweaver.schedule.flat import FlatPlan, Ints, starts
from pipeweaver.schedule.gradients import gradients_of
from pipeweaver.schedule.ir import ITEM_SIZES, Placement
from pipeweaver.schedule.verify.rows import check_rows
from pipeweaver.schedule.verify.stages import covered_of
from pipeweaver.schedule.verify.words import PlanError


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor that enters chunk `chunk` from others as `name`: `spec`, which layer `position` of `origin` sends.

    `supplies` [chunks]: those that run that layer. `grad`: its gradient flows back.
    """

    chunk: int
    name: str
    origin: str
    position: int
    spec: TensorSpec
    grad: bool
    supplies: NDArray[np.bool_]


def check_edges(plan: FlatPlan, graph: ModelGraph, dtype: str) -> None:
    """Trace every input's rows to the items that they must come from, and compare with what the edges bring."""
    head, edges = plan.head, plan.edges
    parts = starts([len(of) for of in head.parts])
    _check_ends(plan, parts)
    inputs = _inputs_of(graph, head.placement)
    names = {name: number for number, name in enumerate(plan.names)}
    # A column for names that no edge has.
    number_of = np.full((len(head.placement.chunks), len(names) + 1), -1, np.int64)
    for number, one in enumerate(inputs):
        number_of[one.chunk, names.get(one.name, len(names))] = number
    of = number_of[edges.destination_chunk, edges.input]
    for e in np.nonzero(of < 0)[0][:1].tolist():
        c, p = edges.destination_chunk[e], edges.destination_part[e]
        raise PlanError(
            "edges", f"edge {e} brings {plan.names[edges.input[e]]} to chunk {c} part {p}, which does not take it"
        )
    if inputs:
        _check_kinds(plan, inputs, of, dtype)
        check_rows(plan, [(one.chunk, one.name, one.origin, one.spec.rows) for one in inputs], of)


def check_transfers(plan: FlatPlan) -> None:
    edges, transfers = plan.edges, plan.transfers
    worker = np.array([chunk.worker for chunk in plan.head.placement.chunks], np.int64)
    sender, receiver = worker[edges.source_chunk], worker[edges.destination_chunk]
    expected = np.zeros((len(sender), 2), np.int64)
    expected[:, 0] = sender != receiver
    expected[:, 1] = expected[:, 0] * (edges.grad != 0) * (not plan.head.forward_only)
    for t in np.nonzero((transfers.edge < 0) | (transfers.edge >= len(sender)))[0][:1].tolist():
        raise PlanError("transfers", f"transfer {t} is of edge {transfers.edge[t]} of {len(sender)}")
    found = np.bincount(transfers.edge * 2 + transfers.phase, minlength=2 * len(sender)).reshape(-1, 2)
    for e, phase in np.argwhere(found != expected)[:1].tolist():
        raise PlanError(
            "transfers",
            f"edge {e} direction {'FB'[phase]}: {found[e, phase]} transfers instead of {expected[e, phase]}",
        )
    e, back = transfers.edge, transfers.phase == 1
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(edges.runs[:, 2])])
    num_rows = rows[edges.run_start[e + 1]] - rows[edges.run_start[e]]
    item_bytes = np.array([ITEM_SIZES.get(name, 0) for name in plan.names], np.int64)
    wanted = np.stack(
        [
            np.where(back, receiver[e], sender[e]),
            np.where(back, sender[e], receiver[e]),
            num_rows,
            edges.width[e],
            edges.dtype[e],
            num_rows * edges.width[e] * item_bytes[edges.dtype[e]],
        ]
    )
    got = np.stack(
        [transfers.sender, transfers.receiver, transfers.rows, transfers.width, transfers.dtype, transfers.num_bytes]
    )
    for t in np.nonzero((wanted != got).any(axis=0))[0][:1].tolist():
        raise PlanError(
            "transfers",
            f"transfer {t} is (sender, receiver, shape, dtype, bytes) {_transfer(plan, got[:, t])}; "
            f"its edge says {_transfer(plan, wanted[:, t])}",
        )


def _transfer(plan: FlatPlan, values: Ints) -> tuple[object, ...]:
    sender, receiver, rows, width, dtype, num_bytes = values.tolist()
    return sender, receiver, (rows, width), plan.names[dtype], num_bytes


def _check_ends(plan: FlatPlan, parts: Ints) -> None:
    edges, chunks = plan.edges, plan.head.placement.chunks
    counts = np.diff(parts)
    for c, p in ((edges.source_chunk, edges.source_part), (edges.destination_chunk, edges.destination_part)):
        exists = (c >= 0) & (c < len(chunks)) & (p >= 0)
        exists[exists] = p[exists] < counts[c[exists]]
        for e in np.nonzero(~exists)[0][:1].tolist():
            raise PlanError("edges", f"edge {e} joins part {p[e]} of chunk {c[e]}, which does not exist")
    tasks = {task: number for number, task in enumerate(dict.fromkeys(chunk.task for chunk in chunks))}
    task = np.array([tasks[chunk.task] for chunk in chunks], np.int64)
    for e in np.nonzero(task[edges.source_chunk] != task[edges.destination_chunk])[0][:1].tolist():
        raise PlanError("edges", f"edge {e} joins two tasks")


def _check_kinds(plan: FlatPlan, inputs: tuple[Input, ...], of: Ints, dtype: str) -> None:
    """All edges into an input come from the right layer, and are the right tensor. `of` [E]: the input of each edge."""
    edges = plan.edges
    supplied = np.stack([one.supplies for one in inputs])[of, edges.source_chunk]
    for e in np.nonzero(~supplied)[0][:1].tolist():
        one = inputs[of[e]]
        text = f"the source does not run layer {one.position} of {one.origin}"
        raise PlanError("edges", f"{_edge_text(plan, one, e)}: {text}")
    names = {name: number for number, name in enumerate(plan.names)}
    kinds = [(one.spec.name, one.spec.width, dtype if one.spec.dtype == "model" else one.spec.dtype) for one in inputs]
    wanted = np.array([(names.get(output, -1), width, names.get(kind, -1)) for output, width, kind in kinds], np.int64)
    grads = np.array([one.grad for one in inputs], np.bool_)
    wrong = (edges.output != wanted[of, 0]) | (edges.width != wanted[of, 1]) | (edges.dtype != wanted[of, 2])
    wrong |= (edges.grad != 0) != grads[of]
    for e in np.nonzero(wrong)[0][:1].tolist():
        one = inputs[of[e]]
        got = (plan.names[edges.output[e]], int(edges.width[e]), plan.names[edges.dtype[e]], bool(edges.grad[e]))
        text = f"is (tensor, width, dtype, gradient) {got}; should be {(*kinds[of[e]], one.grad)}"
        raise PlanError("edges", f"{_edge_text(plan, one, e)}: {text}")


def _edge_text(plan: FlatPlan, one: Input, e: int) -> str:
    source, part = plan.edges.source_chunk[e], plan.edges.destination_part[e]
    return f"edge {e}, {one.name} from chunk {source} to chunk {one.chunk} part {part}"


def _inputs_of(graph: ModelGraph, placement: Placement) -> tuple[Input, ...]:
    """Every tensor that enters a chunk from others; found once for a graph and a placement, and kept."""
    key = (id(graph), placement)
    if key not in _known:
        _known[key] = (graph, _inputs(graph, placement))  # the graph is kept, so that no other one gets its id
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[key][1]


_MOST_KNOWN = 64
_known: OrderedDict[tuple[int, Placement], tuple[ModelGraph, tuple[Input, ...]]] = OrderedDict()


def _inputs(graph: ModelGraph, placement: Placement) -> tuple[Input, ...]:
    gradients, chunks = gradients_of(graph), placement.chunks
    covered = [frozenset(of) for of in covered_of(graph, placement)]
    layers = {module.name: dict(positions(module)) for module in graph.modules}
    sent = [(flow, *graph.sent(flow)) for flow in graph.flows]
    found = []
    for number, chunk in enumerate(chunks):
        entering: list[tuple[str, str, int, TensorSpec]] = []
        before = min(covered[number]) - 1
        if before in layers[chunk.module]:
            entering += [(spec.name, chunk.module, before, spec) for spec in layers[chunk.module][before].carries]
        for flow, position, spec in sent:
            if flow.destination != chunk.module or (flow.source == chunk.module and position in covered[number]):
                continue
            if any(flow.name in layers[chunk.module][p].reads for p in covered[number]):
                entering.append((flow.name, flow.source, position, spec))
        for name, origin, position, spec in entering:
            runs = [other.module == origin and position in covered[c] for c, other in enumerate(chunks)]
            grad = spec.grad and gradients.flows(origin, position, chunk.module, name, covered[number])
            found.append(
                Input(
                    chunk=number,
                    name=name,
                    origin=origin,
                    position=position,
                    spec=spec,
                    grad=grad,
                    supplies=np.array(runs, np.bool_),
                )
            )
    return tuple(found)
