"""Hand out plans ahead of use: a thread of the first rank publishes the next order while the workers run this one.

    batch -> share_out -> policy.plan per replica -> compile -> verify all replicas together -> publish

`plan_batch` is that line up to the verifier as a pure function; in training, processes of their own go along it
(`service.py`). `Ahead` pulls orders from a generator and publishes them, and stays one order ahead of the workers;
training waits only if a plan is late. An error on the way (a policy that raises, a plan that the verifier rejects, a
sample that cannot be read) goes to all workers in place of the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeweaver.costs import Costs
from pipeweaver.data.items import Batch, Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import share_out
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.exchange import Data, Exchange, Failure, Finish, run_plan
from pipeweaver.runtime.process import exit_code, in_words, use_cores
from pipeweaver.schedule.compile import compile_flat
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Placement, Plan
from pipeweaver.schedule.stages import StepStages
from pipeweaver.schedule.verify import verify_flat
from pipeweaver.semu.correct import Factors
from pipeweaver.semu.costs import SemuCosts


@dataclass(frozen=True, kw_only=True)
class Planning:
    """All that a plan depends on beside its batch. `budget_bytes` is what each worker may hold; None is no limit."""

    graph: ModelGraph
    placement: Placement
    costs: Costs
    policy: str
    options: PolicyOptions
    num_replicas: int = 1
    dtype: str = "float32"
    budget_bytes: int | None = None
    seed: int = 0
    rounds: int = 0


def plan_batch(planning: Planning, batch: Batch, *, forward_only: bool = False) -> tuple[FlatPlan, ...]:
    """Verified plans of all replicas for one batch. Raises ValueError if the policy finds none, or a wrong one."""
    shares = shares_for(planning, batch)
    plans = plan_shares(planning, shares, forward_only=forward_only)
    verify_flat(plans, planning.graph, shares, dtype=planning.dtype, budget_bytes=planning.budget_bytes)
    return plans


def shares_for(planning: Planning, batch: Batch) -> tuple[Share, ...]:
    """What each replica takes of the batch. Only `dynamic` exchanges samples; the others keep microbatches as drawn."""
    exchange = planning.policy == "dynamic" and planning.options.exchange
    return share_out(planning.graph, batch, planning.num_replicas, planning.costs, exchange=exchange)


def plan_shares(planning: Planning, shares: Sequence[Share], *, forward_only: bool = False) -> tuple[FlatPlan, ...]:
    """Plans for some replicas' shares of a batch, not yet verified. Raises ValueError if the policy finds none."""
    graph, costs, dtype = planning.graph, planning.costs, planning.dtype
    found = []
    for share in shares:
        draft = POLICIES[planning.policy].plan(
            graph,
            planning.placement,
            share,
            costs,
            budget_bytes=planning.budget_bytes,
            seed=planning.seed,
            rounds=planning.rounds,
            forward_only=forward_only,
            options=planning.options,
            dtype=dtype,
        )
        step = StepStages(
            graph, draft.placement, share, draft.parts, costs, dtype=dtype, forward_only=draft.forward_only
        )
        found.append(compile_flat(step, draft))
    return tuple(found)


def corrected(planning: Planning, factors: Factors) -> Planning:
    """The same with times of stages multiplied by a factor per module and worker (`semu/correct.py`); none changes
    nothing."""
    if not factors:
        return planning
    assert isinstance(planning.costs, SemuCosts), "only measured costs are corrected"
    return replace(planning, costs=planning.costs.corrected(factors))


def predicted_ns(plans: Sequence[FlatPlan]) -> int:
    """What plans of one batch are compared by: the longest step of a replica, for which the others wait."""
    return max(plan.prediction.step_ns for plan in plans if plan.prediction is not None)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Plans of all replicas to run at the same time, on items of `data`, after `step` steps of training.

    `is_last` of an evaluation's orders. `factors` corrected the costs that the plans were made with.
    """

    plans: tuple[FlatPlan, ...]
    step: int
    data: Data = "train"
    is_last: bool = True
    factors: Factors = field(default_factory=dict)

    @cached_property
    def records(self) -> tuple[Plan, ...]:
        """The plans as records: for what keeps, draws and reports them, and made when it does."""
        return tuple(map(records, self.plans))


class Ahead:
    """The thread that publishes. `orders` is pulled and closed on it: a plan that is made in place is made there.

    Every worker of every replica (`readers` in each) takes every order, from number `first` on. `cores` are what
    the thread may run on, where that is not what the process may.
    """

    def __init__(
        self,
        orders: Generator[Order],
        exchange: Exchange,
        *,
        num_replicas: int,
        readers: int,
        first: int = 0,
        cores: Collection[int] = (),
    ) -> None:
        self._orders = orders
        self._exchange = exchange.clone()
        self._num_replicas = num_replicas
        self._readers = readers
        self._first = first
        self._cores = cores
        self._planned: dict[int, Order] = {}
        self._may_plan = threading.Semaphore(1)
        self._ended = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def started(self, number: int) -> Order | None:
        """The workers begin order `number`: the one after it is asked for. None for the end of the run."""
        self._may_plan.release()
        return self._planned.pop(number, None)

    def close(self) -> None:
        """Stop after the order that is being made."""
        self._ended = True
        self._may_plan.release()
        self._thread.join()

    def _run(self) -> None:
        use_cores(self._cores)
        number = self._first
        try:
            while True:
                self._may_plan.acquire()
                if self._ended:
                    return
                order = next(self._orders, None)
                if order is None:
                    break
                self._planned[number] = order
                self._publish(number, order)
                number += 1
            self._exchange.publish(number, [Finish()] * self._num_replicas, readers=self._readers)
        except Exception as error:
            self.error = error
            failure = Failure(error=in_words(error), code=exit_code(error))
            self._exchange.publish(number, [failure] * self._num_replicas, readers=self._readers)
        finally:
            self._orders.close()

    def _publish(self, number: int, order: Order) -> None:
        messages = [run_plan(plan, order.data) for plan in order.plans]
        self._exchange.publish(number, messages, readers=self._readers)
