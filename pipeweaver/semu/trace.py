"""Trace one layer, forward and backward, without data: operators, bytes, tensors kept for backward.

The layer really runs, on the meta device, under a dispatch mode that sees every call below autograd
(`recorder.py`). What it allocates and lets go of is watched too, so what stays alive between forward and backward
and the temporary peak are observations, not formulas. FLOPs are those of `torch.utils.flop_counter`.

Example: `y = linear(x)` of a 4 -> 8 layer on 3 rows is three operators,

    F  aten.addmm  1 x (3, 4, 8)   weight
    I  aten.mm     1 x (3, 8, 4)   weight        the gradient of x
    W  aten.mm     1 x (8, 3, 4)   weight        the gradient of the weight (and a sum for the bias)

and saves nothing but x, which belongs to whoever called. PipeWeaver section 4 calls this graph SEMU's. On real
tensors with a stopwatch the same calls come with the time that each took, where it stands in its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from pipeweaver.semu.calls import Trace
from pipeweaver.semu.recorder import CURRENT, Recorder, Stopwatch


def trace(
    run: Callable[[], Mapping[str, Tensor]],
    *,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    kernels: AbstractContextManager[Any] | None = None,
    stopwatch: Stopwatch | None = None,
) -> Trace:
    """Run `run` on meta tensors and backward from all it returns that needs a gradient.

    With a `stopwatch` it runs on the tensors' own device, on real data, and the stopwatch times every call.

    `inputs` are the tensors that `run` uses and its caller owns; those that require a gradient get one.
    `kernels` is a context in which `run` is called, to put device kernels in place of torch functions.
    Parameters get their gradients added to, as from the second microbatch on.
    Raises ValueError if a tensor is not on the meta device.
    """
    for name, tensor in [*inputs.items(), *parameters.items()]:
        if stopwatch is None and tensor.device.type != "meta":
            raise ValueError(f"{name} is on {tensor.device}; trace on the meta device (torch.device('meta'))")
    recorder = Recorder(inputs, parameters, stopwatch)
    token = CURRENT.set(recorder)
    try:
        with recorder, kernels or nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                outputs = dict(run())
            roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
            recorder.end_forward(outputs)
            del outputs
            with recorder.looking_away():
                gradients = {name: torch.ones_like(root) for name, root in roots.items()}
            recorder.output_gradients = {name: recorder.storage(tensor) for name, tensor in gradients.items()}
            if roots:
                recorder.phase = "I"
                _backward(roots, gradients)
            del roots, gradients
    finally:
        CURRENT.reset(token)
    return recorder.trace()


def _backward(roots: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    # Not `torch.autograd.backward`, which would leave the modes that checkpoints run forward in again.
    _engine_run_backward(
        tuple(roots.values()),
        tuple(gradients.values()),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
