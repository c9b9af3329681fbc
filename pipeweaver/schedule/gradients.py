"""Where gradients flow through a model graph, and which chunks have a backward. Independent of any batch.

A layer takes part in the backward if a parameter at or before it learns and a loss comes after it. Example: a
frozen encoder with a projector that learns: only the projector's chunk has a backward, and no gradient leaves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, positions, topological
from pipeweaver.schedule.ir import Chunk, Placement


def has_backward(graph: ModelGraph, placement: Placement) -> tuple[bool, ...]:
    """Per chunk, whether a loss needs its backward: a parameter of it or before it learns."""
    gradients = gradients_of(graph)
    return tuple(
        any(
            gradients.backward[chunk.module, position]
            for position, _ in positions(graph.by_name[chunk.module])
            if covers(graph.by_name[chunk.module], chunk, position)
        )
        for chunk in placement.chunks
    )


def gradients_of(graph: ModelGraph) -> Gradients:
    """The gradients of a graph; found once, and kept."""
    if id(graph) not in _known:
        _known[id(graph)] = Gradients(graph)  # it keeps the graph, so that no other one gets its id
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[id(graph)]


_MOST_KNOWN = 64
_known: OrderedDict[int, Gradients] = OrderedDict()


def covers(module: Module, chunk: Chunk, position: int) -> bool:
    """Whether a chunk runs the layer at `position` (-1: before, n: after)."""
    last = len(module.layers) - 1
    return chunk.start <= min(max(position, 0), last) < chunk.stop


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

    def flows(self, origin: str, position: int, destination: str, name: str, inside: Collection[int]) -> bool:
        """Whether the tensor sent at a position of `origin` gets a gradient from those layers of `destination` at
        positions `inside` that take it in as `name`. Not all of them need to: layers behind the last loss have no
        backward."""
        if origin == destination and name in {spec.name for spec in _layer(self.graph, origin, position).carries}:
            readers = [position + 1]
        else:
            readers = [p for p, layer in positions(self.graph.by_name[destination]) if name in layer.reads]
        return self.backward[origin, position] and any(
            self.backward[destination, reader] for reader in readers if reader in inside
        )

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
