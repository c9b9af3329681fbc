"""What a placement wires up, whatever the batch: the tensors that enter and leave each chunk.

    2 language[0:1]@0    takes "vision" from chunk 1, rows by the links of the samples
    3 language[1:2]@1    takes "x" from chunk 2, its own rows

Computed once for a graph, a placement and a dtype, and kept: steps differ in parts alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from pipeweaver.model.graph import LayerSpec, ModelGraph, TensorSpec, positions
from pipeweaver.schedule.gradients import Gradients, covers, gradients_of
from pipeweaver.schedule.ir import ITEM_SIZES, Chunk, Placement


@dataclass(frozen=True, kw_only=True)
class Inlet:
    """A tensor that enters a chunk from others: `output` of layer `layer` of module `origin`, as `input`.

    `sources` are the chunks of the task that run that layer. With `linked`, the rows of an item are those of the
    items linked to it; else its own. A row has `width` elements of `dtype`; the item size `rows` counts them.
    """

    input: str
    output: str
    origin: str
    layer: int
    sources: tuple[int, ...]
    linked: bool
    rows: str
    width: int
    dtype: str
    grad: bool

    @property
    def row_bytes(self) -> int:
        return self.width * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """One entry per chunk.

    `inlets`: what enters it. `outputs`: by name, the item size that counts the rows of a tensor that may leave it, and
    bytes per row. `backward`: a loss needs its backward. `loads`: names of data from the data set. `kinds`: chunks of
    equal kind cost the same for equal parts.
    """

    inlets: tuple[tuple[Inlet, ...], ...]
    outputs: tuple[dict[str, tuple[str, int]], ...]
    backward: tuple[bool, ...]
    loads: tuple[tuple[str, ...], ...]
    kinds: tuple[Hashable, ...]


def wiring(graph: ModelGraph, placement: Placement, dtype: str) -> Wiring:
    """The wiring of a placement; `dtype` is what "model" stands for in tensor specs."""
    key = (id(graph), placement, dtype)
    if key in _known:
        _known.move_to_end(key)
        return _known[key][1]
    found = _wiring(graph, placement, dtype)
    _known[key] = (graph, found)  # the graph is kept, so that no other one gets its id
    if len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
    return found


_MOST_KNOWN = 64
_known: OrderedDict[tuple[int, Placement, str], tuple[ModelGraph, Wiring]] = OrderedDict()


def _wiring(graph: ModelGraph, placement: Placement, dtype: str) -> Wiring:
    gradients = gradients_of(graph)
    layers = {module.name: dict(positions(module)) for module in graph.modules}
    inside = [
        {p: layer for p, layer in layers[chunk.module].items() if covers(graph.by_name[chunk.module], chunk, p)}
        for chunk in placement.chunks
    ]
    runs: dict[tuple[str, str, int], list[int]] = {}  # (task, module, position) -> chunks
    for number, chunk in enumerate(placement.chunks):
        for position in inside[number]:
            runs.setdefault((chunk.task, chunk.module, position), []).append(number)
    inlets, outputs, backward, loads, kinds = [], [], [], [], []
    for number, chunk in enumerate(placement.chunks):
        found = []
        for origin, position, spec, name, linked in _wanted(graph, chunk, layers, inside[number]):
            found.append(
                Inlet(
                    input=name,
                    output=spec.name,
                    origin=origin,
                    layer=min(max(position, 0), len(graph.by_name[origin].layers) - 1),
                    sources=tuple(runs.get((chunk.task, origin, position), ())),
                    linked=linked,
                    rows=spec.rows,
                    width=spec.width,
                    dtype=dtype if spec.dtype == "model" else spec.dtype,
                    grad=spec.grad and gradients.flows(origin, position, chunk.module, name, inside[number]),
                )
            )
        inlets.append(tuple(found))
        leaving = {}
        for position, layer in inside[number].items():
            carried = layer.carries if position == chunk.stop - 1 else ()
            for spec in (*layer.sends, *carried):
                width = spec.width * ITEM_SIZES[dtype if spec.dtype == "model" else spec.dtype]
                leaving[spec.name] = (spec.rows, width)
        outputs.append(leaving)
        learning = tuple(gradients.backward[chunk.module, position] for position in inside[number])
        backward.append(any(learning))
        loads.append(tuple(dict.fromkeys(name for layer in inside[number].values() for name in layer.loads)))
        circumstances = tuple(
            (
                layer.kind,
                layer.trainable,
                position == max(layers[chunk.module]),
                *_needs(graph, gradients, chunk, position),
            )
            for position, layer in inside[number].items()
        )
        kinds.append((chunk.module, circumstances, learning))
    return Wiring(
        inlets=tuple(inlets),
        outputs=tuple(outputs),
        backward=tuple(backward),
        loads=tuple(loads),
        kinds=tuple(kinds),
    )


def _needs(graph: ModelGraph, gradients: Gradients, chunk: Chunk, position: int) -> tuple[str, ...]:
    """Names of the inputs of a layer that gradients may flow to: a layer costs less where they do not."""
    module = graph.by_name[chunk.module]
    by_position = dict(positions(module))
    before = by_position.get(position - 1)
    carried = before.carries if before is not None else ()
    needs = [spec.name for spec in carried if spec.grad and gradients.trained[module.name, position - 1]]
    for flow in graph.flows:
        if flow.destination == module.name and flow.name in by_position[position].reads:
            sent, spec = graph.sent(flow)
            if spec.grad and gradients.trained[flow.source, sent]:
                needs.append(flow.name)
    return tuple(needs)


def _wanted(
    graph: ModelGraph, chunk: Chunk, layers: dict[str, dict[int, LayerSpec]], inside: dict[int, LayerSpec]
) -> list[tuple[str, int, TensorSpec, str, bool]]:
    """(source module, position, tensor, input name, whether rows follow links) of all that enters a chunk."""
    module = graph.by_name[chunk.module]
    wanted = []
    if chunk.start > 0:
        for spec in module.layers[chunk.start - 1].carries:
            wanted.append((module.name, chunk.start - 1, spec, spec.name, False))
    for flow in graph.flows:
        if flow.destination == module.name and any(flow.name in layer.reads for layer in inside.values()):
            position, spec = graph.sent(flow)
            if flow.source != module.name or position not in inside:
                wanted.append((flow.source, position, spec, flow.name, flow.source != module.name))
    return wanted
