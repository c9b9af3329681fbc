"""What torch's operators are to a machine: matmuls with their operands, attention kernels with their FLOPs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

MATMULS = {
    "aten.mm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.bmm": (0, 1),
    "aten.baddbmm": (1, 2),
}


def matmul_of(
    name: str, args: tuple[Any, ...], result: Any, flops: int
) -> tuple[tuple[int, int, int, int], tuple[Tensor, ...]]:
    """(batch, m, k, n) and the operands A, B and C of a matmul C[m, n] = A[m, k] B[k, n]."""
    if name in MATMULS:
        left, right = (args[i] for i in MATMULS[name])
        batch = left.shape[0] if left.dim() == 3 else 1
        return (batch, left.shape[-2], left.shape[-1], right.shape[-1]), (left, right, result)
    if flops and name in ("aten.convolution", "aten._convolution"):
        image, weight = args[0], args[1]
        rows = result.numel() // weight.shape[0]
        return (1, rows, weight[0].numel(), weight.shape[0]), (image, weight, result)
    if flops and name == "aten.convolution_backward":
        gradient, image, weight = args[0], args[1], args[2]
        rows = gradient.numel() // weight.shape[0]
        return (1, rows, weight.shape[0], weight[0].numel()), (gradient, weight, image)
    return (0, 0, 0, 0), ()


def attention_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int, int] | None:
    """(name, FLOPs, FLOPs without what a causal kernel skips) of an attention kernel; None for any other call."""
    name = func._schema.name
    if "attention" not in name and "attn" not in name:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not {"query", "key", "value"} <= given.keys():
        return None
    query, key, value = given["query"], given["key"], given["value"]
    backward = "backward" in name
    if "cu_seq_q" in given:  # [rows, heads, dim], sequences one below the other
        starts = given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist()
        lengths = [tuple(b - a for a, b in pairwise(of)) for of in starts]
        shapes = [(1, rows, columns) for rows, columns in zip(*lengths, strict=True)]
        causal = tuple(given.get("window_size", (-1, -1)))[1:] == (0,) or bool(given.get("is_causal"))
        heads = query.shape[1]
    else:
        shapes = [(query.shape[0], query.shape[-2], key.shape[-2])]
        causal, heads = bool(given.get("is_causal")), query.shape[-3]
    flops = counted = 0
    for batch, rows, columns in shapes:
        one = attention_flops(batch, heads, rows, columns, query.shape[-1], value.shape[-1])[backward]
        flops += one
        counted += one * attention_pairs(rows, columns, causal) // max(1, rows * columns)
    return "attention_backward" if backward else "attention", flops, counted


def attention_flops(batch: int, heads: int, rows: int, columns: int, dim: int, value_dim: int) -> tuple[int, int]:
    """FLOPs of forward and backward, the whole square of (query, key) pairs, as torch counts them."""
    query, key, value = (batch, heads, rows, dim), (batch, heads, columns, dim), (batch, heads, columns, value_dim)
    out = (batch, heads, rows, value_dim)
    return int(sdpa_flop_count(query, key, value)), int(sdpa_backward_flop_count(out, query, key, value))


def attention_pairs(rows: int, columns: int, causal: bool) -> int:
    """(query, key) pairs that the kernel works on; a causal one skips those above the diagonal."""
    if not causal:
        return rows * columns
    first = min(rows, columns)
    return first * (first + 1) // 2 + max(0, rows - columns) * columns
