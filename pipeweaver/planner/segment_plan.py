"""Plan a step as PipeWeaver does: order of segments, interleaving, memory strategies, again and again (section 3).

1. A tree search proposes an order of the segments (`tree_search.py`, `segments.py`).
2. A greedy dual queue interleaves the stages by that order, each with its leanest candidate: the worker that can start
   soonest takes of a waiting forward and a waiting backward the kind that it did not run last, else what it has. This
   is list scheduling with alternation (`listing.py`), which keeps out of corners under the memory budget.
3. Each unit gets the candidate that suits the room that is left (`memory_program.py`). The score is the makespan of the
   order under these.

While orders are played out, step 3 is its greedy start, in compiled code; the best order gets the integer programs.
Example of what comes out, two images in parts of one, K = 1:

    worker 0   0F0 0F1 2F0 2B0 0B0 0B1        worker 1   1F0 1F1 3F0 3B0 1B0 1B1
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.candidates import CANDIDATES, Candidate, candidates
from pipeweaver.planner.listing import LimitError, Rules, Schedule, list_schedule
from pipeweaver.planner.memory_program import CandidateTable, candidate_table, greedy, latencies, slots_of, solve
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.parts import cut_parts
from pipeweaver.planner.problem import Ints, Problem
from pipeweaver.planner.refusal import no_plan_fits
from pipeweaver.planner.segments import items_per_part, segment_groups
from pipeweaver.planner.step_problem import step_problem
from pipeweaver.planner.tree_search import TreeSearch
from pipeweaver.planner.tries import draft_of
from pipeweaver.schedule.compile import compile_flat
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.ir import Draft, Placement, Strategy
from pipeweaver.schedule.stages import Orders, StageGraph, StepStages, UnitCosts, unit_costs
from pipeweaver.schedule.timing import time_stages

ALTERNATE = Rules(tie_break="alternate")
ATTEMPTS = 6
"""How often limits are lowered by what a compiled plan exceeds its budget by, before one microbatch runs at a time."""


class Scored(NamedTuple):
    """An interleaved order with the candidates of its units [U], and its makespan under them."""

    schedule: Schedule
    choice: Ints
    makespan_ns: int


class SegmentPlanner:
    """An anytime planner of one replica's step. `plan` compiles the best order so far.

    `budget_bytes` is what each worker may hold, parameters included; None is unlimited. A round is a node of the search
    tree with its play-outs. `num_candidates` is S; with 1 all units are lean. With equal arguments, the state after a
    number of rounds is always the same.
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
        num_candidates: int = CANDIDATES,
    ) -> None:
        self.budget_bytes, self.seed, self.rounds = budget_bytes, seed, 0
        self._options = options
        self._other = partial(
            SegmentPlanner,
            graph,
            placement,
            share,
            costs,
            seed=seed,
            forward_only=forward_only,
            dtype=dtype,
            num_candidates=num_candidates,
        )
        parts = cut_parts(graph, placement, share, items_per_part(graph, [share], costs) | options.items_per_part)
        self.step = StepStages(graph, placement, share, parts, costs, dtype=dtype, forward_only=forward_only)
        size = len(self.step)
        self._static = np.array(static_bytes(graph, placement, costs), np.int64)
        # Without a budget there is nothing to be lean for.
        self._table = _table(self.step, () if budget_bytes is None else options.strategies, num_candidates)
        self._leanest = self._table.leanest[self._table.kind]
        made = step_problem(self.step, self._costs(self._leanest), np.zeros(size, np.int64))
        index = np.full(3 * size, -1, np.int64)
        index[made.number] = np.arange(len(made.number))
        self._forward, self._backward = index[:size], np.where(self.step.learns, index[size : 2 * size], -1)
        self._learning = np.nonzero(self.step.learns)[0]
        self.made = made._replace(problem=self._travelling(made.problem, self._leanest))
        self._group, self._place = segment_groups(self.step, self.made)
        self._limits = None if budget_bytes is None else budget_bytes - self._static - self._reserve()
        self._best: Scored | None = None
        first = np.arange(int(self._group.max(initial=-1)) + 1)
        self._search: TreeSearch | None = None
        with suppress(LimitError):  # Not even a lean microbatch fits alone, as far as is known: `plan` looks closer.
            self._search = TreeSearch(self._score, first, seed=seed)

    @property
    def evaluations(self) -> int:
        """Orders scored so far."""
        return self._search.evaluations if self._search is not None else 0

    def run(self, rounds: int) -> None:
        """So many rounds more."""
        self.rounds += rounds
        if self._search is not None:
            self._search.run(rounds)

    def plan(self, policy: str = "pipeweaver") -> FlatPlan:
        """The plan of the best order; raises ValueError as `best` does."""
        return self.best(policy)[1]

    def best(self, policy: str = "pipeweaver") -> tuple[Draft, FlatPlan]:
        """The best order as a draft and its plan, within the budget.

        Raises ValueError, naming worker and bytes, if no plan is within the budget.
        """
        found, limits = self._best, self._limits
        if found is not None and limits is not None:
            exact = self._assigned(found.schedule, limits, exact=True)
            found = min(found, exact, key=lambda one: one.makespan_ns)
        for _ in range(ATTEMPTS):
            if found is None or self._search is None:
                break
            draft, plan = self._compiled(found.schedule.orders(self.made.problem), found.choice, policy)
            assert plan.prediction is not None
            if self.budget_bytes is None:
                return draft, plan
            excess = np.array(plan.prediction.peak_bytes, np.int64) - self.budget_bytes
            if excess.max() <= 0:
                return draft, plan
            assert limits is not None
            limits = limits - np.maximum(excess, 0)
            try:
                found = self._assigned(self._interleaved(self._search.best, limits), limits, exact=True)
            except LimitError:
                break
        if "offload" in self._options.strategies:
            # What is on its way to the host takes memory too: less may be needed without.
            kept = tuple(strategy for strategy in self._options.strategies if strategy != "offload")
            options = msgspec.structs.replace(self._options, strategies=kept)
            other = self._other(budget_bytes=self.budget_bytes, options=options)
            other.run(self.rounds)
            return other.best(policy)
        return self._in_turn(policy)

    def score(self, order: Ints) -> int:
        """Makespan of an order of the segment groups, memory strategies by the greedy choice, ns."""
        return self._assigned(self._interleaved(order, self._limits), self._limits, exact=False).makespan_ns

    def _score(self, order: Ints) -> int:
        """The same for the search, which keeps the best."""
        scored = self._assigned(self._interleaved(order, self._limits), self._limits, exact=False)
        if self._best is None or scored.makespan_ns < self._best.makespan_ns:
            self._best = scored
        return scored.makespan_ns

    def _interleaved(self, order: Ints, limits: Ints | None) -> Schedule:
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        rank = (position[self._group] * (len(self._group) + 1) + self._place).astype(np.float64)
        schedule = list_schedule(self.made.problem, rank, ALTERNATE, limits)
        assert schedule is not None, "there is no cutoff"
        return schedule

    def _assigned(self, schedule: Schedule, limits: Ints | None, *, exact: bool) -> Scored:
        """Candidates for the room that an order leaves, and the order timed under them."""
        problem, table = self.made.problem, self._table
        choice = np.zeros(len(self.step), np.int64)
        if limits is not None and self._leanest.any():
            slots = slots_of(problem, schedule.sequence, self._forward, self._backward)
            latency = latencies(table, self._slack(schedule))
            choice = (solve if exact else greedy)(slots, table, latency, limits)
            problem = self._travelling(problem, choice)
        duration = problem.duration_ns.copy()
        learning = self._learning
        duration[self._backward[learning]] = table.backward_ns[table.kind[learning], choice[learning]]
        orders = schedule.orders(problem)
        times = time_stages(
            StageGraph(problem.worker, duration, problem.successor_start, problem.successor, problem.lag_ns),
            Orders(
                np.concatenate([np.zeros(1, np.int64), np.cumsum([len(order) for order in orders])]),
                np.concatenate(orders) if orders else np.zeros(0, np.int64),
                np.zeros(0, np.int64),
            ),
        )
        return Scored(schedule, choice, int(times.end_ns.max(initial=0)))

    def _travelling(self, problem: Problem, choice: Ints) -> Problem:
        """The problem where a backward waits for its copies to the host and back."""
        learning, kind = self._learning, self._table.kind
        copies = np.zeros(problem.num_stages, np.int64)
        copies[self._backward[learning]] = 2 * self._table.travel_ns[kind[learning], choice[learning]]
        own = np.full(problem.num_stages, -1, np.int64)
        own[self._backward[learning]] = self._forward[learning]
        stage = np.arange(problem.num_stages)
        source = np.repeat(stage, np.diff(problem.successor_start))
        target = np.repeat(stage, np.diff(problem.predecessor_start))
        return problem._replace(
            lag_ns=np.where(own[problem.successor] == source, copies[problem.successor], problem.lag_ns),
            predecessor_lag_ns=np.where(own[target] == problem.predecessor, copies[target], problem.predecessor_lag_ns),
        )

    def _slack(self, schedule: Schedule) -> Ints:
        """[U] from the end of a unit's forward to when the others that its backward needs are there, ns; 0 without."""
        problem, learning = self.made.problem, self._learning
        end = schedule.start_ns + problem.duration_ns
        target = np.repeat(np.arange(problem.num_stages), np.diff(problem.predecessor_start))
        own = np.full(problem.num_stages, -1, np.int64)
        own[self._backward[learning]] = self._forward[learning]
        others = problem.predecessor != own[target]
        ready = np.zeros(problem.num_stages, np.int64)
        arrives = end[problem.predecessor] + problem.predecessor_lag_ns
        np.maximum.at(ready, target[others], arrives[others])
        slack = np.zeros(len(self.step), np.int64)
        slack[learning] = np.maximum(0, ready[self._backward[learning]] - end[self._forward[learning]])
        return slack

    def _in_turn(self, policy: str) -> tuple[Draft, FlatPlan]:
        """One microbatch after the other, everything lean; or what is planned without a budget, should that fit."""
        assert self.budget_bytes is not None, "without limits every order will do"
        problem = self.made.problem
        at = problem.worker[problem.sequence]
        orders = tuple(problem.sequence[at == w] for w in range(problem.num_workers))
        draft, plan = self._compiled(orders, self._leanest, policy)
        assert plan.prediction is not None
        if max(plan.prediction.peak_bytes) > self.budget_bytes:
            free = self._other(options=self._options)
            free.run(self.rounds)
            found = free.best(policy)
            assert found[1].prediction is not None
            if max(found[1].prediction.peak_bytes) <= self.budget_bytes:
                return found
            raise no_plan_fits(
                step=self.step.share.step,
                peak_bytes=plan.prediction.peak_bytes,
                static_bytes=self._static.tolist(),
                budget_bytes=self.budget_bytes,
            )
        return draft, plan

    def _compiled(self, orders: Sequence[Ints], choice: Ints, policy: str) -> tuple[Draft, FlatPlan]:
        strategies = [candidate.strategies for candidate in self._table.chosen(choice)]
        draft = draft_of(self.step, self.made, orders, strategies)
        draft = msgspec.structs.replace(draft, policy=policy, seed=self.seed, rounds=self.rounds)
        return draft, compile_flat(self.step, draft)

    def _costs(self, choice: Ints) -> UnitCosts:
        return unit_costs([candidate.cost for candidate in self._table.chosen(choice)])

    def _reserve(self) -> Ints:
        """[P] bytes for what is on its way, to other workers or the host, whatever the candidates."""
        most = [max(found, key=lambda candidate: candidate.cost.offloaded_bytes) for found in self._table.by_kind]
        costs = unit_costs([most[kind].cost for kind in self._table.kind.tolist()])
        return step_problem(self.step, costs, np.zeros(len(self.step), np.int64)).reserve


def _table(step: StepStages, allowed: Sequence[Strategy], count: int) -> CandidateTable:
    """Candidates by kind: units that cost the same have the same."""
    firsts: dict[tuple[int, bool], int] = {}
    kinds = [
        firsts.setdefault((number, bool(learns)), len(firsts))
        for number, learns in zip(step.alike, step.learns.tolist(), strict=True)
    ]
    by_kind: list[Sequence[Candidate]] = [()] * len(firsts)
    for unit, kind in enumerate(kinds):
        if not by_kind[kind]:
            layers = step.layer_strategies(unit) if allowed and step.learns[unit] else ()
            by_kind[kind] = candidates(step.stage_costs[unit], layers, allowed, count)
    return candidate_table(kinds, by_kind)
