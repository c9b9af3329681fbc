"""Attention over packed rows, and rotary positions.

Rows of several sequences lie one below the other; `lengths` says where each ends. A row attends to rows
of its own sequence only. Example: lengths [3, 2], causal: row 1 sees rows 0, 1; row 3 sees row 3 alone.

Rotary positions after Su et al., arXiv 2104.09864, in the half-split layout of Llama; with several axes
each takes an equal share of the frequencies, as in Qwen2-VL (arXiv 2409.12191).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Scaled dot-product attention within each sequence, [rows, heads, head_dim].

    `q` is [rows, heads, head_dim] with rows = sum of `lengths`; `k`, `v` are [key rows, key heads, head_dim],
    where key heads divide heads (each serves a group) and key rows = sum of `key_lengths`, by default
    `lengths`. Sequences may be empty; a row without a key to attend to gets zeros.

    Half-precision tensors on a GPU take one variable-length kernel. Elsewhere neighbouring sequences of
    equal length make one batched call. Overridable as torch's own functions are (`torch.overrides`).
    """
    if has_torch_function((q, k, v)):  # cost emulation stands in for it: one kernel, whatever runs here
        return handle_torch_function(attend, (q, k, v), q, k, v, lengths, key_lengths, causal=causal)
    key_lengths = lengths if key_lengths is None else key_lengths
    rows, key_rows = sum(lengths), sum(key_lengths)
    assert len(lengths) == len(key_lengths), f"{len(lengths)} sequences of queries, {len(key_lengths)} of keys"
    assert rows == q.shape[0], f"lengths sum to {rows}, there are {q.shape[0]} rows"
    assert key_rows == k.shape[0], f"key lengths sum to {key_rows}, there are {k.shape[0]} key rows"
    assert not causal or list(lengths) == list(key_lengths), "causal attention is between rows of the same sequence"
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and rows and key_rows:
        kernel = _variable_length_kernel()
        if kernel is not None:
            return _attend_packed(kernel, q, k, v, lengths, key_lengths, causal)
    return attend_by_length(q, k, v, lengths, key_lengths, causal)


def rotary(coordinates: Sequence[Tensor], head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [rows, 1, head_dim / 2].

    `coordinates` holds one position per row for each axis: (position,) for text, (y, x) for images. The
    head_dim / 2 frequencies are shared out over the axes, the first ones taking one more where that does
    not divide. Angles are computed in float64, so that far positions stay exact.
    """
    half, axes = head_dim // 2, len(coordinates)
    angles = []
    for axis, positions in enumerate(coordinates):
        count = half // axes + (axis < half % axes)
        exponents = torch.arange(count, dtype=torch.float64, device=positions.device) / count
        angles.append(positions.double()[:, None] * base**-exponents)
    angle = torch.cat(angles, dim=1)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) of every head by the row's angle; x is [rows, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Position of each row in its sequence: [0, 1, 2, 0, 1] for lengths [3, 2]."""
    rows = [torch.arange(length) for length in lengths]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(device, non_blocking=True)


def attend_by_length(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], causal: bool
) -> Tensor:
    """`attend` by torch's own kernels, one batched call for each run of sequences of equal length."""
    grouped = q.shape[1] != k.shape[1]
    shapes = [(*shape, len(list(run))) for shape, run in groupby(zip(lengths, key_lengths, strict=True))]
    # Split once, so that the backward puts gradients together once.
    queries = _split(q, [count * length for length, _, count in shapes])
    keys, values = (_split(t, [count * length for _, length, count in shapes]) for t in (k, v))
    pieces = []
    for number, (length, key_length, count) in enumerate(shapes):
        if length == 0:
            continue
        if key_length == 0:
            pieces.append(torch.zeros_like(queries[number]))
            continue
        out = F.scaled_dot_product_attention(
            _batched(queries[number], count),
            _batched(keys[number], count),
            _batched(values[number], count),
            is_causal=causal,
            enable_gqa=grouped,
        )
        pieces.append(out.transpose(1, 2).reshape(queries[number].shape))
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else q.clone()


def _split(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return rows.split(list(sizes)) if len(sizes) > 1 else [rows]


def _batched(rows: Tensor, count: int) -> Tensor:
    """[count * length, heads, head_dim] -> [count, heads, length, head_dim]"""
    return rows.unflatten(0, (count, -1)).transpose(1, 2)


def _attend_packed(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    causal: bool,
) -> Tensor:
    return kernel(
        q,
        k,
        v,
        _starts(lengths, q.device),
        _starts(key_lengths, q.device),
        max(lengths),
        max(key_lengths),
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """First row of each sequence, and the end of the last: int32 [sequences + 1]."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts.to(device, non_blocking=True)


@cache
def _variable_length_kernel() -> Callable[..., Any] | None:
    """torch's kernel, where this version has it with grouped queries (2.11 and later)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= set(parameters) else None
