"""The cuts of a step that a search chooses from: the ladders that are open to it, and the stages of each cut, made once.

Example, four microbatches, the fullest with three images, no budget:

    cuts = Cuts(graph, placement, share, costs, limited=False)
    cuts.ladders.merges, cuts.ladders.parts[-1]   (1, 2, 3, 4), 3: so many in one, and up to three parts
    cuts.step(Choice(merge=2, parts=3))           its stages; the same object if asked for again
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import ceil

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.choices import (
    LEVELS,
    MERGES,
    PARTS,
    Choice,
    Ladders,
    backbone,
    costliest,
    fullest,
    has_joint_loss,
    item_costs,
)
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.parts import cut_parts
from pipeweaver.planner.regroup import evened, merged
from pipeweaver.schedule.ir import Placement
from pipeweaver.schedule.stages import StepStages, useful_ns

FIRST_PARTS, FIRST_STAGES, EARLY_STAGES = (4, 3, 2, 1), 13_000, 26_000
"""Under a budget the first cut is the finest of these with so many stages at most, so that its plan is soon there; one of
the next ones the finest with so many."""
FILLING = 8
"""Where memory allows, microbatches are merged at first as long as so many are left to fill the pipeline."""


class Cuts:
    """The cuts of a replica's step, whose memory is `limited` or not. `module` is the one whose items are cut into parts,
    None if there is none to choose for."""

    def __init__(
        self,
        graph: ModelGraph,
        placement: Placement,
        share: Share,
        costs: Costs,
        *,
        limited: bool,
        forward_only: bool = False,
        options: PolicyOptions = DEFAULTS,
        dtype: str = "float32",
    ) -> None:
        self.graph, self.placement, self.share, self.costs = graph, placement, share, costs
        self.limited, self.forward_only, self.options, self.dtype = limited, forward_only, options, dtype
        self._steps: dict[Choice, StepStages] = {}
        self._table = ItemTable(share.items, share.links)
        self._work = useful_ns(graph, self._table, costs)
        module = costliest(graph, share, self._work)
        self.module = None if module in options.items_per_part else module
        self._fullest = fullest(share, self.module) if self.module is not None else 1
        self.ladders = self._ladders()

    @cached_property
    def item_costs(self) -> list[int]:
        """Forward and backward of each item alone, ns."""
        return item_costs(self.graph, self._table, self.costs)

    def step(self, choice: Choice) -> StepStages:
        """The stages of a choice's cut. Choices that come to the same cut have the same."""
        if choice.cut not in self._steps:
            share = self.share
            if choice.even:
                share = evened(share, self.item_costs, backbone(self.graph, share))
            if choice.merge > 1:
                share = merged(share, choice.merge, halve_first=self.placement.workers > 1)
            items = dict(self.options.items_per_part)
            if self.module is not None:
                items[self.module] = ceil(self._fullest / choice.parts)
            by_cost = self.item_costs if self.options.even_parts == "cost" else None
            parts = cut_parts(self.graph, self.placement, share, items, by_cost)
            for step in self._steps.values():
                if step.parts == parts:
                    self._steps[choice.cut] = step
                    return step
            self._steps[choice.cut] = StepStages(
                self.graph,
                self.placement,
                share,
                parts,
                self.costs,
                dtype=self.dtype,
                forward_only=self.forward_only,
                work=self._work,
                table=self._table,
            )
        return self._steps[choice.cut]

    def first(self) -> Choice:
        """The choice to begin with: many microbatches fill the pipeline as they are, in parts that are small where they
        have to be, for memory."""
        count, choice = len(self.share.microbatches), Choice()
        if not self.limited:
            merges = self.ladders.merges
            return Choice(merge=max(merge for merge in merges if merge == 1 or count >= FILLING * merge))
        for merge in self.ladders.merges:
            choice = self.finest(Choice(merge=merge), FIRST_STAGES)
            if self._num_stages(choice) <= FIRST_STAGES:
                break
        return choice

    def finest(self, choice: Choice, most_stages: int = EARLY_STAGES) -> Choice:
        """The choice in the most of `FIRST_PARTS` that make so many stages, or else in the fewest."""
        for parts in FIRST_PARTS:
            choice = choice._replace(parts=min(self.ladders.parts, key=lambda one: abs(one - parts)))
            if self._num_stages(choice) <= most_stages:
                break
        return choice

    def _num_stages(self, choice: Choice) -> int:
        """About how many stages the cut has."""
        chunks = Counter(chunk.module for chunk in self.placement.chunks)
        groups = [Counter(self.share.items[i].module for i in of) for of in self.share.microbatches]
        size = ceil(self._fullest / choice.parts)
        units = 0
        for first in range(0, len(groups), choice.merge):
            together = sum(groups[first : first + choice.merge], Counter())
            units += sum(
                chunks[name] * (ceil(items / size) if name == self.module else 1) for name, items in together.items()
            )
        return 3 * units  # forward, input gradient, weight gradient

    def _ladders(self) -> Ladders:
        """What options, budget and batch leave open."""
        options, count = self.options, len(self.share.microbatches)
        free = options.regroup and not self.forward_only and count > 1
        # Samples move between microbatches of one task only, and a joint loss needs its microbatch whole.
        alike = len({item.task for item in self.share.items}) == 1 and not has_joint_loss(self.graph, self.share)
        lean = any(strategy != "keep" for strategy in options.strategies) and self.limited and not self.forward_only
        most = self._fullest
        merges = tuple(merge for merge in MERGES if merge <= count) if free else (1,)
        least = 1 / merges[-1] if self.module is not None else 1
        fitting = [parts for parts in PARTS if least <= parts <= most]
        by_items = {ceil(most / parts): parts for parts in reversed(fitting)}
        return Ladders(
            merges=merges,
            evens=(False, True) if free and alike else (False,),
            parts=tuple(sorted(by_items.values())),
            levels=LEVELS if lean else (1.0,),
            splits=(False, True) if options.split_backward and not self.forward_only else (False,),
        )
