"""Plan a step: how its samples are grouped and its items cut, what is kept in memory, and in which order stages run.

The search goes on from the best choice to those beside it (`choices.py`), each with a few rounds of search over orders;
where all of them are known, from the next best, and in the end it gives the rounds that are left to the best one's order:

    merge 1, parts 3   10.2 ms            merge 2, parts 3   10.1 ms            merge 2, parts 3   10.0 ms
    parts 4 10.3, parts 2 10.4, merge 2   merge 4 10.3, parts 2 10.2, …         80 more rounds

Where memory is what holds the step up, units keep less (`leaning.py`), and afterwards keep again what the order that
was found leaves room for (`keeping.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.choices import Choice, ChoiceStep, step_between
from pipeweaver.planner.cuts import Cuts
from pipeweaver.planner.leaning import leaned
from pipeweaver.planner.listing import NEVER, LimitError
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.planner.problem import Ints
from pipeweaver.planner.refusal import no_plan_fits
from pipeweaver.planner.step_problem import step_problem
from pipeweaver.planner.tries import Try, draft_of, make_try, relaxed
from pipeweaver.schedule.compile import Emulated, compile_flat, completed
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.ir import Draft, Placement

TRY_ROUNDS = 4
"""Orders that the search of a try looks at, and again once units keep what there is room for."""
BLOCK = 32
"""Rounds of search over the best choice's order, after which its plan is looked at."""
WANTED_PARTS = 3
"""Where memory holds the first plan up, the next ones have so many parts at least."""
LIKELY = 0.55
"""The first level that is tried, at most."""
NEAR = 0.02
"""What a plan takes longer than its busiest worker, for memory not to be what holds it up."""
REACH = 0.02
"""What a choice may take longer than the best, for those beside it to be tried: what one step makes worse, the next may
make better."""
HOPELESS, HOPEFUL = 0.03, 0.01
"""What a try may take longer than the best plan, for its units to keep more, and for its order to be searched again."""
MOST_CLOSE, EQUAL = 4, 0.005
"""So many of the best tries have their orders searched in the end, as long as they take no longer than that."""
ATTEMPTS = 3
"""How often limits are lowered, by what a compiled plan exceeds its budget by, before the try is given up."""
CHEAP = 0.01
"""What the halves of backwards may take longer than whole ones, for splitting to be tried first."""
FIRST_MARGIN = 0.005
"""Share of that memory that is left until there is a plan, so that the first attempt is rarely over the budget."""
MARGIN = 0.015
"""Share of the memory for stages that is left to copies on their way to the host and back, where units are lean."""


_DONE = object()


class StepPlanner:
    """An anytime planner of one replica's step. `best` is the best try so far; `plan` gives its plan.

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
        self.rounds, self.evaluations = 0, 0
        self.best: Try | None = None
        self.best_ns = NEVER
        self._found: Emulated | None = None
        self._plan: FlatPlan | None = None
        self.tried: dict[Choice, int | None] = {}
        """Makespan of every choice that was tried, ns; None where nothing fits."""
        self._alike: dict[tuple[int, float, bool], Choice] = {}
        """By step, level and split: the first choice that came to it."""
        self._static = np.array(static_bytes(graph, placement, costs), np.int64)
        self._lowered = np.zeros(placement.workers, np.int64)
        self._cuts = Cuts(
            graph,
            placement,
            share,
            costs,
            limited=budget_bytes is not None,
            forward_only=forward_only,
            options=options,
            dtype=dtype,
        )
        self._agenda: Iterator[None] | None = self._tries()
        self._bad: set[ChoiceStep] = set()
        """Steps from one choice to another that made it much worse: elsewhere they are not tried."""
        self._close: list[Try] = []
        """The best tries, whose orders are searched when all choices are known, and the one that is searched now."""
        self._turn: Try | None = None
        self._left = 0

    @property
    def limited(self) -> bool:
        return self.budget_bytes is not None

    def run(self, rounds: int) -> None:
        """So many rounds more. A try takes several, as long as there are choices to try."""
        last = self.rounds + rounds
        while self.rounds < last:
            if self._agenda is not None:
                if next(self._agenda, _DONE) is not _DONE:
                    self.rounds += 1
                    continue
                self._agenda = None
            if self.best is None:  # nothing fits
                self.rounds = last
                return
            # Plans are looked at after whole blocks, however many rounds are asked for at a time.
            if self._turn is None:
                self._turn, self._left = self._least_searched(self.best), BLOCK
            block = min(last - self.rounds, self._left)
            self.rounds += block
            self._left -= block
            self._search(self._turn, block)
            if not self._left:
                if self._consider(self._turn) is not None:  # a shorter order, but over the budget once compiled
                    self._close = [one for one in self._close if one is not self._turn]
                self._turn = None

    def plan(self, policy: str = "dynamic") -> FlatPlan:
        """The best plan so far, within the budget. Raises ValueError, naming worker and bytes, if there is none."""
        if self._plan is None:
            asked = self.rounds
            if self._is_found():
                assert self.best is not None and self._found is not None
                self._plan = completed(self.best.step, self._found)
            else:
                _, self._plan = self._last_resort(asked)
        head = msgspec.structs.replace(self._plan.head, policy=policy, seed=self.seed, rounds=self.rounds)
        return replace(self._plan, head=head)

    def draft(self, policy: str = "dynamic") -> Draft:
        """The draft of that plan; raises ValueError likewise."""
        asked = self.rounds
        if self._is_found():
            assert self.best is not None and self._found is not None
            found = self.best.draft(self._found.orders)
        else:
            found, _ = self._last_resort(asked)
        return msgspec.structs.replace(found, policy=policy, seed=self.seed, rounds=self.rounds)

    def _is_found(self) -> bool:
        """Whether there is a try that fits, once there was time for the first."""
        while self.best is None and self._agenda is not None:
            self.run(1)
        return self.best is not None

    def leanest(self) -> tuple[Draft, FlatPlan]:
        """One microbatch after the other, at the leanest level: of all ways to cut it the one that needs least."""
        least: tuple[int, Draft, FlatPlan] | None = None
        for parts in (parts for parts in self._cuts.ladders.parts if parts >= 1):
            step = self._cuts.step(Choice(parts=parts))
            strategies, costs = leaned(step, self._cuts.ladders.levels[-1], self.options.strategies)
            made = step_problem(step, costs, np.zeros(len(step), np.int64))
            at = made.problem.worker[made.problem.sequence]
            orders = [made.problem.sequence[at == w] for w in range(made.problem.num_workers)]
            draft = draft_of(step, made, orders, strategies)
            plan = compile_flat(step, draft)
            peak = max(_peaks(plan))
            if least is None or peak < least[0]:
                least = (peak, draft, plan)
        assert least is not None, "there is at least one cut"
        return least[1:]

    def _last_resort(self, rounds: int) -> tuple[Draft, FlatPlan]:
        """Where no try fits: the leanest plan, or else one that knows no budget: the search reckons with more than compiled
        plans hold, and recomputing what little is saved can take more than it frees. Raises ValueError, naming worker
        and bytes, if neither fits."""
        assert self.budget_bytes is not None
        leanest = self.leanest()
        peaks = _peaks(leanest[1])
        if max(peaks) <= self.budget_bytes:
            return leanest
        free = StepPlanner(
            self.graph,
            self.placement,
            self.share,
            self.costs,
            seed=self.seed,
            forward_only=self.forward_only,
            options=self.options,
            dtype=self.dtype,
        )
        free.run(rounds)
        plan = free.plan()
        if max(_peaks(plan)) <= self.budget_bytes:
            return free.draft(), plan
        raise no_plan_fits(
            step=self.share.step,
            peak_bytes=peaks,
            static_bytes=self._static.tolist(),
            budget_bytes=self.budget_bytes,
        )

    def _tries(self) -> Iterator[None]:
        """All tries, round by round."""
        for choice in self._choices():
            yield from self._try(choice)

    def _choices(self) -> Iterator[Choice]:
        """Choices in the order in which they are tried; what has come of the ones before decides about the next."""
        ladders = self._cuts.ladders
        here = self._cuts.first()
        # Filling the pipeline, P parts one after the other, should take no more than a worker's share of the step.
        to_fill = self.placement.workers**2 / max(1, len(self.share.microbatches))
        wanted = max(WANTED_PARTS, here.parts, to_fill)
        here = here._replace(split=ladders.splits[-1] and self._halves_are_cheap(here))
        yield here
        if self.limited and not self._is_near_busiest:
            # What keeps everything is known soonest; it is rarely best.
            lean = here._replace(
                merge=1,
                even=ladders.evens[-1],
                parts=min(ladders.parts, key=lambda parts: abs(parts - wanted)),
                level=min(ladders.levels, key=lambda level: abs(level - self._likely_level(here))),
            )
            if lean != here:
                yield lean
                for level in ladders.levels:
                    if self.best is None and level < lean.level:  # nothing fits so far
                        lean = lean._replace(level=level)
                        yield lean
            # The first cut may be coarse only for its plan to be soon there.
            finest = self._cuts.finest(lean._replace(level=ladders.levels[0]))
            if finest.parts > here.parts:
                yield finest
        while (found := self._next_neighbour()) is not None:
            here, neighbour = found
            yield neighbour
            before, after = self.tried[here], self.tried[neighbour]
            if before is not None and after is not None and after > before * (1 + HOPELESS):
                self._bad.add(step_between(here, neighbour))

    def _next_neighbour(self) -> tuple[Choice, Choice] | None:
        """The best choice that has promising ones beside it, and one of those; None in the end."""
        found = [(taken, number) for number, taken in enumerate(self.tried.values()) if taken is not None]
        choices = list(self.tried)
        for taken, number in sorted(found):
            if taken > self.best_ns * (1 + REACH):
                break
            here = choices[number]
            for neighbour in self._cuts.ladders.neighbours(here, finer_first=not self._is_near_busiest):
                if neighbour in self.tried or (neighbour.level < here.level and self._is_near_busiest):
                    continue
                if step_between(here, neighbour) not in self._bad:
                    return here, neighbour
        return None

    def _least_searched(self, best: Try) -> Try:
        """Of the tries that are as good as the best, the one whose order was searched least."""
        close = [one for one in self._close if one.searched_ns <= (1 + EQUAL) * best.searched_ns]
        return min(close, key=lambda one: one.search.rounds, default=best)

    def _likely_level(self, choice: Choice) -> float:
        """The level at which as many microbatches fit as there are workers, as in one forward, one backward; `LIKELY`
        at most."""
        assert self.budget_bytes is not None
        step, workers = self._cuts.step(choice), self.placement.workers
        kept = np.bincount(step.worker, weights=step.costs.saved_bytes, minlength=workers)
        under_way = workers * kept / max(1, len(step.share.microbatches))
        room = np.maximum(0, self.budget_bytes - self._static)
        return float(np.min(room / np.maximum(1, under_way), initial=LIKELY))

    @property
    def _is_near_busiest(self) -> bool:
        """Whether the best plan ends soon after its busiest worker's work: holding less can bring no more than that."""
        return self.best is not None and self.best_ns < self.best.busiest_ns * (1 + NEAR)

    def _halves_are_cheap(self, choice: Choice) -> bool:
        """Whether a split backward takes about as long as a whole one: then splitting is tried first, else last."""
        costs = self._cuts.step(choice).costs
        can = costs.weight_ns > 0
        halves, whole = (costs.input_ns + costs.weight_ns)[can].sum(), costs.backward_ns[can].sum()
        return bool(halves <= whole * (1 + CHEAP))

    def _try(self, choice: Choice) -> Iterator[None]:
        """Search a little over the orders of a choice, and take it if it is the best so far. It halts after every round,
        so that a large step's try can be left in the middle."""
        self.tried[choice] = None
        step = self._cuts.step(choice)
        alike = (id(step), choice.level, choice.split)
        if alike in self._alike:
            self.tried[choice] = self.tried[self._alike[alike]]
            return
        self._alike[alike] = choice
        yield
        strategies, costs = leaned(step, choice.level, self.options.strategies)
        lowered = self._lowered
        for _ in range(ATTEMPTS):
            limits = None
            if self.budget_bytes is not None:
                limits = self.budget_bytes - self._static - lowered
                left = MARGIN if any(strategies) else FIRST_MARGIN if self.best is None else 0.0
                limits -= (limits * left).astype(np.int64)
            try:
                one = make_try(step, choice, strategies=strategies, costs=costs, limits=limits, seed=self.seed)
            except LimitError:
                return
            # Until there is a plan, time matters most.
            self._search(one, 1 if self.best is None else TRY_ROUNDS)
            yield
            other = relaxed(one, seed=self.seed) if self._is_near_best(one, HOPELESS) else None
            if other is not None:
                one = other
                if self._is_near_best(one, HOPEFUL):
                    self._search(one, TRY_ROUNDS)
            yield
            excess = self._consider(one)
            yield
            if excess is None:
                self._lowered = lowered
                self._close = sorted([*self._close, one], key=lambda one: one.searched_ns)[:MOST_CLOSE]
                return
            # Orders change on all workers where limits change on one.
            lowered = lowered + excess + excess.max()

    def _is_near_best(self, one: Try, margin: float) -> bool:
        return one.searched_ns < (1 + margin) * self.best_ns

    def _search(self, one: Try, rounds: int) -> None:
        before = one.search.rounds
        one.search.run(rounds)
        self.evaluations += one.search.rounds - before

    def _consider(self, one: Try) -> Ints | None:
        """Take a try if its plan is the best so far. If the plan exceeds the budget: [P] by how many bytes."""
        if one.searched_ns >= self.best_ns:
            self.tried[one.choice] = one.searched_ns
            return None
        emulated = one.emulated()
        if self.budget_bytes is not None:
            excess = np.maximum(0, np.array(emulated.peak_bytes, np.int64) - self.budget_bytes)
            if excess.any():
                return excess
        found = emulated.makespan_ns
        self.tried[one.choice] = found
        if found < self.best_ns:
            self.best, self.best_ns, self._found, self._plan = one, found, emulated, None
        return None


def _peaks(plan: FlatPlan) -> Sequence[int]:
    """[P] bytes that workers hold at most."""
    assert plan.prediction is not None
    return plan.prediction.peak_bytes
