"""Costs: for every stage its duration and bytes, for every transfer its time.

Planner, compiler and emulator ask for costs in this form only; whoever makes them (a profile of this
machine, an emulator of others) fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from pipeweaver.data.items import Item
from pipeweaver.data.table import ItemTable
from pipeweaver.schedule.ir import Chunk, Strategy

Answer = TypeVar("Answer")


class StrategyCost(NamedTuple):
    """A layer under a memory strategy: bytes held on its worker from forward to backward, beside what crosses its
    boundary; what backward takes longer; how long its tensors travel to host memory, once each way; and what its
    forward needs beyond what it leaves behind, its backward beyond what it finds: more than when all is kept."""

    saved_bytes: int
    extra_ns: int
    offload_ns: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


LayerStrategies = Mapping[Strategy, StrategyCost]
"""What can become of a layer's saved tensors; "keep" is always there."""


class StageCost(NamedTuple):
    """Cost of one (chunk, part), all layers kept.

    `input_ns` + `weight_ns` are the two halves of a split backward; zero where it cannot be split.
    `loaded_bytes`: data from the loader. `saved_bytes`: held from forward to backward beside what crosses
    the chunk's boundary (inputs and outputs follow from the edges). `*_workspace_bytes`: needed only
    while the stage runs, the backward's for B and I. `weight_bytes`: held from I to W. `offloaded_bytes` travel to the host after the forward and
    back before the backward, `offload_ns` each way, beside compute; they are not among `saved_bytes`.
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
    weight_workspace_bytes: int = 0
    offloaded_bytes: int = 0
    offload_ns: int = 0


def with_strategies(cost: StageCost, strategies: Sequence[Strategy], layers: Sequence[LayerStrategies]) -> StageCost:
    """The cost of a stage whose layers follow these strategies; none means keep throughout.

    Raises ValueError if it is not known what a strategy costs.
    """
    if not any(strategy != "keep" for strategy in strategies):
        return cost
    if len(layers) != len(strategies):
        raise ValueError(f"{len(strategies)} memory strategies for a stage with costs of {len(layers)} layers")
    extra, freed, away, away_ns = 0, 0, 0, 0
    forward, backward = cost.forward_workspace_bytes, cost.backward_workspace_bytes
    for number, (strategy, known) in enumerate(zip(strategies, layers, strict=True)):
        if strategy not in known:
            raise ValueError(f"layer {number} of a stage cannot {strategy}: its costs know {', '.join(known)}")
        chosen = known[strategy]
        less = known["keep"].saved_bytes - chosen.saved_bytes
        extra, freed = extra + chosen.extra_ns, freed + less
        forward = max(forward, chosen.forward_workspace_bytes)
        backward = max(backward, chosen.backward_workspace_bytes)
        if strategy == "offload":
            away, away_ns = away + less, away_ns + chosen.offload_ns
    return cost._replace(
        backward_ns=cost.backward_ns + extra,
        input_ns=cost.input_ns + extra if cost.input_ns or cost.weight_ns else 0,
        saved_bytes=cost.saved_bytes - freed,
        forward_workspace_bytes=forward,
        backward_workspace_bytes=backward,
        offloaded_bytes=away,
        offload_ns=away_ns,
    )


class Costs(Protocol):
    """What the planner may ask. Implementations are pure: equal questions, equal answers."""

    @property
    def source(self) -> str:
        """Where the numbers are from, printed with every prediction: "profile of 2026-11-29, 2 workers busy"."""
        ...

    @property
    def coverage(self) -> object:
        """How much of what was asked so far rests on defaults; what it is as text is printed with results."""
        ...

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        """Cost of running `items` through `chunk`; `links[i]` are the source items linked to items[i]."""
        ...

    def stages(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[StageCost]:
        """The same of many chunks, each with a part of the table's items."""
        ...

    def strategies(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> Sequence[LayerStrategies]:
        """For every layer of a stage, `before` and `after` included, what each memory strategy costs."""
        ...

    def strategies_of(
        self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]
    ) -> Sequence[Sequence[LayerStrategies]]:
        """The same of many chunks, each with a part of the table's items."""
        ...

    def useful_ns(self, module: str, table: ItemTable, items: Sequence[int]) -> int:
        """Forward and backward of these of the table's items over the whole module at its most efficient size, no
        recomputation."""
        ...

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int: ...

    def post_ns(self, num_bytes: int) -> int:
        """What a transfer takes of the time of each of its workers, which cannot compute meanwhile."""
        ...

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


def one_by_one(
    answer: Callable[[Chunk, Sequence[Item], Sequence[Sequence[Item]]], Answer],
    table: ItemTable,
    asked: Sequence[tuple[Chunk, Sequence[int]]],
) -> list[Answer]:
    """`stages` or `strategies_of` for costs that gain nothing from being asked for many."""
    sources = table.sources
    return [answer(chunk, [table.items[i] for i in of], [sources[i] for i in of]) for chunk, of in asked]


@dataclass(frozen=True, kw_only=True)
class FlatCosts:
    """Made-up costs proportional to rows and layers, so that closed forms hold exactly: for tests and drawings.

    Example: `FlatCosts(layers={"vision": 4, "language": 8}, row_ns={"language": 2000})`: the forward of one
    layer takes 2000 ns per row of language and 1000 of vision, its backward twice that. `before` and `after`
    cost nothing. The halves of a split backward are equal.
    """

    layers: Mapping[str, int]
    """Number of layers of each module."""
    row_ns: Mapping[str, int] = field(default_factory=dict)
    """Forward of one layer on one row, by module; 1000 where a module is missing."""
    backward: int = 2
    """Backward takes this many times the forward."""
    row_bytes: int = 64
    """Saved by one layer per row."""
    layer_bytes: int = 1 << 20
    """Parameters of a layer; with gradients and two moments it holds four times as much."""
    latency_ns: int = 10_000
    posting_ns: int = 0
    bytes_per_us: int = 1_000
    """Bandwidth of every link, of the way to host memory, and of the optimizer."""
    missing: frozenset[str] = frozenset()
    """`before` and `after` that modules do not have: "language.before"."""
    source: str = "flat costs, made up"
    coverage: str = "all of it is made up"

    def stage(self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]) -> StageCost:
        rows = _rows(items)
        num_layers = chunk.stop - chunk.start
        forward_ns = self._row_ns(chunk.module) * rows * num_layers
        backward_ns = forward_ns * self.backward
        return StageCost(
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            input_ns=backward_ns // 2,
            weight_ns=backward_ns - backward_ns // 2,
            saved_bytes=self.row_bytes * rows * num_layers,
            weight_bytes=self.row_bytes * rows * num_layers,
        )

    def stages(self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]) -> list[StageCost]:
        return one_by_one(self.stage, table, asked)

    def strategies(
        self, chunk: Chunk, items: Sequence[Item], links: Sequence[Sequence[Item]]
    ) -> tuple[LayerStrategies, ...]:
        rows = _rows(items)
        saved, forward = self.row_bytes * rows, self._row_ns(chunk.module) * rows
        layer: LayerStrategies = {
            "keep": StrategyCost(saved_bytes=saved, extra_ns=0),
            "recompute": StrategyCost(saved_bytes=0, extra_ns=forward, backward_workspace_bytes=saved),
            "recompute-attention": StrategyCost(
                saved_bytes=saved // 2, extra_ns=forward // 4, backward_workspace_bytes=saved - saved // 2
            ),
            "offload": StrategyCost(saved_bytes=0, extra_ns=0, offload_ns=saved * 1_000 // self.bytes_per_us),
        }
        nothing: LayerStrategies = dict.fromkeys(layer, StrategyCost(saved_bytes=0, extra_ns=0))
        before = [nothing] if chunk.start == 0 and f"{chunk.module}.before" not in self.missing else []
        last = chunk.stop == self.layers[chunk.module]
        after = [nothing] if last and f"{chunk.module}.after" not in self.missing else []
        return (*before, *[layer] * (chunk.stop - chunk.start), *after)

    def strategies_of(
        self, table: ItemTable, asked: Sequence[tuple[Chunk, Sequence[int]]]
    ) -> list[tuple[LayerStrategies, ...]]:
        return one_by_one(self.strategies, table, asked)

    def useful_ns(self, module: str, table: ItemTable, items: Sequence[int]) -> int:
        rows = sum(table.sizes("tokens")[list(items)].tolist())
        return self._row_ns(module) * rows * self.layers[module] * (1 + self.backward)

    def transfer_ns(self, sender: int, receiver: int, num_bytes: int) -> int:
        return 0 if sender == receiver else self.latency_ns + num_bytes * 1_000 // self.bytes_per_us

    def post_ns(self, num_bytes: int) -> int:
        return self.posting_ns

    def reduce_ns(self, holders: int, num_bytes: int) -> int:
        # A ring moves every byte twice, but for the share that a holder keeps.
        moved = 2 * num_bytes * (holders - 1) // holders
        return 0 if holders == 1 else self.latency_ns + moved * 1_000 // self.bytes_per_us

    def parameter_bytes(self, layer: str) -> int:
        return self.layer_bytes

    def static_bytes(self, layer: str) -> int:
        return 4 * self.layer_bytes

    def optimizer_ns(self, layer: str) -> int:
        return self.static_bytes(layer) * 1_000 // self.bytes_per_us

    def _row_ns(self, module: str) -> int:
        return self.row_ns.get(module, 1_000)


def _rows(items: Sequence[Item]) -> int:
    return sum(item.sizes["tokens"] for item in items)
