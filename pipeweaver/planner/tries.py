"""A try: a step cut and costed by a choice, with a search over the order of its stages, and the plan of the best order.

    one = make_try(step, choice, costs...)     units, strategies, problem, search
    one.search.run(50)                         the search's own makespan
    found = one.emulated()                     what its best order really takes and holds, until there is a better one
    one.draft(found.orders)                    the draft of it; `completed(step, found)` is the plan

The search does not know queues of transfers and copies; what a plan really takes and holds, its compiled form says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pipeweaver.planner.choices import Choice
from pipeweaver.planner.explore import Search
from pipeweaver.planner.keeping import intervals_ns, kept_units
from pipeweaver.planner.leaning import Strategies
from pipeweaver.planner.problem import Ints
from pipeweaver.planner.step_problem import StepProblem, step_problem
from pipeweaver.schedule.compile import Emulated, emulate_orders
from pipeweaver.schedule.flat import PHASES, starts
from pipeweaver.schedule.ir import Draft, Stage
from pipeweaver.schedule.stages import Orders, StepStages, UnitCosts


@dataclass(kw_only=True)
class Try:
    """A choice with its stages and the search over their orders. `limits` [P]: bytes for stages, None for no limit."""

    choice: Choice
    step: StepStages
    made: StepProblem
    costs: UnitCosts
    strategies: Sequence[Strategies]
    limits: Ints | None
    search: Search
    _found: tuple[int, Emulated] | None = field(default=None, init=False)

    @property
    def searched_ns(self) -> int:
        """Makespan as the search knows it."""
        return self.search.best.makespan_ns

    @property
    def busiest_ns(self) -> int:
        """Time that the busiest worker computes."""
        problem = self.made.problem
        return int(np.bincount(problem.worker, weights=problem.duration_ns).max(initial=0))

    def emulated(self) -> Emulated:
        """What the best order so far takes and holds once compiled."""
        best = self.searched_ns
        if self._found is None or self._found[0] != best:
            orders = _numbered(self.made, self.search.best.orders(self.made.problem))
            strategies = _by_part(self.step, self.strategies)
            self._found = (best, emulate_orders(self.step, orders, strategies=strategies, costs=self.costs))
        return self._found[1]

    def draft(self, orders: Orders) -> Draft:
        """Orders of these stages as a draft."""
        return _draft(self.step, orders, self.strategies)


def make_try(
    step: StepStages,
    choice: Choice,
    *,
    strategies: Sequence[Strategies],
    costs: UnitCosts,
    limits: Ints | None,
    seed: int,
) -> Try:
    """A try with no rounds of search yet. `limits` [P]: what stages and reserve may hold. Raises LimitError."""
    split = (costs.weight_ns > 0) & choice.split
    made = step_problem(step, costs, split.astype(np.int64))
    usable = None if limits is None else limits - made.reserve
    search = Search(made.problem, usable, seed=seed)
    return Try(choice=choice, step=step, made=made, costs=costs, strategies=strategies, limits=usable, search=search)


def relaxed(one: Try, *, seed: int) -> Try | None:
    """The try with units that keep all that they save where its best order leaves room; None if there is none."""
    step, problem, schedule = one.step, one.made.problem, one.search.best
    if not one.search.limited or not any(one.strategies):
        return None
    lean = np.array([u for u, chosen in enumerate(one.strategies) if chosen], np.int64)
    index = np.full(3 * len(step), -1, np.int64)
    index[one.made.number] = np.arange(len(one.made.number))
    forward, backward = index[lean], index[len(step) + lean]
    held, kept = one.costs, step.costs
    copies = 2 * held.offload_ns[lean]
    waited = np.maximum(0, copies - intervals_ns(problem, schedule, forward, backward))
    added = held.backward_ns[lean] - kept.backward_ns[lean]
    chosen = kept_units(
        problem,
        schedule,
        one.search.limits,
        forward=forward,
        backward=backward,
        more_bytes=kept.saved_bytes[lean] - held.saved_bytes[lean],
        gain=waited + added + 0.01 * copies,
    )
    if not chosen.any():
        return None
    keeps = set(lean[chosen].tolist())
    strategies = [() if u in keeps else given for u, given in enumerate(one.strategies)]
    columns = []
    for before, after in zip(held, kept, strict=True):
        column = before.copy()
        column[lean[chosen]] = after[lean[chosen]]
        columns.append(column)
    costs = UnitCosts(*columns)
    made = step_problem(step, costs, one.made.split)
    search = Search(made.problem, one.search.limits, seed=seed, first=schedule)
    return Try(
        choice=one.choice, step=step, made=made, costs=costs, strategies=strategies, limits=one.limits, search=search
    )


def draft_of(step: StepStages, made: StepProblem, orders: Sequence[Ints], strategies: Sequence[Strategies]) -> Draft:
    """Orders of a problem's stages [P], and strategies of its units [U], as a draft."""
    return _draft(step, _numbered(made, orders), strategies)


def _numbered(made: StepProblem, orders: Sequence[Ints]) -> Orders:
    """Orders of a problem's stages [P] in numbers of the step."""
    return Orders(starts([len(order) for order in orders]), made.number[np.concatenate(orders)], made.split)


def _draft(step: StepStages, orders: Orders, strategies: Sequence[Strategies]) -> Draft:
    third, unit = np.divmod(orders.stage, max(1, len(step)))
    phase = np.where(third == 0, 0, np.where(third == 2, 3, 1 + orders.split[unit])) if len(unit) else unit
    chunk, part = step.units.chunk[unit].tolist(), step.units.part[unit].tolist()
    stages = tuple(map(Stage, chunk, part, map(PHASES.__getitem__, phase.tolist())))
    return Draft(
        placement=step.placement,
        parts=step.parts,
        order=tuple(stages[a:b] for a, b in pairwise(orders.start.tolist())),
        strategies=_by_part(step, strategies),
        forward_only=step.forward_only,
    )


def _by_part(step: StepStages, strategies: Sequence[Strategies]) -> tuple[tuple[Strategies, ...], ...]:
    """Strategies of units [U] by chunk and part; () where all keep everything."""
    bounds = pairwise(step.units.start.tolist())
    return tuple(tuple(strategies[a:b]) for a, b in bounds) if any(strategies) else ()
