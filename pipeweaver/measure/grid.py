"""Operators alone, at sizes that no job asked for: what matmuls, attention and memory reach on this worker.

    operators, floor_ns = measure_grid(device, torch.float32, barrier)

Matmuls [m, k] x [k, n] in the three layouts of a linear map's forward and backward, attention forward and backward over
one sequence, copies from cache-sized to memory-sized, and an addition of one element: the floor of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from pipeweaver.measure.records import OperatorSample
from pipeweaver.measure.stopwatch import stopwatch
from pipeweaver.model.attention import attend
from pipeweaver.semu.aten import attention_flops, attention_pairs
from pipeweaver.semu.calls import Kind, OperatorPhase
from pipeweaver.semu.recorder import Stopwatch

ROWS, WIDTHS = (64, 256, 1024), (128, 512)
LENGTHS, HEADS, HEAD_DIM = (32, 128, 512), 4, 64
COPIED_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 25)
ROUNDS = 5


def measure_grid(
    device: torch.device, dtype: torch.dtype, barrier: Callable[[], None], *, core_time: bool = False, scale: int = 1
) -> tuple[tuple[OperatorSample, ...], float]:
    """(operators, floor of a kernel in ns). All workers call this at the same time; `scale` widens matmuls, for a GPU."""
    barrier()
    timed = stopwatch(device, core_time)
    found: list[OperatorSample] = []
    for rows in ROWS:
        for inner in WIDTHS:
            for outer in WIDTHS:
                found += _matmuls(rows * scale, inner * scale, outer * scale, device, dtype, timed)
    for length in LENGTHS:
        found += _attention(length * scale, device, dtype, timed)
    for num_bytes in COPIED_BYTES:
        source = torch.zeros(num_bytes * scale // dtype.itemsize, device=device, dtype=dtype)
        target = torch.zeros_like(source)
        ns = _median_ns(partial(target.copy_, source), timed)
        found.append(_sample("copy", "memory", "F", ns, num_bytes=2 * num_bytes * scale))
    one = torch.zeros(1, device=device, dtype=dtype)
    return tuple(found), _median_ns(lambda: one.add_(1.0), timed)


def any_numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers to measure with, from a generator of their own: torch's global one is watched (`model/refused.py`)."""
    generator = torch.Generator(device)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _matmuls(
    rows: int, inner: int, outer: int, device: torch.device, dtype: torch.dtype, timed: Stopwatch
) -> list[OperatorSample]:
    inputs, weight = any_numbers((rows, inner), device, dtype), any_numbers((outer, inner), device, dtype)
    gradient = any_numbers((rows, outer), device, dtype)
    size = weight.element_size() * (rows * inner + inner * outer + rows * outer)
    made: list[tuple[OperatorPhase, Callable[[], Tensor], tuple[int, int, int]]] = [
        ("F", lambda: inputs @ weight.t(), (rows, inner, outer)),
        ("I", lambda: gradient @ weight, (rows, outer, inner)),
        ("W", lambda: gradient.t() @ inputs, (outer, rows, inner)),
    ]
    flops = 2.0 * rows * inner * outer
    return [
        _sample("aten.mm", "matmul", phase, _median_ns(call, timed), flops=flops, num_bytes=size, shape=(1, *shape))
        for phase, call, shape in made
    ]


def _attention(length: int, device: torch.device, dtype: torch.dtype, timed: Stopwatch) -> list[OperatorSample]:
    q, k, v = (any_numbers((length, HEADS, HEAD_DIM), device, dtype).requires_grad_() for _ in range(3))
    gradient = any_numbers((length, HEADS, HEAD_DIM), device, dtype)
    forward, backward = [], []
    for _ in range(ROUNDS):
        out, ns = timed(lambda: attend(q, k, v, [length], causal=True))
        forward.append(ns)
        gradients = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        backward.append(timed(gradients)[1])
    both = attention_flops(1, HEADS, length, length, HEAD_DIM, HEAD_DIM)
    share = attention_pairs(length, length, True) / length**2
    return [
        _sample("attention", "attention", "F", median(forward), flops=both[0] * share),
        _sample("attention_backward", "attention", "I", median(backward), flops=both[1] * share),
    ]


def _median_ns(call: Callable[[], object], timed: Stopwatch) -> float:
    return max(1.0, median(timed(call)[1] for _ in range(ROUNDS)))


def _sample(
    name: str,
    kind: Kind,
    phase: OperatorPhase,
    ns: float,
    *,
    flops: float = 0.0,
    num_bytes: float = 0.0,
    shape: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> OperatorSample:
    return OperatorSample(
        name=name, kind=kind, phase=phase, shape=shape, flops=flops, num_bytes=num_bytes, count=1, ns=ns
    )
