"""Plan a step: how its samples are grouped and its items cut, what is kept in memory, and in which order stages run.

A *try* is a choice of the first three with a few rounds of search over orders. Tries go from what is good as a rule to
what may be better here, until several in a row bring nothing; the rest of the rounds goes into the best:

    try   microbatches in one   items of a part   level   makespan
    0     1                     24                1       10.4 ms
    1     1                     16                1       10.2
    2     2                     24                1       10.1   <- 80 more rounds of search

Levels below 1 (`leaning.py`) are tried only where memory is what holds the step up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share, linked
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.explore import Search
from pipeweaver.planner.keeping import intervals_ns, kept_units
from pipeweaver.planner.leaning import Strategies, leaned
from pipeweaver.planner.listing import LimitError
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.parts import cut_parts
from pipeweaver.planner.problem import Ints
from pipeweaver.planner.regroup import evened, merged
from pipeweaver.planner.step_problem import StepProblem, step_problem
from pipeweaver.schedule.compile import compile_flat
from pipeweaver.schedule.flat import PHASES, FlatPlan
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.ir import Chunk, Draft, Placement, Stage
from pipeweaver.schedule.stages import StepStages, UnitCosts

TRY_ROUNDS = 4
"""Rounds of search that a try gets."""
CUTS = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (4, 2), (1, 6), (1, 1), (2, 1), (4, 1), (1, 8))
"""(microbatches in one, parts that the fullest drawn microbatch is cut into), in the order in which they are tried."""
MISSES = 4
"""Cuts in a row that bring nothing, after which no others are tried."""
LEVELS = (1.0, 0.7, 0.4, 0.0)
"""Levels that are tried, from the one that costs least."""
CLOSE = 0.01
"""A makespan this close to the busiest worker's time is not tried to be improved by lower levels."""
LEAST_GAIN = 0.003
"""What more stages must bring: each means more actions, whose own time is in no cost."""
ATTEMPTS = 5
"""How often limits are lowered by what a compiled plan exceeds its budget by, before one microbatch runs at a time."""


class Choice(NamedTuple):
    """How a step is cut: so many microbatches in one, their samples evened out or not, most items of a part by
    module, and the level of what is kept."""

    merge: int = 1
    even: bool = False
    items_per_part: tuple[tuple[str, int], ...] = ()
    level: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Try:
    """A choice with its stages and the search over their orders."""

    choice: Choice
    step: StepStages
    made: StepProblem
    costs: UnitCosts
    strategies: Sequence[Strategies]
    search: Search

    @property
    def makespan_ns(self) -> int:
        return self.search.best.makespan_ns

    @property
    def busiest_ns(self) -> int:
        """Time that the busiest worker computes."""
        problem = self.made.problem
        return int(np.bincount(problem.worker, weights=problem.duration_ns).max(initial=0))


def relaxed(one: Try, *, rounds: int, seed: int) -> Try | None:
    """The try with units that keep all that they save where its best order leaves room; None if there is none."""
    step, problem, schedule = one.step, one.made.problem, one.search.best
    lean = np.array([u for u, chosen in enumerate(one.strategies) if chosen], np.int64)
    if not len(lean) or not one.search.limited:
        return None
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
    search.run(rounds)
    return Try(choice=one.choice, step=step, made=made, costs=costs, strategies=strategies, search=search)


class StepPlanner:
    """An anytime planner of one replica's step. `best` is the best try so far; `plan` compiles it.

    `budget_bytes` is what each worker may hold, parameters included; None is unlimited. With equal arguments, the
    state after a number of rounds is always the same.
    """

    def __init__(
        self,
        graph: ModelGraph,
        placement: Placement,
        share: Share,
        costs: Costs,
        *,
        budget_bytes: int | None = None,
        seed: int = 0,
        forward_only: bool = False,
        options: PolicyOptions = DEFAULTS,
        dtype: str = "float32",
    ) -> None:
        self.graph, self.placement, self.share, self.costs = graph, placement, share, costs
        self.budget_bytes, self.seed, self.forward_only = budget_bytes, seed, forward_only
        self.options, self.dtype = options, dtype
        self.rounds = 0
        self.tries: list[Try] = []
        self._steps: dict[Choice, StepStages] = {}
        self._static = np.array(static_bytes(graph, placement, costs), np.int64)
        self._agenda: Iterator[Choice] | None = self._choices()

    @cached_property
    def item_costs(self) -> list[int]:
        """Forward and backward of each item alone, ns."""
        return item_costs(self.graph, self.share, self.costs)

    @property
    def best(self) -> Try | None:
        """The best try so far; None if no choice can keep to the limits, as far as it is known."""
        return min(self.tries, key=lambda one: one.makespan_ns, default=None)

    def run(self, rounds: int) -> None:
        """So many rounds more; a try counts as `TRY_ROUNDS`."""
        last = self.rounds + rounds
        while self.rounds < last:
            choice = next(self._agenda, None) if self._agenda is not None else None
            if choice is None:
                self._agenda = None
                if self.best is not None:
                    self.best.search.run(last - self.rounds)
                self.rounds = last
                continue
            self.rounds += TRY_ROUNDS
            try:
                self.tries.append(self._try(choice))
            except LimitError:
                continue

    def plan(self, policy: str = "dynamic") -> tuple[Draft, FlatPlan]:
        """The best try as a draft and its plan, within the budget.

        Raises ValueError, naming worker and bytes, if no plan is within the budget.
        """
        if not self.tries:
            self.run(TRY_ROUNDS)
        while not self.tries and self._agenda is not None:
            self.run(TRY_ROUNDS)
        chosen = self.best
        for _ in range(ATTEMPTS):
            if chosen is None:
                break
            orders = chosen.search.best.orders(chosen.made.problem)
            draft = self._named(draft_of(chosen.step, chosen.made, orders, chosen.strategies), policy)
            plan = compile_flat(chosen.step, draft)
            assert plan.prediction is not None
            if self.budget_bytes is None or max(plan.prediction.peak_bytes) <= self.budget_bytes:
                return draft, plan
            chosen = self._lowered(chosen, np.array(plan.prediction.peak_bytes, np.int64) - self.budget_bytes)
        return self._in_turn(policy)

    def _choices(self) -> Iterator[Choice]:
        """Choices in the order in which they are tried; what has come of the ones before decides about the next."""
        free = self.options.regroup and not self.forward_only
        module = costliest(self.graph, self.share, self.costs)
        cuts = CUTS if module is not None else ((1, 1), (2, 1), (4, 1))
        given = tuple(sorted(self.options.items_per_part.items()))
        seen: set[Choice] = set()
        misses = 0
        for merge, count in cuts:
            items = given
            if module is not None and module not in self.options.items_per_part:
                items = (*given, (module, -(-fullest(self.share, module) // count)))
            choice = Choice(merge=merge, items_per_part=items)
            if choice in seen or (merge > 1 and (not free or merge > len(self.share.microbatches))):
                continue
            seen.add(choice)
            before = self.best
            yield from self._levels(choice)
            if before is not None and self.best is not None:
                improved = self.best.makespan_ns < before.makespan_ns * (1 - LEAST_GAIN)
                misses = 0 if improved else misses + 1
            if misses == MISSES:
                break
        if free and self.budget_bytes is not None and self.best is not None and len(self.share.microbatches) > 1:
            yield self.best.choice._replace(even=True)

    def _levels(self, choice: Choice) -> Iterator[Choice]:
        """A choice at the level that keeps all, and at lower ones as long as they help."""
        lean = any(strategy != "keep" for strategy in self.options.strategies)
        levels = LEVELS if lean and self.budget_bytes is not None and not self.forward_only else (1.0,)
        previous: Try | None = None
        for level in levels:
            number = len(self.tries)
            yield choice._replace(level=level)
            if len(self.tries) > number:
                found = self.tries[-1]
                worse = previous is not None and found.makespan_ns > previous.makespan_ns
                if worse or not found.search.limited or found.makespan_ns <= found.busiest_ns * (1 + CLOSE):
                    return
                previous = found

    def _try(self, choice: Choice) -> Try:
        step = self._step(choice)
        strategies, costs = leaned(step, choice.level, self.options.strategies)
        splits = self.options.split_backward and not self.forward_only
        made = step_problem(step, costs, (splits & (costs.weight_ns > 0)).astype(np.int64))
        limits = None if self.budget_bytes is None else self.budget_bytes - self._static - made.reserve
        search = Search(made.problem, limits, seed=self.seed)
        search.run(TRY_ROUNDS)
        return Try(choice=choice, step=step, made=made, costs=costs, strategies=strategies, search=search)

    def _step(self, choice: Choice) -> StepStages:
        key = choice._replace(level=1.0)
        if key not in self._steps:
            share = self.share
            if choice.even:
                share = evened(share, self.item_costs, backbone(self.graph, share))
            share = merged(share, choice.merge) if choice.merge > 1 else share
            by_cost = self.item_costs if self.options.even_parts == "cost" else None
            parts = cut_parts(self.graph, self.placement, share, dict(choice.items_per_part), by_cost)
            self._steps[key] = StepStages(
                self.graph,
                self.placement,
                share,
                parts,
                self.costs,
                dtype=self.dtype,
                forward_only=self.forward_only,
            )
        return self._steps[key]

    def _lowered(self, chosen: Try, excess: Ints) -> Try | None:
        """A try with limits lowered by what its plan exceeds the budget by; None if they are too low then."""
        assert self.budget_bytes is not None
        limits = chosen.search.limits if chosen.search.limited else self.budget_bytes - self._static
        try:
            search = Search(chosen.made.problem, limits - np.maximum(excess, 0), seed=self.seed)
        except LimitError:
            return None
        search.run(max(TRY_ROUNDS, chosen.search.rounds))
        return replace(chosen, search=search)

    def _in_turn(self, policy: str) -> tuple[Draft, FlatPlan]:
        """One microbatch after the other, at the leanest level: of all cuts the one that needs least."""
        assert self.budget_bytes is not None, "without limits there is always a try"
        least: tuple[int, Draft, FlatPlan] | None = None
        for step in self._steps.values():
            strategies, costs = leaned(step, 0.0, self.options.strategies)
            made = step_problem(step, costs, np.zeros(len(step), np.int64))
            at = made.problem.worker[made.problem.sequence]
            orders = [made.problem.sequence[at == w] for w in range(made.problem.num_workers)]
            draft = self._named(draft_of(step, made, orders, strategies), policy)
            plan = compile_flat(step, draft)
            assert plan.prediction is not None
            peak = max(plan.prediction.peak_bytes)
            if least is None or peak < least[0]:
                least = (peak, draft, plan)
        assert least is not None, "there is at least one cut"
        peak, draft, plan = least
        if peak > self.budget_bytes:
            assert plan.prediction is not None
            worker = plan.prediction.peak_bytes.index(peak)
            raise ValueError(
                f"no plan of step {self.share.step} fits: worker {worker} needs {peak:,} bytes even with one "
                f"microbatch at a time, {peak - self.budget_bytes:,} more than the budget of {self.budget_bytes:,}; "
                f"{int(self._static[worker]):,} of them are parameters, gradients and optimizer state; use more "
                f"workers, smaller microbatches, or a larger budget"
            )
        return draft, plan

    def _named(self, draft: Draft, policy: str) -> Draft:
        return msgspec.structs.replace(draft, policy=policy, seed=self.seed, rounds=self.rounds)


def draft_of(step: StepStages, made: StepProblem, orders: Sequence[Ints], strategies: Sequence[Strategies]) -> Draft:
    """Orders of a problem's stages [P], and strategies of its units [U], as a draft."""
    bounds = list(pairwise(step.units.start.tolist()))
    return Draft(
        placement=step.placement,
        parts=step.parts,
        order=tuple(_stages(step, made, order) for order in orders),
        strategies=tuple(tuple(strategies[a:b]) for a, b in bounds) if any(strategies) else (),
        forward_only=step.forward_only,
    )


def item_costs(graph: ModelGraph, share: Share, costs: Costs) -> list[int]:
    """Forward and backward of each item alone through its whole module, ns; equal items are asked for once."""
    sources = linked(share.items, share.links)
    known: dict[Hashable, int] = {}
    found = []
    for item, links in zip(share.items, sources, strict=True):
        key = (item.module, *item.sizes, *item.sizes.values(), *((s.module, *s.sizes.values()) for s in links))
        if key not in known:
            layers = len(graph.by_name[item.module].layers)
            whole = Chunk(task=item.task, module=item.module, start=0, stop=layers, worker=0)
            cost = costs.stage(whole, [item], [links])
            known[key] = cost.forward_ns + cost.backward_ns
        found.append(known[key])
    return found


def costliest(graph: ModelGraph, share: Share, costs: Costs) -> str | None:
    """The module whose items are cut into parts: the one with most work of those with several items in a microbatch
    and no joint loss."""
    several: set[str] = set()
    for group in share.microbatches:
        counts = Counter(share.items[i].module for i in group)
        several |= {name for name, count in counts.items() if count > 1}
    joint = {module.name for module in graph.modules if module.loss is not None and module.loss.joint}
    sources = linked(share.items, share.links)
    work: dict[str, int] = {}
    for name in sorted(several - joint):
        chosen = [i for i, item in enumerate(share.items) if item.module == name]
        work[name] = costs.useful_ns(name, [share.items[i] for i in chosen], [sources[i] for i in chosen])
    return max(work, key=work.__getitem__, default=None)


def fullest(share: Share, module: str) -> int:
    """Most items of a module in one microbatch."""
    return max(sum(share.items[i].module == module for i in group) for group in share.microbatches)


def backbone(graph: ModelGraph, share: Share) -> str:
    """The module that every microbatch has items of, and a loss if possible; the last such one."""
    present = [set(share.items[i].module for i in group) for group in share.microbatches]
    names = [module.name for module in graph.modules if all(module.name in of for of in present)]
    losses = [name for name in names if graph.by_name[name].loss is not None]
    return (losses or names or [module.name for module in graph.modules])[-1]


def _stages(step: StepStages, made: StepProblem, order: Ints) -> tuple[Stage, ...]:
    if not len(order):
        return ()
    third, unit = np.divmod(made.number[order], len(step))
    phase = np.where(third == 0, 0, np.where(third == 2, 3, 1 + made.split[unit]))
    chunk, part = step.units.chunk[unit].tolist(), step.units.part[unit].tolist()
    return tuple(map(Stage, chunk, part, map(PHASES.__getitem__, phase.tolist())))
