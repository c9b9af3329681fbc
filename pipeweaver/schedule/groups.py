"""Parameter groups: which workers hold which parameters, and so which gradients are reduced over whom.

Example: a tied embedding with its first end on worker 0 and its head on worker 3:

    ("language.before.weight",) over (0, 3), every other layer alone on its worker
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeweaver.costs import Costs
from pipeweaver.model.graph import ModelGraph
from pipeweaver.schedule.ir import ParameterGroup, Placement


def layers_on(graph: ModelGraph, placement: Placement, worker: int) -> tuple[str, ...]:
    """Names of the layers that a worker holds, each once."""
    names = [
        name
        for number in placement.on(worker)
        for name, _ in graph.by_name[placement.chunks[number].module].range(
            placement.chunks[number].start, placement.chunks[number].stop
        )
    ]
    return tuple(dict.fromkeys(names))


def static_bytes(graph: ModelGraph, placement: Placement, costs: Costs) -> tuple[int, ...]:
    """What each worker holds throughout: parameters, gradients and optimizer state. A tied parameter both of whose ends
    are on a worker is there once."""
    return tuple(
        sum(costs.static_bytes(layer) for layer in layers)
        - sum(costs.static_bytes(parameter) for parameter in _tied_on(graph, layers))
        for layers in (layers_on(graph, placement, worker) for worker in range(placement.workers))
    )


def parameter_groups(graph: ModelGraph, placement: Placement, costs: Costs) -> tuple[ParameterGroup, ...]:
    """Trainable layers, and tied parameters, by the workers that hold them, in the order of the first holder.

    A tied parameter goes by its canonical name and is held wherever either end of the tie is.
    """
    holders: dict[str, set[int]] = {}
    for worker in range(placement.workers):
        for name in layers_on(graph, placement, worker):
            holders.setdefault(name, set()).add(worker)
    specs = {name: layer for module in graph.modules for name, layer in module.range(0, len(module.layers))}
    owners = {name: found for name, found in holders.items() if specs[name].trainable}
    num_bytes = {name: costs.parameter_bytes(name) for name in owners}
    for module in graph.modules:
        for alias, canonical in module.tied.items():
            ends = [f"{module.name}.{parameter}" for parameter in (alias, canonical)]
            tied = [next((layer for layer in owners if end.startswith(layer + ".")), None) for end in ends]
            if any(tied):
                owners[ends[1]] = set().union(*(owners[layer] for layer in tied if layer))
                num_bytes[ends[1]] = costs.parameter_bytes(ends[1])
                for layer in tied:
                    if layer:
                        num_bytes[layer] = max(0, num_bytes[layer] - num_bytes[ends[1]])
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name, found in owners.items():
        by_holders.setdefault(tuple(sorted(found)), []).append(name)
    return tuple(
        ParameterGroup(parameters=tuple(sorted(names)), holders=group, num_bytes=sum(num_bytes[n] for n in names))
        for group, names in sorted(by_holders.items())
    )


def _tied_on(graph: ModelGraph, layers: Sequence[str]) -> list[str]:
    """Canonical names of the tied parameters that these layers hold twice."""
    found = []
    for module in graph.modules:
        for alias, canonical in module.tied.items():
            ends = [f"{module.name}.{parameter}" for parameter in (alias, canonical)]
            if all(any(end.startswith(layer + ".") for layer in layers) for end in ends):
                found.append(ends[1])
    return found
