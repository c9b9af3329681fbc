"""Bytes that a layer holds and needs on a part, counted while it runs.

Two layers in a row tell what each saves from what they share (rotary angles): a second layer adds what is its own,
and the tensor between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pipeweaver.profile.live import LiveBytes
from pipeweaver.runtime.stage import StageState, run_backward


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Of one layer on a part; fields as in `measured.LayerProfile`."""

    saved: int
    shared: int
    carried: int
    input_gradients: int
    forward_workspace: int
    backward_workspace: int
    weight: int = 0
    weight_workspace: int = 0


Forward = Callable[[], StageState]


def layer_memory(one: LayerMemory, two: LayerMemory | None) -> LayerMemory:
    """From a chunk of one layer and, where there are more of the kind in a row, one of two."""
    if two is None:
        return one
    # What is offloaded takes along the tensor between the layers.
    saved = max(0, two.saved - one.saved - one.carried)
    return LayerMemory(**{**one.__dict__, "saved": saved, "shared": one.saved - saved})


def chunk_memory(
    forward: Forward, gradients: Mapping[str, Tensor], carried: Iterable[str], *, backward: bool
) -> LayerMemory:
    """Of a chunk whose `forward` runs here; `carried` names what its first layer hands to the next.

    After the forward, offloaded tensors leave, to come back before the backward.
    """
    with LiveBytes() as live:
        state = forward()
        held, peak = live.now, live.peak
        between = live.bytes_of(state.outputs[name] for name in carried if name in state.outputs)
        saved = held - live.bytes_of(state.outputs.values())
        if state.offloaded is not None:
            saved -= state.offloaded.num_bytes
        live.reset_peak()
        returned = run_backward(state, gradients) if backward else {}
        input_gradients = live.bytes_of(returned.values())
        backward_peak = live.peak
        weight = weight_workspace = 0
        if state.later is not None:
            weight = state.later.num_bytes
            live.reset_peak()
            before = live.now
            state.later.accumulate()
            weight_workspace = live.peak - before
    return LayerMemory(
        saved=saved if backward else 0,
        shared=0,
        carried=between,
        input_gradients=input_gradients,
        forward_workspace=peak - held,
        backward_workspace=max(0, backward_peak - held - input_gradients),
        weight=weight,
        weight_workspace=weight_workspace,
    )
