"""The layers of a model as operator graphs: equal layers in equal places share one.

layers = module_layers(graph, torch.bfloat16, {"pixels": 588}, "cuda")
layer, backward = layers["language"][3]         # -1 is `before`, the number of layers `after`
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, positions
from pipeweaver.schedule.gradients import Gradients, gradients_of
from pipeweaver.semu.kernels import Kernels
from pipeweaver.semu.layer import Input, LayerGraph


def module_layers(
    graph: ModelGraph, dtype: torch.dtype, widths: Mapping[str, int], kernels: Kernels, reuse: bool = True
) -> dict[str, dict[int, tuple[LayerGraph, bool]]]:
    """By module and position (-1 for `before`, n for `after`): the layer, and whether it takes part in the backward.

    Layers of equal kind and inputs share one graph, unless nothing is to be reused.
    """
    gradients = gradients_of(graph)
    shared: dict[object, LayerGraph] = {}
    modules: dict[str, dict[int, tuple[LayerGraph, bool]]] = {}
    for module in graph.modules:
        modules[module.name] = {}
        for position, spec in positions(module):
            inputs = _inputs(graph, module, position, spec, gradients)
            key = (spec.kind, spec.trainable, inputs)
            if key not in shared or not reuse:
                shared[key] = LayerGraph(spec, inputs, dtype=dtype, widths=widths, kernels=kernels)
            modules[module.name][position] = (shared[key], gradients.backward[module.name, position])
    return modules


def _inputs(
    graph: ModelGraph, module: Module, position: int, spec: LayerSpec, gradients: Gradients
) -> tuple[Input, ...]:
    by_position = dict(positions(module))
    inputs = []
    if position - 1 in by_position:
        trained = gradients.trained[module.name, position - 1]
        inputs += [Input(spec=s, name=s.name, grad=s.grad and trained) for s in by_position[position - 1].carries]
    for flow in graph.flows:
        if flow.destination == module.name and flow.name in spec.reads:
            sent, tensor = graph.sent(flow)
            source = None if flow.source == module.name else flow.source
            grad = tensor.grad and gradients.trained[flow.source, sent]
            inputs.append(Input(spec=tensor, name=flow.name, source=source, grad=grad))
    return tuple(inputs)


def inside(module: Module, start: int, stop: int) -> list[int]:
    """Positions of layers start..stop, with `before` and `after` where those are at an end."""
    before = [-1] if start == 0 and module.before is not None else []
    after = [len(module.layers)] if stop == len(module.layers) and module.after is not None else []
    return [*before, *range(start, stop), *after]
