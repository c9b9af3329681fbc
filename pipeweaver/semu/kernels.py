"""Device kernels that stand in for chains of torch operators, as shapes and bytes without arithmetic.

On the meta device torch spells out what one CUDA kernel does: attention becomes two batched matmuls with
the whole score matrix between them, an RMS norm seven elementwise operators. `device_kernels()` puts the
kernel back in place while a layer is traced (on a CPU, attention over sequences of one length alone is one); `fused` describes any other kernel in a line:

    out = fused("swiglu", gate_and_up, shape=(rows, ffn), save=(0,))

reads its inputs and writes its output in forward, saves input 0, and reads the gradient and what it saved and
writes its inputs' gradients in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeweaver.model.attention import attend, attend_by_length
from pipeweaver.semu.aten import attention_flops, attention_pairs
from pipeweaver.semu.calls import Kind
from pipeweaver.semu.recorder import record


def fused(
    name: str,
    *inputs: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    save: Sequence[int] = (),
    save_output: bool = False,
    order: Sequence[int] | None = None,
    passes: Sequence[int] = (),
    updates: Sequence[int] = (),
    extra: Sequence[tuple[Sequence[int], torch.dtype]] = (),
    kind: Kind = "memory",
    flops: tuple[int, int] = (0, 0),
    counted_flops: tuple[int, int] | None = None,
) -> Tensor:
    """One kernel from `inputs` to an output of `shape`, and one for its backward.

    `save` are positions of inputs kept for backward, `extra` further tensors made and kept (statistics, a
    dropout mask), `passes` inputs whose gradient is the output's itself (a residual), `updates` inputs written in place. `order` are the output's dimensions from outermost to innermost in memory. `flops` are those of forward and backward, `counted_flops` without what a causal kernel skips.
    """
    counted = flops if counted_flops is None else counted_flops
    order = tuple(range(len(shape))) if order is None else tuple(order)
    out: Tensor = _Fused.apply(  # type: ignore[no-untyped-call]
        name,
        kind,
        tuple(shape),
        order,
        dtype or inputs[0].dtype,
        tuple(save),
        save_output,
        tuple(passes),
        tuple(updates),
        tuple(extra),
        flops,
        counted,
        *inputs,
    )
    return out


Kernels = Literal["cuda", "cpu"]


def device_kernels(kernels: Kernels = "cuda") -> TorchFunctionMode:
    """A context in which torch functions that are one kernel on the device are traced as one."""
    return _DeviceKernels(_REPLACED[kernels])


class _DeviceKernels(TorchFunctionMode):
    def __init__(self, replaced: dict[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.replaced.get(func, func)(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        name, kind, shape, order, dtype, save, save_output, passes, updates, extra, flops, counted, *inputs = args
        out = _empty(shape, order, dtype)
        made = [torch.empty(tuple(size), dtype=of, device="meta") for size, of in extra]
        ctx.save_for_backward(*(inputs[i] for i in save), *([out] if save_output else []), *made)
        ctx.name, ctx.kind, ctx.flops, ctx.counted = name, kind, flops[1], counted[1]
        ctx.passes = passes
        ctx.shapes = [(tensor.shape, _order(tensor), tensor.dtype) for tensor in inputs]
        written = [out, *made, *(inputs[i] for i in updates)]
        record(name, kind=kind, reads=inputs, writes=written, flops=flops[0], counted_flops=counted[0], forward=True)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = zip(ctx.shapes, ctx.needs_input_grad[_OPTIONS:], strict=True)
        made: list[Tensor | None] = [
            _empty(shape, order, dtype) if needed and number not in ctx.passes else None
            for number, ((shape, order, dtype), needed) in enumerate(wanted)
        ]
        record(
            f"{ctx.name}_backward",
            kind=ctx.kind,
            reads=[gradients[0], *ctx.saved_tensors],
            writes=[tensor for tensor in made if tensor is not None],
            flops=ctx.flops,
            counted_flops=ctx.counted,
        )
        for number in ctx.passes:
            made[number] = gradients[0]
        return (None,) * _OPTIONS + tuple(made)


_OPTIONS = 12
"""Arguments of `_Fused.forward` before the tensors."""


def _empty(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose dimensions lie in memory in the given order, outermost first."""
    dense = torch.empty([shape[i] for i in order], dtype=dtype, device="meta")
    return dense.permute([order.index(i) for i in range(len(shape))])


def _order(tensor: Tensor) -> list[int]:
    """Dimensions from outermost to innermost in memory."""
    return sorted(range(tensor.dim()), key=lambda i: -tensor.stride()[i])


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    rows = input.numel() // max(1, input.shape[-1])
    tensors = (input,) if weight is None else (input, weight)
    return fused(
        "rms_norm",
        *tensors,
        shape=input.shape,
        save=tuple(range(len(tensors))),
        extra=(((rows,), torch.float32),),
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """The variable-length kernel of `model.attention.attend`; FLOPs are torch's, sequence by sequence."""
    heads, dim, value_dim = query.shape[1], query.shape[2], value.shape[2]
    key_lengths = lengths if key_lengths is None else key_lengths
    flops, counted = [0, 0], [0, 0]
    for rows, columns in zip(lengths, key_lengths, strict=True):
        forward, backward = attention_flops(1, heads, rows, columns, dim, value_dim)
        pairs, all_pairs = attention_pairs(rows, columns, causal), max(1, rows * columns)
        for index, count in enumerate((forward, backward)):
            flops[index] += count
            counted[index] += count * pairs // all_pairs
    return fused(
        "attention",
        query,
        key,
        value,
        shape=(query.shape[0], heads, value_dim),
        save=(0, 1, 2),
        save_output=True,
        extra=(((heads, query.shape[0]), torch.float32),),
        kind="attention",
        flops=(flops[0], flops[1]),
        counted_flops=(counted[0], counted[1]),
    )


def _attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """A call for every run of sequences of equal length, each of which is one kernel."""
    with device_kernels("cpu"):
        return attend_by_length(query, key, value, lengths, key_lengths or lengths, causal)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    batch = query.shape[:-3].numel()
    heads, rows, dim = query.shape[-3:]
    columns, value_dim = value.shape[-2:]
    flops = attention_flops(batch, heads, rows, columns, dim, value_dim)
    pairs, all_pairs = attention_pairs(rows, columns, is_causal), max(1, rows * columns)
    return fused(
        "attention",
        query,
        key,
        value,
        *([] if attn_mask is None else [attn_mask]),
        shape=(*query.shape[:-1], value_dim),
        order=(*range(query.dim() - 3), query.dim() - 2, query.dim() - 3, query.dim() - 1),  # rows, then heads
        save=(0, 1, 2) if attn_mask is None else (0, 1, 2, 3),
        save_output=True,
        extra=((query.shape[:-1], torch.float32),),
        kind="attention",
        flops=flops,
        counted_flops=(flops[0] * pairs // all_pairs, flops[1] * pairs // all_pairs),
    )


_REPLACED: dict[Kernels, dict[Callable[..., Any], Callable[..., Any]]] = {
    "cuda": {
        F.scaled_dot_product_attention: _scaled_dot_product_attention,
        F.rms_norm: _rms_norm,
        attend: _attend,
    },
    "cpu": {F.scaled_dot_product_attention: _scaled_dot_product_attention, attend: _attend_on_cpu},
}
