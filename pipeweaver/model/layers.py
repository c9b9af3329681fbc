"""What the blocks of all modules are made of: linear maps, attention with its projections, MLPs.

Initial values do not depend on torch's defaults: weights are normal with deviation 1 / sqrt(inputs), and
what adds to the residual stream is smaller by sqrt(2 * blocks), so that depth does not change its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeweaver.model.attention import attend, rotate
from pipeweaver.model.graph import LayerSpec
from pipeweaver.model.part import PartView

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]

NumLayers = Annotated[int, Meta(ge=1, le=10_000)]
"""Blocks of a module. Far more than any model has: more is a slip, and would take all memory before it is noticed."""

Sublayer = Literal["attention", "mlp"]
WHOLE: tuple[Sublayer, ...] = ("attention", "mlp")
"""The halves of a block, each of which adds to the residual stream."""


class Linear(nn.Linear):
    """nn.Linear whose weights start normal with the given deviation (1 / sqrt(inputs) by default), bias 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, deviation: float | None = None) -> None:
        self.deviation = inputs**-0.5 if deviation is None else deviation
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Projections to queries, keys and values, attention within each sequence, projection back.

    Keys and values come from x itself, or from a `condition` of width `condition_width` (cross-attention).
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        key_heads: int,
        head_dim: int,
        bias: bool = False,
        out_bias: bool = False,
        condition_width: int | None = None,
        out_deviation: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        source = hidden if condition_width is None else condition_width
        self.q = Linear(hidden, heads * head_dim, bias=bias)
        self.k = Linear(source, key_heads * head_dim, bias=bias)
        self.v = Linear(source, key_heads * head_dim, bias=bias)
        self.out = Linear(heads * head_dim, hidden, bias=out_bias, deviation=out_deviation)

    def forward(
        self,
        x: Tensor,
        lengths: Sequence[int],
        *,
        angles: tuple[Tensor, Tensor] | None = None,
        causal: bool = False,
        condition: Tensor | None = None,
        condition_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """[rows, hidden] -> [rows, hidden]. `angles` are the cosines and sines of rotary positions."""
        source = x if condition is None else condition
        q, k, v = (
            rows.unflatten(-1, (rows.shape[-1] // self.head_dim, self.head_dim))
            for rows in (self.q(x), self.k(source), self.v(source))
        )
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return self.out(attend(q, k, v, lengths, condition_lengths, causal=causal).flatten(1))


class Mlp(nn.Module):
    """down(activation(up(x))): two matrices."""

    def __init__(
        self, hidden: int, ffn: int, activation: Activation, *, bias: bool, out_deviation: float | None = None
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias, deviation=out_deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)): three matrices; SwiGLU with silu (Shazeer, arXiv 2002.05202)."""

    def __init__(
        self, hidden: int, ffn: int, activation: Activation, *, bias: bool, out_deviation: float | None = None
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = Linear(hidden, ffn, bias=bias)
        self.up = Linear(hidden, ffn, bias=bias)
        self.down = Linear(ffn, hidden, bias=bias, deviation=out_deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
}


def run_attention(part: PartView, attention: Callable[..., Tensor], *inputs: Any, **options: Any) -> Tensor:
    """Call a block's attention; where the memory strategy says so, forget it until the backward."""
    if part.recompute_attention and torch.is_grad_enabled():
        return checkpoint(
            attention,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=part.recompute_contexts,
            **options,
        )
    return attention(*inputs, **options)


def block_layers(
    blocks: int, sublayers: bool, layer: Callable[[tuple[Sublayer, ...]], LayerSpec]
) -> tuple[LayerSpec, ...]:
    """The layers of so many blocks: whole ones, or attention and MLP by turns. `layer` makes one of some halves."""
    if sublayers:
        return (layer(("attention",)), layer(("mlp",))) * blocks
    return (layer(WHOLE),) * blocks


def block_kind(
    role: str,
    halves: tuple[Sublayer, ...],
    *,
    both: Mapping[str, object],
    attention: Mapping[str, object],
    mlp: Mapping[str, object],
) -> str:
    """Name of the structure of a block, or of its half: of what it has, and nothing else."""
    structure = dict(both)
    structure |= attention if "attention" in halves else {}
    structure |= mlp if "mlp" in halves else {}
    return kind(f"{role}.{'block' if halves == WHOLE else halves[0]}", **structure)


def residual_deviation(inputs: int, blocks: int) -> float:
    """Deviation of initial weights whose output adds to the residual stream of a module with so many blocks."""
    return 1 / math.sqrt(inputs * 2 * blocks)


def kind(role: str, **structure: object) -> str:
    """Name of a layer's structure: equal for layers that cost the same, different otherwise."""
    return " ".join([role, *(f"{name}={value}" for name, value in structure.items())])


def check_heads(hidden: int, heads: int) -> None:
    """Raise ValueError unless `heads` divide `hidden`."""
    if hidden % heads:
        raise ValueError(f"heads = {heads} do not divide hidden = {hidden}; make hidden a multiple of heads")


def check_rotary(head_dim: int, *, axes: int) -> None:
    """Raise ValueError unless a head's dimensions make pairs, one per axis at least."""
    if head_dim % 2 or head_dim < 2 * axes:
        raise ValueError(
            f"heads of dimension {head_dim} cannot turn: rotary positions on {axes} "
            f"{'axis' if axes == 1 else 'axes'} need an even dimension of at least {2 * axes}"
        )
