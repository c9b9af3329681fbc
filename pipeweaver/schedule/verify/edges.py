"""Rules "edges" and "transfers": every input row is the right row of the right item, and travels once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.model.graph import ModelGraph, Module, TensorSpec, positions
from pipeweaver.schedule.flat import FlatEdges, FlatPlan, Ints, starts
from pipeweaver.schedule.gradients import Gradients
from pipeweaver.schedule.ir import ITEM_SIZES, Part, Plan, Rows
from pipeweaver.schedule.verify.stages import inside
from pipeweaver.schedule.verify.words import PlanError


class Run(NamedTuple):
    """`length` rows of an item, from its row `row` on, that stand at `at` in a packed tensor."""

    at: int
    item: int
    row: int
    length: int


def check_edges(plan: FlatPlan, graph: ModelGraph, dtype: str) -> None:
    """Trace every input's rows to the items that they must come from, and compare with what the edges bring."""
    gradients = Gradients(graph)
    head, edges = plan.head, plan.edges
    chunks = head.placement.chunks
    parts = starts([len(of) for of in head.parts])
    _check_ends(plan, parts)
    covered = [frozenset(inside(graph.by_name[chunk.module], chunk)) for chunk in chunks]
    linked: list[list[int]] = [[] for _ in head.items]
    for source, destination in head.links:
        linked[destination].append(source)
    packed = _Packed(head)
    names = {name: number for number, name in enumerate(plan.names)}
    # Edges into one input of one part follow each other in `order`.
    key = (parts[edges.destination_chunk] + edges.destination_part) * (len(names) + 1) + edges.input
    order = np.argsort(key, kind="stable")
    sorted_key = key[order]
    taken = np.zeros(len(order), np.bool_)
    for number, target in enumerate(chunks):
        module = graph.by_name[target.module]
        for name, origin, position, spec in _inputs(graph, module, covered[number]):
            input_key = np.arange(parts[number], parts[number + 1]) * (len(names) + 1) + names.get(name, len(names))
            first, stop = np.searchsorted(sorted_key, input_key), np.searchsorted(sorted_key, input_key, side="right")
            mine = np.concatenate([np.arange(a, b) for a, b in zip(first, stop, strict=True)] or [order[:0]])
            taken[mine] = True
            grad = spec.grad and gradients.flows(origin, position, module.name, name, covered[number])
            wanted = (spec.name, spec.width, dtype if spec.dtype == "model" else spec.dtype, grad)
            _check_kind(plan, order[mine], name, number, origin, position, wanted, covered)
            whole = _brought_whole(packed, number, origin == module.name, order, first, stop, spec.rows, edges)
            for part_number in np.nonzero(~whole)[0].tolist():
                expected = head.parts[number][part_number].items
                if origin != module.name:
                    expected = tuple(i for item in expected for i in linked[item] if head.items[i].module == origin)
                found = order[first[part_number] : stop[part_number]].tolist()
                problem = _compare(packed, [_Brought.of(plan, e) for e in found], expected, spec.rows)
                if problem:
                    raise PlanError("edges", f"{name} into chunk {number} part {part_number}: {problem}")
    for e in order[~taken][:1].tolist():
        c, p = edges.destination_chunk[e], edges.destination_part[e]
        raise PlanError(
            "edges", f"edge {e} brings {plan.names[edges.input[e]]} to chunk {c} part {p}, which does not take it"
        )


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


def _check_kind(
    plan: FlatPlan,
    found: Ints,
    name: str,
    number: int,
    origin: str,
    position: int,
    wanted: tuple[str, int, str, bool],
    covered: Sequence[frozenset[int]],
) -> None:
    """All edges into one input come from the right layer, and are the right tensor."""
    edges, chunks = plan.edges, plan.head.placement.chunks
    runs = np.array([chunk.module == origin and position in covered[c] for c, chunk in enumerate(chunks)], np.bool_)
    where = "edge {}, " + f"{name} from chunk {{}} to chunk {number} part {{}}"
    for e in found[~runs[edges.source_chunk[found]]][:1].tolist():
        text = where.format(e, edges.source_chunk[e], edges.destination_part[e])
        raise PlanError("edges", f"{text}: the source does not run layer {position} of {origin}")
    columns = (edges.output[found], edges.width[found], edges.dtype[found], edges.grad[found])
    for output, width, kind, grad in set(zip(*(column.tolist() for column in columns), strict=True)):
        got = (plan.names[output], width, plan.names[kind], bool(grad))
        if got != wanted:
            like = (columns[0] == output) & (columns[1] == width) & (columns[2] == kind) & (columns[3] == grad)
            e = int(found[like][0])
            text = where.format(e, edges.source_chunk[e], edges.destination_part[e])
            raise PlanError("edges", f"{text}: is (tensor, width, dtype, gradient) {got}; should be {wanted}")


def _brought_whole(
    packed: _Packed, number: int, own: bool, order: Ints, first: Ints, stop: Ints, size: str, edges: FlatEdges
) -> NDArray[np.bool_]:
    """[parts] of a chunk: those whose input one edge brings, whole and in order, from a part with the same items.

    Only an input from the module itself (`own`) can be seen to be so without looking at the items one by one.
    """
    plan = packed.plan
    parts = plan.parts[number]
    result = np.zeros(len(parts), np.bool_)
    if not own:
        return result
    total = packed.totals(parts, size)
    alone = np.nonzero(stop - first == 1)[0]
    alone = alone[np.diff(edges.run_start)[order[first[alone]]] == 1]
    e = order[first[alone]]
    runs = edges.runs[edges.run_start[e]]
    right = (runs[:, 0] == 0) & (runs[:, 1] == 0) & (runs[:, 2] == total[alone])
    for part, chunk, source in zip(
        alone[right].tolist(), edges.source_chunk[e][right].tolist(), edges.source_part[e][right].tolist(), strict=True
    ):
        others = plan.parts[chunk]
        result[part] = (others is parts and source == part) or others[source].items == parts[part].items
    # Nothing to bring, and nothing is brought.
    result |= (stop == first) & (total == 0)
    return result


class _Packed:
    """Packed tensors as items and offsets, computed once for equal items."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._offsets: dict[tuple[tuple[int, ...], str], list[int]] = {}
        self._totals: dict[tuple[int, str], Ints] = {}

    def totals(self, parts: tuple[Part, ...], size: str) -> Ints:
        """[parts] rows of each part."""
        key = (id(parts), size)
        if key not in self._totals:
            sizes = [sum(self.plan.items[i].sizes[size] for i in part.items) for part in parts]
            self._totals[key] = np.array(sizes, np.int64)
        return self._totals[key]

    def offsets(self, items: tuple[int, ...], size: str) -> list[int]:
        """First row of each item, and the number of all rows."""
        key = (items, size)
        if key not in self._offsets:
            self._offsets[key] = list(accumulate((self.plan.items[i].sizes[size] for i in items), initial=0))
        return self._offsets[key]

    def runs(self, items: tuple[int, ...], size: str, start: int, length: int, at: int) -> Iterator[Run]:
        """Rows [start, start + length) of a packed tensor, item by item, placed at `at`."""
        offsets = self.offsets(items, size)
        index = bisect_right(offsets, start) - 1
        while length > 0:
            row = start - offsets[index]
            taken = min(length, offsets[index + 1] - start)
            if taken > 0:
                yield Run(at, items[index], row, taken)
            at, start, length, index = at + taken, start + taken, length - taken, index + 1


class _Brought(NamedTuple):
    """An edge's source (chunk, part) and rows."""

    source: tuple[int, int]
    rows: tuple[Rows, ...]

    @classmethod
    def of(cls, plan: FlatPlan, number: int) -> _Brought:
        edges = plan.edges
        runs = edges.runs[edges.run_start[number] : edges.run_start[number + 1]].tolist()
        source = (int(edges.source_chunk[number]), int(edges.source_part[number]))
        return cls(source, tuple(Rows(*run) for run in runs))


def _compare(packed: _Packed, edges: list[_Brought], expected: tuple[int, ...], size: str) -> str:
    """What is wrong with the rows that edges bring to an input of the items `expected`; empty if nothing."""
    plan = packed.plan
    total = packed.offsets(expected, size)[-1]
    if len(edges) == 1 and edges[0].rows == ((0, 0, total),):
        chunk, part = edges[0].source
        if plan.parts[chunk][part].items == expected:
            return ""
    arrived: list[Run] = []
    for edge in edges:
        chunk, part = edge.source
        items = plan.parts[chunk][part].items
        sent = packed.offsets(items, size)[-1]
        for start, at, length in edge.rows:
            if length < 1 or not (0 <= start <= sent - length and 0 <= at <= total - length):
                return f"rows {start}+{length} of {sent} go to {at}+{length} of {total}"
            arrived.extend(packed.runs(items, size, start, length, at))
    row = 0
    wanted = [run for run in packed.runs(expected, size, 0, total, 0)]
    for run in _joined(sorted(arrived)):
        if run.at < row:
            return f"row {run.at} arrives twice"
        if run.at > row:
            return f"row {row} is missing"
        if not wanted or (run.item, run.row, run.length) != (wanted[0].item, 0, wanted[0].length):
            return f"row {run.at} is row {run.row} of {plan.items[run.item].name}, {run.length} rows in all; " + (
                f"it should be row 0 of {plan.items[wanted[0].item].name}, {wanted[0].length} rows"
                if wanted
                else "too many"
            )
        row += run.length
        wanted.pop(0)
    return f"row {row} of {total} is missing" if row < total else ""


def _joined(runs: list[Run]) -> Iterator[Run]:
    """Runs that continue each other, of one item, as one."""
    last: Run | None = None
    for run in runs:
        follows = last and (last.item, last.row + last.length, last.at + last.length) == (run.item, run.row, run.at)
        # A new run starts at row 0, so that an item linked twice in a row stays two runs.
        if last and follows and run.row > 0:
            last = last._replace(length=last.length + run.length)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


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


def _inputs(graph: ModelGraph, module: Module, covered: frozenset[int]) -> Iterator[tuple[str, str, int, TensorSpec]]:
    """(input name, module, position, spec) of every tensor that enters a chunk from others."""
    layers = dict(positions(module))
    before = min(covered) - 1
    if before in layers:
        for spec in layers[before].carries:
            yield spec.name, module.name, before, spec
    for flow in graph.flows:
        if flow.destination == module.name and any(flow.name in layers[p].reads for p in covered):
            position, spec = graph.sent(flow)
            if flow.source != module.name or position not in covered:
                yield flow.name, flow.source, position, spec
