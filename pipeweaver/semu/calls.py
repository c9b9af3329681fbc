"""What a trace of a layer consists of: calls of kernels, the storages they touch, and what is held for backward.

`y = linear(x)` is a call `F aten.addmm 1 x (3, 4, 8)` that reads storages 0 (input x) and 1 (parameter weight) and
writes storage 3; see `trace.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["matmul", "attention", "memory"]
"""What bounds an operator: matrix units, a fused attention kernel, or moving bytes."""

Owner = Literal["input", "parameter", "gradient", "own", "shared"]

OperatorPhase = Literal["F", "I", "W"]
"""Forward, or a part of backward: what input gradients need (I), what only parameter gradients need (W)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kernel launch. Tensors are named by their storage's number in `Trace.storages`.

    `shape` is (batch, m, k, n) of a matmul, zeros elsewhere. `flops` are torch's count,
    `counted_flops` leave out what a causal kernel skips. `reads` and `writes` pair a storage with the
    bytes touched in it. `live_bytes` is what the layer holds while the call runs: neither parameters
    and their gradients, nor inputs. `site` is where in the layer's code its forward call stands. `duration_ns` is
    what a stopwatch said, 0 without one.
    """

    name: str
    kind: Kind
    phase: OperatorPhase
    site: tuple[str, ...]
    visit: int
    parameter: str
    shape: tuple[int, int, int, int]
    operands: tuple[int, ...]
    flops: int
    counted_flops: int
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    live: tuple[int, ...]
    accumulates: bool = False
    again: bool = False
    duration_ns: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Storage:
    """`role` says whose it is: an input of that name, a parameter, a parameter's gradient, the layer's own, or
    shared: there before the layer ran, made for all layers of a part.

    `length` is the first dimension of the tensor that it was first seen under.
    """

    num_bytes: int
    length: int
    role: Owner
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Calls in order, forward then backward; what was saved; what came out.

    `saved` are storages held for backward; `outputs`, the gradients that came in for them and those that
    went out for inputs map names to storages. `parameter_bytes` maps parameters that took part to their bytes.
    """

    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]
    saved: frozenset[int]
    outputs: dict[str, int]
    output_gradients: dict[str, int]
    input_gradients: dict[str, int]
    parameter_bytes: dict[str, int]

    @property
    def saved_bytes(self) -> int:
        """Bytes held for backward, each storage once, parameters and inputs not counted."""
        return sum(self.storages[s].num_bytes for s in self.saved if self.storages[s].role == "own")


def fuse_accumulation(traced: Trace) -> Trace:
    """The trace of a framework whose weight-gradient matmuls add to the gradient themselves: no tensor between."""
    made = {number: call for call in traced.calls if call.kind == "matmul" for number, _ in call.writes}
    gone: dict[int, int] = {}  # a matmul's result -> the gradient that it was added to
    for call in traced.calls:
        if call.accumulates:
            source = next((number for number, _ in call.reads if number in made), None)
            target = next((number for number, _ in call.writes), None)
            if source is not None and target is not None:
                gone[source] = target
    calls = []
    for call in traced.calls:
        if call.accumulates and any(number in gone for number, _ in call.reads):
            continue
        writes = tuple((gone.get(number, number), touched) for number, touched in call.writes)
        operands = tuple(gone.get(number, number) for number in call.operands)
        live = tuple(number for number in call.live if number not in gone)
        calls.append(replace(call, writes=writes, operands=operands, live=live))
    return replace(traced, calls=tuple(calls))
