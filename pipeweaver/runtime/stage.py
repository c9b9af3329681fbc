"""Run a stage: the forward or the backward of a chunk on a part, with autograd cut at the chunk's borders.

A forward runs on leaves and keeps what its backward needs; the backward starts from the gradients of the
outputs and ends at the leaves:

    state = run_forward(chunk, {"x": received}, view, outputs={"x"}, grad=True)
    send(state.outputs["x"])
    ...
    gradients = run_backward(state, {"x": received_gradient}, loss_scale=weight / normaliser)
    send(gradients["x"])

With `split`, that backward is stage I, and `state.later.accumulate()` is stage W (`split.py`).

So a chain of chunks gives the same parameter gradients as one graph through all of them: the chain rule, with
its sums over tensors that several chunks read taken by the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeweaver.model.graph import LayerSpec, LossSpec, ModelGraph, TensorSpec
from pipeweaver.model.part import PartView, check_outputs, handed_on
from pipeweaver.model.refused import watched_generator
from pipeweaver.runtime.offload import SavedTensors
from pipeweaver.runtime.split import WeightGradients
from pipeweaver.schedule.ir import Chunk, Strategy


@dataclass(frozen=True, kw_only=True)
class BuiltLayer:
    """A layer with its module. `inside` maps what it reads to what an earlier layer of the chunk sends."""

    name: str
    spec: LayerSpec
    module: nn.Module
    inside: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class BuiltChunk:
    """A chunk that can run: `inputs` come from other chunks, `loads` from the data set."""

    layers: tuple[BuiltLayer, ...]
    inputs: Mapping[str, TensorSpec]
    loads: tuple[str, ...]
    loss: LossSpec | None


@dataclass(frozen=True, kw_only=True)
class StageState:
    """What a forward leaves behind: leaves, outputs and, in the last chunk of a module with a loss, its sum.

    With gradients, outputs and loss hold the graph: this is what the plan calls the buffer "saved". `later` is for a
    split backward: after I it holds what W needs, the buffer "weight". `offloaded` is what offloaded layers saved.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    loss: Tensor | None
    later: WeightGradients | None = None
    offloaded: SavedTensors | None = None


def build_chunk(graph: ModelGraph, chunk: Chunk, modules: Mapping[str, nn.Module]) -> BuiltChunk:
    """Put a chunk together from modules by layer name."""
    module = graph.by_name[chunk.module]
    flows = {flow.name: flow for flow in graph.flows if flow.destination == module.name}
    inputs: dict[str, TensorSpec] = {}
    if chunk.start > 0:
        inputs |= {spec.name: spec for spec in module.layers[chunk.start - 1].carries}
    sent_here: set[str] = set()
    layers = []
    for name, spec in module.range(chunk.start, chunk.stop):
        inside = {}
        for read in spec.reads:
            flow = flows[read]
            if flow.source == module.name and flow.tensor in sent_here:
                inside[read] = flow.tensor
            else:
                inputs[read] = graph.sent(flow)[1]
        layers.append(BuiltLayer(name=name, spec=spec, module=modules[name], inside=inside))
        sent_here |= {sent.name for sent in spec.sends}
    return BuiltChunk(
        layers=tuple(layers),
        inputs=inputs,
        loads=tuple(dict.fromkeys(name for layer in layers for name in layer.spec.loads)),
        loss=module.loss if chunk.stop == len(module.layers) else None,
    )


def run_forward(
    chunk: BuiltChunk,
    inputs: Mapping[str, Tensor],
    view: PartView,
    *,
    outputs: Collection[str],
    grad: bool,
    needs_grad: Collection[str] = (),
    strategies: Sequence[Strategy] = (),
    split: bool = False,
) -> StageState:
    """Forward of a chunk on a part.

    `inputs` are packed tensors [rows, width] without history; those in `needs_grad` become leaves.
    `outputs` names what leaves the chunk. Without `grad` there is no graph at all. With `split` the backward will
    leave weight gradients for later. Raises ValueError, naming the layer, if it does not return what its spec says,
    or writes into what it is given.
    """
    strategies = strategies or ["keep"] * len(chunk.layers)
    assert len(strategies) == len(chunk.layers), f"{len(strategies)} memory strategies for {len(chunk.layers)} layers"
    leaves = {name: tensor.detach().requires_grad_(grad and name in needs_grad) for name, tensor in inputs.items()}
    carried = {name: tensor for name, tensor in leaves.items() if name not in _read(chunk)}
    sent: dict[str, Tensor] = {}
    loss = None
    later = WeightGradients() if split and grad else None
    offloaded = SavedTensors(view.device) if "offload" in strategies and grad else None
    with torch.set_grad_enabled(grad):
        for layer, strategy in zip(chunk.layers, strategies, strict=True):
            state = dict(carried)
            for name in layer.spec.reads:
                state[name] = sent[layer.inside[name]] if name in layer.inside else leaves[name]
            result = _run_layer(layer, state, view, strategy if grad else "keep", later, offloaded)
            has_loss = chunk.loss is not None and layer is chunk.layers[-1]
            check_outputs(layer.name, layer.spec, result, view, loss=has_loss)
            carried = {spec.name: handed_on(spec, result) for spec in layer.spec.carries}
            sent |= {spec.name: handed_on(spec, result) for spec in layer.spec.sends}
            loss = result["loss"] if has_loss else None
    leaving = sent | carried
    leaving = {name: leaving[name] if grad else leaving[name].detach() for name in outputs}
    if offloaded is not None:
        offloaded.seal([*leaves.values(), *leaving.values(), *view.made()])
    return StageState(inputs=leaves, outputs=leaving, loss=loss, later=later, offloaded=offloaded)


def run_backward(state: StageState, gradients: Mapping[str, Tensor], *, loss_scale: float = 1.0) -> dict[str, Tensor]:
    """Backward of a stage: adds to the parameters' gradients, returns those of the inputs that need one.

    If the forward was told that the backward is split, weight gradients are left to `state.later`. `gradients` are [rows, width] by output name; an output that is missing there has gradient zero.
    The loss counts `loss_scale` times: weight over normaliser.
    """
    roots: list[Tensor] = []
    starts: list[Tensor | None] = []
    for name, gradient in gradients.items():
        if state.outputs[name].requires_grad:
            roots.append(state.outputs[name])
            starts.append(gradient)
    if state.loss is not None and state.loss.requires_grad:
        roots.append(state.loss)
        starts.append(torch.full_like(state.loss, loss_scale))
    if roots:
        with nullcontext() if state.later is None else state.later.put_off():
            torch.autograd.backward(roots, starts)
    return {
        name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        for name, leaf in state.inputs.items()
        if leaf.requires_grad
    }


def _read(chunk: BuiltChunk) -> set[str]:
    return {name for layer in chunk.layers for name in layer.spec.reads}


def _run_layer(
    layer: BuiltLayer,
    state: dict[str, Tensor],
    view: PartView,
    strategy: Strategy,
    later: WeightGradients | None,
    offloaded: SavedTensors | None,
) -> dict[str, Tensor]:
    def intercepted() -> AbstractContextManager[Any]:
        return nullcontext() if later is None else later.intercepted()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return intercepted(), intercepted()

    match strategy:
        case "keep":
            with intercepted():
                return _call(layer, state, view)
        case "recompute":
            # Randomness hangs on items, so there is no generator's state to restore.
            return checkpoint(
                _call, layer, state, view, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        case "recompute-attention":
            with intercepted():
                return _call(layer, state, replace(view, recompute_attention=True, recompute_contexts=contexts))
        case "offload":
            assert offloaded is not None
            loaded = [tensor for tensor in view.loaded.values() if isinstance(tensor, Tensor)]
            stay = [*layer.module.parameters(), *layer.module.buffers(), *loaded]
            with offloaded.of(layer.name, stay), intercepted():
                return _call(layer, state, view)


def _call(layer: BuiltLayer, state: dict[str, Tensor], view: PartView) -> dict[str, Tensor]:
    """Run a layer's module. What it is given must stay as it is, wherever the model is cut: it may be the output of a
    chunk that still needs it, and is there once more where the layer is recomputed."""
    given = {**state, **{name: t for name, t in view.loaded.items() if isinstance(t, Tensor)}}
    versions = {name: tensor._version for name, tensor in given.items()}
    is_new = layer.module not in _watched and len(view.items) > 0
    try:
        with watched_generator(layer.name, view.device) if is_new else nullcontext():
            result = layer.module(dict(state), view)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        raise ValueError(_WRITES.format(layer=layer.name, names=_listed(state))) from error
    if is_new:
        _watched.add(layer.module)
    written = {name for name, tensor in given.items() if tensor._version != versions[name]}
    if written:
        raise ValueError(_WRITES.format(layer=layer.name, names=_listed(written)))
    return result


_watched: WeakSet[nn.Module] = WeakSet()
"""Layers that did not touch torch's global generator when they first ran: looking takes time."""

_WRITES = (
    "layer {layer} writes in place into what it is given ({names}); it must leave that as it is: "
    "work on a copy (x = x.clone()), or out of place"
)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
