"""Rules "edges" and "transfers": every input row is the right row of the right item, and travels once."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

from pipeweaver.model.graph import ModelGraph, Module, TensorSpec, positions
from pipeweaver.schedule.connect import Gradients
from pipeweaver.schedule.ir import (
    ITEM_SIZES,
    Edge,
    Plan,
)
from pipeweaver.schedule.verify.stages import inside
from pipeweaver.schedule.verify.words import PlanError


class Run(NamedTuple):
    """`length` rows of an item, from its row `row` on, that stand at `at` in a packed tensor."""

    at: int
    item: int
    row: int
    length: int


def check_edges(plan: Plan, graph: ModelGraph, dtype: str) -> None:
    """Trace every input's rows to the items that they must come from, and compare with what the edges bring."""
    gradients = Gradients(graph)
    chunks = plan.placement.chunks
    linked: list[list[int]] = [[] for _ in plan.items]
    for source, destination in plan.links:
        linked[destination].append(source)
    into: dict[tuple[int, int, str], list[int]] = {}
    for number, edge in enumerate(plan.edges):
        for c, p in (edge.source, edge.destination):
            if not (0 <= c < len(chunks) and 0 <= p < len(plan.parts[c])):
                raise PlanError("edges", f"edge {number} joins part {p} of chunk {c}, which does not exist")
        if chunks[edge.source[0]].task != chunks[edge.destination[0]].task:
            raise PlanError("edges", f"edge {number} joins two tasks")
        into.setdefault((*edge.destination, edge.input), []).append(number)
    packed = _Packed(plan)
    covered = [frozenset(inside(graph.by_name[chunk.module], chunk)) for chunk in chunks]
    for number, target in enumerate(chunks):
        module = graph.by_name[target.module]
        for name, origin, position, spec in _inputs(graph, module, covered[number]):
            grad = spec.grad and gradients.flows(origin, position, module.name, name)
            wanted = (spec.name, spec.width, dtype if spec.dtype == "model" else spec.dtype, grad)
            for part_number, part in enumerate(plan.parts[number]):
                expected = part.items
                if origin != module.name:
                    expected = tuple(i for item in part.items for i in linked[item] if plan.items[i].module == origin)
                found = into.pop((number, part_number, name), [])
                for edge_number in found:
                    edge = plan.edges[edge_number]
                    origin_chunk = chunks[edge.source[0]]
                    where = (
                        f"edge {edge_number}, {name} from chunk {edge.source[0]} to chunk {number} part {part_number}"
                    )
                    if origin_chunk.module != origin or position not in covered[edge.source[0]]:
                        raise PlanError("edges", f"{where}: the source does not run layer {position} of {origin}")
                    if (edge.output, edge.width, edge.dtype, edge.grad) != wanted:
                        got = (edge.output, edge.width, edge.dtype, edge.grad)
                        raise PlanError(
                            "edges", f"{where}: is (tensor, width, dtype, gradient) {got}; should be {wanted}"
                        )
                problem = _compare(packed, [plan.edges[i] for i in found], expected, spec.rows)
                if problem:
                    raise PlanError("edges", f"{name} into chunk {number} part {part_number}: {problem}")
    for (c, p, name), edges in into.items():
        raise PlanError("edges", f"edge {edges[0]} brings {name} to chunk {c} part {p}, which does not take it")


class _Packed:
    """Packed tensors as items and offsets, computed once for equal items."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._offsets: dict[tuple[tuple[int, ...], str], list[int]] = {}

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


def _compare(packed: _Packed, edges: list[Edge], expected: tuple[int, ...], size: str) -> str:
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


def check_transfers(plan: Plan) -> None:
    chunks = plan.placement.chunks
    expected: Counter[tuple[int, Literal["F", "B"]]] = Counter()
    for number, edge in enumerate(plan.edges):
        if chunks[edge.source[0]].worker != chunks[edge.destination[0]].worker:
            expected[number, "F"] += 1
            if edge.grad and not plan.forward_only:
                expected[number, "B"] += 1
    found = Counter((transfer.edge, transfer.phase) for transfer in plan.transfers)
    if found != expected:
        wrong = next(iter((expected - found) + (found - expected)))
        raise PlanError(
            "transfers", f"edge {wrong[0]} direction {wrong[1]}: {found[wrong]} transfers instead of {expected[wrong]}"
        )
    for number, transfer in enumerate(plan.transfers):
        edge = plan.edges[transfer.edge]
        ends = [chunks[edge.source[0]].worker, chunks[edge.destination[0]].worker]
        sender, receiver = ends if transfer.phase == "F" else reversed(ends)
        num_bytes = edge.num_rows * edge.width * ITEM_SIZES[edge.dtype]
        wanted = (sender, receiver, (edge.num_rows, edge.width), edge.dtype, num_bytes)
        got = (transfer.sender, transfer.receiver, transfer.shape, transfer.dtype, transfer.num_bytes)
        if got != wanted:
            raise PlanError(
                "transfers",
                f"transfer {number} is (sender, receiver, shape, dtype, bytes) {got}; its edge says {wanted}",
            )


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
