"""Plan ahead: a thread of the first rank makes the plans for the next order while the workers run this one.

    batch -> share_out -> policy.plan per replica -> compile -> predict -> verify all replicas together -> publish

`plan_batch` is that line as a pure function. `Ahead` pulls orders from an iterator that calls it, publishes
them and stays one order ahead of the workers; training waits only if a plan is late. An error on the way (a
policy that raises, a plan that the verifier rejects, a sample that cannot be read) goes to all workers in
place of the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeweaver.runtime.exchange import Data, Exchange, Failure, Finish, RunPlan
from pipeweaver.schedule.ir import Plan


@dataclass(frozen=True, kw_only=True)
class Order:
    """Plans of all replicas to run at the same time, on items of `data`."""

    plans: tuple[Plan, ...]
    data: Data = "train"


class Ahead:
    """The planner thread. `orders` is pulled on the thread: making the next order is making its plans.

    Every worker of every replica (`readers` in each) takes every order. `planned[number]` is kept until it is taken.
    """

    def __init__(
        self, orders: Iterable[Order], exchange: Exchange, *, num_replicas: int, readers: int, first: int = 0
    ) -> None:
        self._orders: Iterator[Order] = iter(orders)
        self._exchange = exchange.clone()
        self._num_replicas = num_replicas
        self._readers = readers
        self._first = first
        self._planned: dict[int, Order] = {}
        self._may_plan = threading.Semaphore(1)
        self._ended = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def started(self, number: int) -> Order | None:
        """The workers begin order `number`: the one after it may be planned. None for the end of the run."""
        self._may_plan.release()
        return self._planned.pop(number, None)

    def close(self) -> None:
        """Stop after the order that is being planned."""
        self._ended = True
        self._may_plan.release()
        self._thread.join()

    def _run(self) -> None:
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
            failure = Failure(error=f"{type(error).__name__}: {error}")
            self._exchange.publish(number, [failure] * self._num_replicas, readers=self._readers)

    def _publish(self, number: int, order: Order) -> None:
        messages = [RunPlan(plan=plan, fingerprint=plan.fingerprint, data=order.data) for plan in order.plans]
        self._exchange.publish(number, messages, readers=self._readers)
