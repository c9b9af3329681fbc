"""What a policy is: two pure functions, one for a whole run and one for each step, which may also come bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeweaver.costs import Costs
from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.options import DEFAULTS, PolicyOptions
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Draft, Placement


class Place(Protocol):
    """Chunks on workers, for a whole run, from a sample of its batches (one share per batch and replica).

    `dtype` is what tensors between chunks are in, `budget_bytes` what each worker may hold, parameters included, for
    policies that place by memory; None is unlimited. Raises ValueError if the layers or the memory do not suffice, or
    the sample is empty.
    """

    def __call__(
        self,
        graph: ModelGraph,
        workers: int,
        costs: Costs,
        shares: Sequence[Share],
        options: PolicyOptions = DEFAULTS,
        *,
        dtype: str = "float32",
        budget_bytes: int | None = None,
    ) -> Placement: ...


class PlanStep(Protocol):
    """Parts and orders of one replica for one step.

    `budget_bytes` is what each worker may hold, parameters included; None is unlimited. `seed` and `rounds`
    steer the search of policies that search. Same arguments, same draft. Raises ValueError for a joint loss
    in several parts and for items that the placement has no chunks for; policies that mind the budget, also
    if no order keeps to it, naming worker and missing bytes. The static ones have one order whatever the
    budget; the verifier says whether it fits.
    """

    def __call__(
        self,
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
    ) -> Draft: ...


class StepSearch(Protocol):
    """The search for one replica's step, to be asked for its best at any time.

    After n rounds, however they were counted out, `plan` gives the plan of what `PlanStep` gives for n rounds.
    """

    def run(self, rounds: int) -> None:
        """So many rounds more."""
        ...

    def plan(self) -> FlatPlan:
        """The best so far; without rounds, the first that is found. Raises ValueError if there is none."""
        ...


class StartSearch(Protocol):
    """Arguments as of `PlanStep`."""

    def __call__(
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
    ) -> StepSearch: ...


@dataclass(frozen=True, kw_only=True)
class Policy:
    """`search` of policies that search; the others' plans are the same for any rounds."""

    place: Place
    plan: PlanStep
    search: StartSearch | None = None
