"""What one worker measured in a calibration: plain records that travel to the first rank."""

from __future__ import annotations

import msgspec

from pipeweaver.semu.calls import Kind, OperatorPhase


class OperatorSample(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of one operator on one part, where they stand in their layer: `ns` of all `count` of them.

    `shape` is (batch, m, k, n) of a matmul; `flops` and `num_bytes` are of one launch.
    """

    name: str
    kind: Kind
    phase: OperatorPhase
    shape: tuple[int, int, int, int]
    flops: float
    num_bytes: float
    count: int
    ns: float


class LayerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One layer on one part: its operators, and what it takes as a part of a stage, operators and all.

    `input_ns` and `weight_ns` are the halves of a split backward, what its forward takes longer counted with the
    first; `recompute_ns` is what forward and backward take longer if the layer runs again. Zero without a backward.
    """

    layer: str
    operators: tuple[OperatorSample, ...]
    forward_ns: float
    backward_ns: float = 0.0
    input_ns: float = 0.0
    weight_ns: float = 0.0
    recompute_ns: float = 0.0


class StageSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage costs beside its layers."""

    forward_ns: float
    backward_ns: float


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """Loading one tensor of a part from the data set."""

    tensor: str
    items: int
    num_bytes: int
    ns: float


class OptimizerSample(msgspec.Struct, frozen=True, kw_only=True):
    """Norm, clipping and step of so many parameters with so many elements in all."""

    parameters: int
    elements: int
    ns: float


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a transfer between workers `ends` (sender, receiver), of a reduction over `ends` members, or of a
    copy to host memory, without `ends`. `crosses`: between hosts. `core_ns` is what a transfer takes of this end's cores."""

    ends: tuple[int, ...]
    num_bytes: int
    duration_ns: int
    crosses: bool = False
    core_ns: int = 0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker measured. `grid` are operators alone, at sizes that no job asked for; `floor_ns` is the
    shortest that any kernel takes.

    `core_share` is the share of its cores that the worker had while it measured.
    """

    layers: tuple[LayerSample, ...]
    grid: tuple[OperatorSample, ...]
    floor_ns: float
    stage: StageSample
    loads: tuple[LoadSample, ...] = ()
    optimizer: tuple[OptimizerSample, ...] = ()
    core_share: float = 1.0
    transfers: tuple[LinkSample, ...] = ()
    reductions: tuple[LinkSample, ...] = ()
    host: tuple[LinkSample, ...] = ()
