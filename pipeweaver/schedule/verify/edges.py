"""Rules "edges" and "transfers": every input row is the right row of the right item, and travels once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from pipeweaver.model.graph import ModelGraph, Module, TensorSpec, positions
from pipeweaver.schedule.connect import Gradients
from pipeweaver.schedule.ir import (
    ITEM_SIZES,
    Chunk,
    Edge,
    Plan,
)
from pipeweaver.schedule.verify.stages import inside
from pipeweaver.schedule.verify.words import PlanError


def check_edges(plan: Plan, graph: ModelGraph, dtype: str) -> None:
    """Trace every input row to the (item, row) it must come from, and compare with what the edges bring."""
    gradients = Gradients(graph)
    chunks = plan.placement.chunks
    linked: list[list[int]] = [[] for _ in plan.items]
    for source, destination in plan.links:
        linked[destination].append(source)
    rows_of: dict[tuple[int, int, str], list[tuple[int, int]]] = {}

    def rows(chunk: int, part: int, size: str) -> list[tuple[int, int]]:
        """(item, row of the item) of every row of a packed tensor."""
        key = (chunk, part, size)
        if key not in rows_of:
            rows_of[key] = [(i, r) for i in plan.parts[chunk][part].items for r in range(plan.items[i].sizes[size])]
        return rows_of[key]

    into: dict[tuple[int, int, str], list[tuple[int, Edge]]] = {}
    for number, edge in enumerate(plan.edges):
        for chunk, part in (edge.source, edge.destination):
            if not (0 <= chunk < len(chunks) and 0 <= part < len(plan.parts[chunk])):
                raise PlanError("edges", f"edge {number} joins part {part} of chunk {chunk}, which does not exist")
        if chunks[edge.source[0]].task != chunks[edge.destination[0]].task:
            raise PlanError("edges", f"edge {number} joins two tasks")
        into.setdefault((*edge.destination, edge.input), []).append((number, edge))
    for number, target in enumerate(chunks):
        module = graph.by_name[target.module]
        for name, origin, position, spec in _inputs(graph, module, target):
            for part_number, items in enumerate(plan.parts[number]):
                if origin == module.name:
                    expected = rows(number, part_number, spec.rows)
                else:
                    expected = [
                        (i, r)
                        for item in items.items
                        for i in linked[item]
                        if plan.items[i].module == origin
                        for r in range(plan.items[i].sizes[spec.rows])
                    ]
                arrived: list[tuple[int, int] | None] = [None] * len(expected)
                for edge_number, edge in into.pop((number, part_number, name), ()):
                    where = (
                        f"edge {edge_number}, {name} from chunk {edge.source[0]} to chunk {number} part {part_number}"
                    )
                    origin_chunk = chunks[edge.source[0]]
                    if origin_chunk.module != origin or position not in inside(graph.by_name[origin], origin_chunk):
                        raise PlanError("edges", f"{where}: the source does not run layer {position} of {origin}")
                    wanted = (spec.name, spec.width, dtype if spec.dtype == "model" else spec.dtype)
                    if (edge.output, edge.width, edge.dtype) != wanted:
                        raise PlanError(
                            "edges", f"{where}: is {edge.output}, width {edge.width}, {edge.dtype}; should be {wanted}"
                        )
                    grad = spec.grad and gradients.flows(origin, position, module.name, name)
                    if edge.grad != grad:
                        raise PlanError("edges", f"{where}: says {'a' if edge.grad else 'no'} gradient flows back")
                    sent = rows(*edge.source, spec.rows)
                    for from_row, to_row, length in edge.rows:
                        if length < 1 or not (
                            0 <= from_row <= len(sent) - length and 0 <= to_row <= len(expected) - length
                        ):
                            raise PlanError(
                                "edges",
                                f"{where}: rows {from_row}+{length} of {len(sent)} go to {to_row}+{length} of {len(expected)}",
                            )
                        if any(row is not None for row in arrived[to_row : to_row + length]):
                            raise PlanError("edges", f"{where}: rows {to_row}+{length} arrive twice")
                        arrived[to_row : to_row + length] = sent[from_row : from_row + length]
                if arrived != expected:
                    row = next(r for r, pair in enumerate(arrived) if pair != expected[r])
                    got = arrived[row]
                    raise PlanError(
                        "edges",
                        f"row {row} of {name} into chunk {number} part {part_number} should be row {expected[row][1]} of "
                        f"{plan.items[expected[row][0]].name}, but is "
                        + ("missing" if got is None else f"row {got[1]} of {plan.items[got[0]].name}"),
                    )
    for (chunk_number, part_number, name), edges in into.items():
        raise PlanError(
            "edges",
            f"edge {edges[0][0]} brings {name} to chunk {chunk_number} part {part_number}, which does not take it",
        )


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


def _inputs(graph: ModelGraph, module: Module, chunk: Chunk) -> Iterable[tuple[str, str, int, TensorSpec]]:
    """(input name, module, position, spec) of every tensor that enters a chunk from others."""
    covered = set(inside(module, chunk))
    first = min(covered)
    layers = dict(positions(module))
    if first - 1 in layers:
        for spec in layers[first - 1].carries:
            yield spec.name, module.name, first - 1, spec
    for flow in graph.flows:
        if flow.destination == module.name and any(flow.name in layers[p].reads for p in covered):
            position, spec = graph.sent(flow)
            if flow.source != module.name or position not in covered:
                yield flow.name, flow.source, position, spec
