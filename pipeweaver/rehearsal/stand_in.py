"""What takes the place of a model in a rehearsal: chunks that compute nothing, on tensors one column wide.

    plan        worker 0: 0F0, sends x [8192, 4096] to worker 1         a plan for a cluster
    shrunk      worker 0: 0F0, sends x [8192, 1] to worker 1            small enough for a laptop

Order, times, rows, buffers, gradients and groups are those of the plan; a group has one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from pipeweaver.model.graph import LayerSpec, ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer, build_chunk
from pipeweaver.schedule.ir import ITEM_SIZES, Action, Chunk, Compute, Plan


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """What enters a chunk from others and what leaves it, one column wide."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def tensors_of(graph: ModelGraph, chunk: Chunk) -> Tensors:
    layers = [spec for _, spec in graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
    named = dict.fromkeys((name for name, _ in graph.by_name[chunk.module].range(chunk.start, chunk.stop)), _NOTHING)
    sent = [spec for layer in layers for spec in layer.sends]
    return Tensors(
        inputs=tuple(_narrow(replaced, name) for name, replaced in build_chunk(graph, chunk, named).inputs.items()),
        outputs=tuple(_narrow(spec, spec.name) for spec in (*sent, *layers[-1].carries)),
    )


def shrunk(plan: Plan) -> Plan:
    """The plan with tensors one column wide. Layers that are recomputed cost time, which the plan knows, and no tensors."""
    return replace(
        plan,
        edges=tuple(replace(edge, width=1) for edge in plan.edges),
        transfers=tuple(
            replace(t, shape=(t.shape[0], 1), num_bytes=t.shape[0] * ITEM_SIZES[t.dtype]) for t in plan.transfers
        ),
        actions=tuple(tuple(_as_one_layer(action) for action in actions) for actions in plan.actions),
    )


def stand_in_graph(plan: Plan) -> ModelGraph:
    """Modules by name, without losses: there is nothing to compare."""
    names = dict.fromkeys(chunk.module for chunk in plan.placement.chunks)
    layer = LayerSpec(kind="stand-in", build=nn.Identity)
    return ModelGraph(modules=tuple(Module(name=name, layers=(layer,)) for name in names))


def stand_in_parameters(plan: Plan, worker: int) -> dict[str, nn.Parameter]:
    """One number for every group that the worker holds, by the name of the group's first layer."""
    return {group.parameters[0]: nn.Parameter(torch.zeros(1)) for group in plan.groups if worker in group.holders}


def stand_in_chunk(tensors: Tensors) -> BuiltChunk:
    """A chunk of one layer that passes gradients on and leaves values at zero."""
    spec = LayerSpec(
        kind="stand-in",
        build=nn.Identity,
        reads=tuple(tensor.name for tensor in tensors.inputs),
        sends=tensors.outputs,
    )
    layer = BuiltLayer(name="stand-in", spec=spec, module=_StandIn(tensors.outputs), inside={})
    inputs = {tensor.name: tensor for tensor in tensors.inputs}
    return BuiltChunk(layers=(layer,), inputs=inputs, loads=(), loss=None)


class _StandIn(nn.Module):
    def __init__(self, outputs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        total = torch.zeros(1, dtype=part.dtype)
        for tensor in state.values():
            if tensor.is_floating_point():
                total = total + tensor.sum().to(part.dtype) * 0.0
        result = {}
        for spec in self._outputs:
            dtype = part.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
            result[spec.name] = total.to(dtype).expand(sum(part.sizes(spec.rows)), 1)
        return result


_NOTHING = nn.Identity()


def _narrow(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name=name, rows=spec.rows, width=1, dtype=spec.dtype, grad=spec.grad)


def _as_one_layer(action: Action) -> Action:
    if not isinstance(action, Compute) or not action.strategies:
        return action
    return replace(action, strategies=("offload" if "offload" in action.strategies else "keep",))
