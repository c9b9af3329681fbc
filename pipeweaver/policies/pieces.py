"""What the static policies share: a pipeline of pieces, and the stages behind its units.

A *piece* is a run of neighbouring chunks on one worker; a *unit* is one phase of one microbatch on one piece:
the stages of all its chunks. A static policy orders units; a microbatch without items of a module simply lacks
these stages. Example, a piece that ends vision and begins language (chunks 1 and 2): the unit (piece 0,
microbatch 0, F) is `1F0 2F0`, its backward `2B0 1B0`; without images they are `2F0` and `2B0`.

Any order of units that a chain of pieces can run is valid for any model graph, since chunks are numbered along
the flows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.partition import contiguous, layer_costs, task_modules
from pipeweaver.planner.parts import cut_parts
from pipeweaver.policies.policy import PlanStep
from pipeweaver.schedule.gradients import has_backward
from pipeweaver.schedule.ir import Draft, Placement, Stage


class Unit(NamedTuple):
    """One phase of one microbatch on one piece."""

    piece: int
    microbatch: int
    phase: Literal["F", "B"]


Units = tuple[tuple[Unit, ...], ...]
UnitOrder = Callable[[int, int, int], Units]
"""(workers, pieces, microbatches) -> the units of each worker in order, forward and backward; piece j is on
worker j mod workers."""


def place_contiguous(
    graph: ModelGraph,
    workers: int,
    costs: Costs,
    shares: Sequence[Share],
    options: PolicyOptions = DEFAULTS,
    *,
    dtype: str = "float32",
    budget_bytes: int | None = None,
    pieces_per_worker: int = 1,
) -> Placement:
    """The concatenated modules in workers * pieces_per_worker pieces of even cost."""
    return contiguous(
        graph,
        workers,
        layer_costs(graph, costs, shares, options.balance),
        task_modules(graph, shares),
        pieces_per_worker=pieces_per_worker,
        encoder_first=options.encoder_first,
    )


def plan_in_units(name: str, order: UnitOrder) -> PlanStep:
    """The `plan` of a static policy: its order of units, spelled out as stages; a part is a microbatch."""

    def plan(
        graph: ModelGraph,
        placement: Placement,
        share: Share,
        costs: Costs,
        *,
        budget_bytes: int | None,
        seed: int,
        rounds: int,
        forward_only: bool = False,
        options: PolicyOptions = DEFAULTS,
        dtype: str = "float32",
    ) -> Draft:
        parts = cut_parts(graph, placement, share, {})
        backward = has_backward(graph, placement)
        pieces = pieces_of(placement)
        part_of = [{part.microbatch: number for number, part in enumerate(of)} for of in parts]

        def stages(unit: Unit) -> list[Stage]:
            present = [c for c in pieces[unit.piece] if unit.microbatch in part_of[c]]
            if unit.phase == "B":
                present = [] if forward_only else [c for c in reversed(present) if backward[c]]
            return [Stage(c, part_of[c][unit.microbatch], unit.phase) for c in present]

        units = order(placement.workers, len(pieces), len(share.microbatches))
        return Draft(
            placement=placement,
            parts=parts,
            order=tuple(tuple(stage for unit in worker for stage in stages(unit)) for worker in units),
            forward_only=forward_only,
            policy=name,
            seed=seed,
            rounds=rounds,
        )

    return plan


def pieces_of(placement: Placement) -> list[list[int]]:
    """The chunks of each piece: runs of neighbouring chunks on one worker."""
    pieces: list[list[int]] = []
    for number, chunk in enumerate(placement.chunks):
        if pieces and placement.chunks[pieces[-1][-1]].worker == chunk.worker:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    for j, piece in enumerate(pieces):
        assert placement.chunks[piece[0]].worker == j % placement.workers, (j, placement)
    return pieces
