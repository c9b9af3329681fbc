"""Edges: which rows of which chunk's output each chunk needs, part by part.

Chunks of one module hand on what the layer between them carries; flows bring what layers of one module
send to the layers that read it, along the links of the samples. Cuts into parts may differ from chunk to
chunk. Example: images a (9 rows) and b (25) in parts of one, both linked to the text t:

    vision part 0 {a} -> language part 0 {t}: rows 0..9 -> 0..9 of the input "vision"
    vision part 1 {b} -> language part 0 {t}: rows 0..25 -> 9..34
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, TensorSpec, positions, topological
from pipeweaver.schedule.ir import Chunk, Edge, Part, Placement, Rows

Parts = tuple[tuple[Part, ...], ...]


def connect(
    graph: ModelGraph,
    placement: Placement,
    items: Sequence[Item],
    links: Sequence[tuple[int, int]],
    parts: Parts,
    dtype: str = "float32",
) -> tuple[Edge, ...]:
    """All edges between the (chunk, part) pairs of a plan, ordered by destination.

    `dtype` is what "model" stands for in tensor specs. Raises ValueError if an item that is needed is in
    no part of a chunk that could supply it.
    """
    gradients = Gradients(graph)
    index = _ItemIndex(placement, items, parts)
    sources: list[list[int]] = [[] for _ in items]
    for source, destination in links:
        sources[destination].append(source)
    edges: list[Edge] = []
    for number, chunk in enumerate(placement.chunks):
        module = graph.by_name[chunk.module]
        wanted = list(_wanted(graph, module, chunk))
        for part_number, part in enumerate(parts[number]):
            for origin, position, spec, name, linked in wanted:
                grad = spec.grad and gradients.flows(origin, position, chunk.module, name)
                # `before` and `after` run in the chunks of the first and the last layer.
                layer = min(max(position, 0), len(graph.by_name[origin].layers) - 1)
                if not linked and (edge := index.whole(chunk, origin, layer, part, spec)):
                    found = {edge[0]: [Rows(0, 0, edge[1])] if edge[1] else []}
                else:
                    found = _gather(index, chunk, origin, layer, part, spec, sources if linked else None)
                for source_part, rows in found.items():
                    if rows:
                        edges.append(
                            Edge(
                                source=source_part,
                                destination=(number, part_number),
                                output=spec.name,
                                input=name,
                                dtype=dtype if spec.dtype == "model" else spec.dtype,
                                width=spec.width,
                                rows=tuple(rows),
                                grad=grad,
                            )
                        )
    return tuple(edges)


def is_whole(edges: Sequence[Edge], incoming: Sequence[int], edge: int) -> bool:
    """Whether an edge alone brings an input, its rows in order: then the tensor that arrives is the input itself.

    `incoming` are the numbers of all edges into the same (chunk, part). Otherwise the input is assembled
    from its edges in memory of its own.
    """
    this = edges[edge]
    if len(incoming) == 1:
        return len(this.rows) == 1
    return len(this.rows) == 1 and all(edges[other].input != this.input for other in incoming if other != edge)


def covers(module: Module, chunk: Chunk, position: int) -> bool:
    """Whether a chunk runs the layer at `position` (-1: before, n: after)."""
    last = len(module.layers) - 1
    return chunk.start <= min(max(position, 0), last) < chunk.stop


def has_backward(graph: ModelGraph, placement: Placement) -> tuple[bool, ...]:
    """Per chunk, whether a loss needs its backward: a parameter of it or before it learns."""
    gradients = Gradients(graph)
    return tuple(
        any(
            gradients.backward[chunk.module, position]
            for position, _ in positions(graph.by_name[chunk.module])
            if covers(graph.by_name[chunk.module], chunk, position)
        )
        for chunk in placement.chunks
    )


class Gradients:
    """Where gradients flow, layer by layer: through what has a parameter to train before it and a loss after it.

    `backward[module, position]`: the layer takes part in the backward. Independent of placement.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        order = [
            (module, position, layer)
            for module in (graph.by_name[name] for name in topological(graph))
            for position, layer in positions(module)
        ]
        trained: dict[tuple[str, int], bool] = {}  # some parameter at or before this layer learns
        for module, position, layer in order:
            arriving = [trained[source] for source in self._arriving(module, position, layer)]
            trained[module.name, position] = layer.trainable or any(arriving)
        lost: dict[tuple[str, int], bool] = {key: False for key in trained}  # a loss depends on this layer
        for module, position, layer in reversed(order):
            last = position == len(module.layers) or (module.after is None and position == len(module.layers) - 1)
            if last and module.loss is not None:
                lost[module.name, position] = True
            if lost[module.name, position]:
                for source in self._arriving(module, position, layer):
                    lost[source] = True
        self.trained = trained
        self.backward = {key: trained[key] and lost[key] for key in trained}

    def flows(self, origin: str, position: int, destination: str, name: str) -> bool:
        """Whether the tensor sent at a position of `origin` gets a gradient from input `name` of `destination`."""
        if not self.backward[origin, position]:
            return False
        if origin == destination and name in {spec.name for spec in _layer(self.graph, origin, position).carries}:
            return True
        readers = [p for p, layer in positions(self.graph.by_name[destination]) if name in layer.reads]
        return any(self.backward[destination, reader] for reader in readers)

    def _arriving(self, module: Module, position: int, layer: LayerSpec) -> list[tuple[str, int]]:
        arriving: list[tuple[str, int]] = []
        before = position - 1
        exists = before >= 0 or (before == -1 and module.before is not None)
        if exists and any(spec.grad for spec in _layer(self.graph, module.name, before).carries):
            arriving.append((module.name, before))
        for flow in self.graph.flows:
            if flow.destination == module.name and flow.name in layer.reads:
                sent, spec = self.graph.sent(flow)
                if spec.grad:
                    arriving.append((flow.source, sent))
        return arriving


def _layer(graph: ModelGraph, module: str, position: int) -> LayerSpec:
    return dict(positions(graph.by_name[module]))[position]


def _wanted(graph: ModelGraph, module: Module, chunk: Chunk) -> list[tuple[str, int, TensorSpec, str, bool]]:
    """(source module, position, tensor, input name, whether rows follow links) of all that enters a chunk."""
    wanted = []
    if chunk.start > 0:
        for spec in module.layers[chunk.start - 1].carries:
            wanted.append((module.name, chunk.start - 1, spec, spec.name, False))
    inside = [layer for position, layer in positions(module) if covers(module, chunk, position)]
    for flow in graph.flows:
        if flow.destination == module.name and any(flow.name in layer.reads for layer in inside):
            position, spec = graph.sent(flow)
            if flow.source != module.name or not covers(module, chunk, position):
                wanted.append((flow.source, position, spec, flow.name, flow.source != module.name))
    return wanted


class _ItemIndex:
    """Where each item is: in which part of which chunk, and from which row on."""

    def __init__(self, placement: Placement, items: Sequence[Item], parts: Parts) -> None:
        self.items = items
        self.chunks = placement.chunks
        self.parts = parts
        self._of_module: dict[tuple[str, str], list[int]] = {}
        for number, chunk in enumerate(placement.chunks):
            self._of_module.setdefault((chunk.task, chunk.module), []).append(number)
        self._part_of: list[dict[int, int]] = [
            {item: number for number, part in enumerate(chunk_parts) for item in part.items} for chunk_parts in parts
        ]
        self._offsets: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}
        self._rows: dict[tuple[tuple[int, ...], str], int] = {}

    def whole(
        self, chunk: Chunk, origin: str, layer: int, part: Part, spec: TensorSpec
    ) -> tuple[tuple[int, int], int] | None:
        """((source chunk, part), rows) if one source part holds exactly the items of `part`, in order."""
        if not part.items:
            return None
        source = self.find(chunk, origin, layer, part.items[0])
        if source is None or self.parts[source[0]][source[1]].items != part.items:
            return None
        return source, self.num_rows(part.items, spec.rows)

    def find(self, chunk: Chunk, origin: str, layer: int, item: int) -> tuple[int, int] | None:
        """(chunk, part) that runs an item through layer 0..n-1 of module `origin`."""
        for number in self._of_module.get((chunk.task, origin), ()):
            candidate = self.chunks[number]
            if candidate.start <= layer < candidate.stop:
                part = self._part_of[number].get(item)
                if part is not None:
                    return number, part
        return None

    def offset(self, items: tuple[int, ...], rows: str, item: int) -> int:
        key = (items, rows)
        if key not in self._offsets:
            offsets, total = {}, 0
            for i in items:
                offsets[i] = total
                total += self.items[i].sizes[rows]
            self._offsets[key] = offsets
        return self._offsets[key][item]

    def num_rows(self, items: tuple[int, ...], rows: str) -> int:
        key = (items, rows)
        if key not in self._rows:
            self._rows[key] = sum(self.items[i].sizes[rows] for i in items)
        return self._rows[key]


def _gather(
    index: _ItemIndex,
    chunk: Chunk,
    origin: str,
    layer: int,
    part: Part,
    spec: TensorSpec,
    sources: list[list[int]] | None,
) -> dict[tuple[int, int], list[Rows]]:
    """Rows by source (chunk, part). With `sources` they come from linked items, else from the items themselves."""
    found: dict[tuple[int, int], list[Rows]] = {}
    row = 0
    for item in part.items:
        origins = [item] if sources is None else [s for s in sources[item] if index.items[s].module == origin]
        for source_item in origins:
            source = index.find(chunk, origin, layer, source_item)
            if source is None:
                raise ValueError(
                    f"item {index.items[source_item].name} is needed by {chunk} but no chunk runs it through "
                    f"layer {layer} of {origin}"
                )
            length = index.items[source_item].sizes[spec.rows]
            start = index.offset(index.parts[source[0]][source[1]].items, spec.rows, source_item)
            rows = found.setdefault(source, [])
            last = rows[-1] if rows else None
            if last and last.source + last.length == start and last.destination + last.length == row:
                rows[-1] = Rows(last.source, last.destination, last.length + length)
            elif length:
                rows.append(Rows(start, row, length))
            row += length
    return found
