"""The planner thread stays one order ahead, and its errors reach the workers in place of a plan."""

import threading
import time

import pytest
import torch.distributed as dist

from pipeweaver.runtime.ahead import Ahead, Order
from pipeweaver.runtime.exchange import Exchange, Finish, FirstRankFailed, RunPlan
from pipeweaver.schedule.convert import flatten
from tests.train.plans import empty_plan
from tests.train.processes import wait_for


def test_stays_one_order_ahead():
    exchange = Exchange(dist.HashStore(), patience_s=5)
    made = []

    def orders():
        for step in range(4):
            made.append(step)
            yield Order(plans=(flatten(empty_plan(step)),), step=step)

    ahead = Ahead(orders(), exchange, num_replicas=1, readers=1)
    for step in range(4):
        message = exchange.receive(step, 0)
        assert isinstance(message, RunPlan) and message.plan == empty_plan(step)
        time.sleep(0.02)
        assert made == list(range(step + 1))  # the next one waits until this one starts
        assert ahead.started(step).records == (empty_plan(step),)
        wait_for(lambda: len(made) == min(step + 2, 4))  # noqa: B023
    assert exchange.receive(4, 0) == Finish()
    assert ahead.started(4) is None


def test_an_error_takes_the_place_of_the_plan_in_every_replica():
    exchange = Exchange(dist.HashStore(), patience_s=5)

    def orders():
        yield Order(plans=(flatten(empty_plan(0, 0, 2)), flatten(empty_plan(0, 1, 2))), step=0)
        raise ValueError("worker 1 needs 3 GiB more")

    ahead = Ahead(orders(), exchange, num_replicas=2, readers=1)
    assert exchange.receive(0, 0).plan.replica == 0
    assert exchange.receive(0, 1).plan.replica == 1
    ahead.started(0)
    for replica in range(2):
        with pytest.raises(FirstRankFailed, match="worker 1 needs 3 GiB more"):
            exchange.receive(1, replica)
    assert isinstance(ahead.error, ValueError)


def test_close_ends_the_thread():
    ahead = Ahead((order for order in ()), Exchange(dist.HashStore(), patience_s=5), num_replicas=1, readers=1)
    ahead.close()
    assert not any(thread.name == "ahead" for thread in threading.enumerate())
