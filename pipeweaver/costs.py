"""Costs: for every stage its duration and bytes, for every transfer its time.

Planner, compiler and emulator ask for costs in this form only; whoever makes them (a profile of this
machine, an emulator of others) fills it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipeweaver.data.items import Item
from pipeweaver.schedule.ir import Chunk


class StageCost(NamedTuple):
    """Cost of one (chunk, part), all layers kept.

    `input_ns` + `weight_ns` are the two halves of a split backward; zero where it cannot be split.
    `loaded_bytes`: data from the loader. `saved_bytes`: held from forward to backward beside what crosses
    the chunk's boundary (inputs and outputs follow from the edges). `*_workspace_bytes`: needed only
    while the stage runs. `weight_bytes`: held from I to W.
    """

    forward_ns: int
    backward_ns: int
    load_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_bytes: int = 0


class Costs(Protocol):
    """What the planner may ask. Implementations are pure: equal questions, equal answers."""

    source: str
    """Where the numbers are from, printed with every prediction: "profile of 2026-11-29, 2 workers busy"."""

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        """Cost of running `items` through `chunk`; `links[i]` are the source items linked to items[i]."""
        ...

    def useful_ns(self, module: str, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> int:
        """Forward and backward of the items over the whole module at its most efficient size, no recomputation."""
        ...

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int: ...

    def reduce_ns(self, holders: int, num_bytes: int) -> int: ...

    def parameter_bytes(self, layer: str) -> int:
        """Trainable parameters of one copy of a layer ("language.layers.3"), as they are reduced."""
        ...

    def static_bytes(self, layer: str) -> int:
        """Parameters, gradients and optimizer state of one copy of a layer."""
        ...

    def optimizer_ns(self, layer: str) -> int:
        """Clipping and stepping the parameters of one copy of a layer."""
        ...
