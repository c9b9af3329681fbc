"""Layers that cost the same: equal structure in equal circumstances.

Beside its kind, what a layer costs depends on whether its parameters learn, which of its inputs need a
gradient, and whether it ends in the loss. Example: the first block after a frozen embedding learns but
hands no gradient back: `block hidden=256; gradients to nothing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, TensorSpec, positions
from pipeweaver.schedule.gradients import Gradients, gradients_of


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A layer in its place. `name` is equal for layers of equal cost.

    `carried` and `read` are its inputs by name; those in `needs_grad` get a gradient. `outputs` names
    the tensors that something takes in. Without `backward` it only ever runs forward.
    """

    name: str
    module: Module
    position: int
    layer: str
    spec: LayerSpec
    carried: Mapping[str, TensorSpec]
    read: Mapping[str, TensorSpec]
    needs_grad: tuple[str, ...]
    outputs: tuple[str, ...]
    backward: bool
    loss: bool


def variants(graph: ModelGraph) -> dict[str, Variant]:
    """Every layer of the model, by its name ("language.layers.3"), in order."""
    gradients = gradients_of(graph)
    return {
        variant.layer: variant
        for module in graph.modules
        for variant in (_variant(graph, gradients, module, position, spec) for position, spec in positions(module))
    }


def _variant(graph: ModelGraph, gradients: Gradients, module: Module, position: int, spec: LayerSpec) -> Variant:
    specs = dict(positions(module))
    before = specs.get(position - 1)
    carried = {tensor.name: tensor for tensor in before.carries} if before is not None else {}
    sent = {flow.name: (flow, *graph.sent(flow)) for flow in graph.flows if flow.destination == module.name}
    read = {name: sent[name][2] for name in spec.reads}
    backward = gradients.backward[module.name, position]
    needs = [
        name
        for name, tensor in carried.items()
        if backward and tensor.grad and gradients.flows(module.name, position - 1, module.name, name, (position,))
    ]
    for name in spec.reads:
        flow, origin, tensor = sent[name]
        if backward and tensor.grad and gradients.flows(flow.source, origin, module.name, name, (position,)):
            needs.append(name)
    last = position == max(specs)
    loss = last and module.loss is not None
    taken = {flow.tensor for flow in graph.flows if flow.source == module.name}
    outputs = [tensor.name for tensor in spec.sends if tensor.name in taken]
    outputs += [] if last else [tensor.name for tensor in spec.carries]
    circumstances = [f"gradients to {', '.join(needs) or 'nothing'}" if backward else "no backward"]
    circumstances += [] if spec.trainable else ["frozen"]
    circumstances += ["loss"] if loss else []
    ends = {-1: "before", len(module.layers): "after"}
    return Variant(
        name="; ".join([spec.kind, *circumstances]),
        module=module,
        position=position,
        layer=f"{module.name}.{ends.get(position, f'layers.{position}')}",
        spec=spec,
        carried=carried,
        read=read,
        needs_grad=tuple(needs),
        outputs=tuple(dict.fromkeys(outputs)),
        backward=backward,
        loss=loss,
    )
