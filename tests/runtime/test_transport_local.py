"""The transport between threads is strict: order, shapes and dtypes count, and what blocks for good is an error."""

from __future__ import annotations

import threading
import time

import torch

from pipeweaver.runtime.transport import Address, TransferError
from pipeweaver.runtime.transport_local import Hub
from pipeweaver.schedule.ir import Transfer


def transfer(sender, receiver, shape=(2, 3), dtype="float64"):
    return Transfer(
        edge=0, phase="F", sender=sender, receiver=receiver, shape=shape, dtype=dtype, num_bytes=shape[0] * shape[1] * 8
    )


def between(tasks, queue="pair", num_replicas=1):
    """Run tasks[w](end) for each worker in threads; returns errors by worker."""
    hub = Hub(num_replicas, len(tasks) // num_replicas, queue)
    errors = {}

    def run(address, task):
        end = hub.end(address)
        try:
            task(end)
        except TransferError as error:
            errors[address.worker] = str(error)
        finally:
            end.close()

    threads = [
        threading.Thread(target=run, args=entry, daemon=True) for entry in zip(hub.addresses, tasks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a thread hangs"
    return errors


def numbers(value):
    return torch.full((2, 3), float(value), dtype=torch.float64)


def test_both_directions_of_a_pair_pass_in_order():
    received = {}

    def first(end):
        end.post(0, transfer(0, 1), numbers(7))
        received[1] = numbers(0)
        end.post(1, transfer(1, 0), received[1])
        end.wait(1)
        end.wait(0)

    def second(end):
        received[0] = numbers(0)
        end.post(0, transfer(0, 1), received[0])
        end.post(1, transfer(1, 0), numbers(8))
        end.wait(0)
        end.wait(1)

    for queue in ("pair", "worker"):
        assert between([first, second], queue) == {}
        assert received[0][0, 0] == 7 and received[1][0, 0] == 8


def test_posts_in_different_orders_are_an_error_on_both_ends():
    def first(end):
        end.post(0, transfer(0, 1), numbers(7))
        end.post(1, transfer(0, 1), numbers(8))
        end.wait(0)

    def second(end):
        end.post(1, transfer(0, 1), numbers(0))
        end.post(0, transfer(0, 1), numbers(0))
        end.wait(1)

    errors = between([first, second])
    assert errors.keys() == {0, 1}
    assert "can never meet" in errors[0] and "transfer 0" in errors[0] and "transfer 1" in errors[0]


def test_shapes_and_dtypes_are_checked_against_the_plan_and_each_other():
    def wrong_shape(end):
        end.post(0, transfer(0, 1), torch.zeros(3, 2, dtype=torch.float64))

    def wrong_dtype(end):
        end.post(0, transfer(0, 1), torch.zeros(2, 3, dtype=torch.float32))

    for task, text in ((wrong_shape, "[3, 2] torch.float64"), (wrong_dtype, "[2, 3] torch.float32")):
        errors = between([task, lambda end: None])
        assert "should be [2, 3] torch.float64 by the plan" in errors[0] and text in errors[0]

    def first(end):
        end.post(0, transfer(0, 1), numbers(1))
        end.wait(0)

    def other_plan(end):
        end.post(0, transfer(0, 1, shape=(3, 2)), torch.zeros(3, 2, dtype=torch.float64))
        end.wait(0)

    errors = between([first, other_plan])
    assert errors.keys() == {0, 1} and "[2, 3] torch.float64 is sent, [3, 2] torch.float64 expected" in errors[0]


def test_one_queue_per_worker_deadlocks_where_one_per_pair_does_not():
    # A ring: each posts its receive from the left before its send to the right. With a queue per pair the
    # sends pass; with one per worker every head is a receive.
    def task(worker):
        def run(end):
            left, right = (worker - 1) % 3, (worker + 1) % 3
            end.post(left, transfer(left, worker), numbers(0))
            end.post(worker, transfer(worker, right), numbers(worker))
            end.wait(left)
            end.wait(worker)

        return run

    tasks = [task(worker) for worker in range(3)]
    assert between(tasks, "pair") == {}
    started = time.monotonic()
    errors = between(tasks, "worker")
    assert errors.keys() == {0, 1, 2} and time.monotonic() - started < 10
    assert errors[0].startswith("deadlock: worker 0 of replica 0 in the wait for transfer")


def test_a_wait_for_one_that_left_is_a_deadlock():
    def first(end):
        end.post(0, transfer(0, 1), numbers(0))
        end.wait(0)

    errors = between([first, lambda end: None])
    assert "worker 1 of replica 0 left" in errors[0]


def test_meetings_sum_over_their_members():
    sums = {}

    def task(end):
        tensor = numbers(10**end.address.worker)
        end.reduce([Address(0, 0), Address(0, 2)], tensor) if end.address.worker != 1 else None
        sums[end.address.worker] = (float(tensor[0, 0]), end.all_sum([1.0, float(end.address.worker)]))

    assert between([task] * 3) == {}
    assert sums == {0: (101.0, [3.0, 3.0]), 1: (10.0, [3.0, 3.0]), 2: (101.0, [3.0, 3.0])}


def test_meetings_that_members_see_differently_are_errors():
    members = [Address(0, 0), Address(0, 1)]

    def task(end):
        end.reduce(members, torch.zeros(2 + end.address.worker))

    errors = between([task, task])
    assert errors.keys() == {0, 1} and "tensors differ" in errors[0]

    def absent(end):
        if end.address.worker == 0:
            end.reduce(members, torch.zeros(2))
        else:
            end.all_sum([0.0])

    errors = between([absent, absent])
    assert errors.keys() == {0, 1} and errors[0].startswith("deadlock") and "a sum" in errors[0]
