"""Orders reach every worker once and in sequence; a silent or failing first rank is noticed."""

import threading
import time

import pytest
import torch.distributed as dist

from pipeweaver.runtime.exchange import Exchange, Failure, Finish, FirstRankFailed, FirstRankSilent


def exchange(store=None, patience_s=5.0):
    return Exchange(store or dist.HashStore(), patience_s=patience_s)


def test_every_reader_takes_an_order_and_nothing_stays():
    store = dist.HashStore()
    first = exchange(store)
    first.publish(0, [Finish(), Failure(error="replica 1 only")], readers=2)
    assert first.receive(0, 0) == Finish()
    assert first.clone().receive(0, 0) == Finish()
    for _ in range(2):
        with pytest.raises(FirstRankFailed, match="replica 1 only"):
            first.receive(0, 1)
    assert store.num_keys() == 0


def test_waits_for_what_is_late():
    store = dist.HashStore()
    threading.Timer(0.2, lambda: exchange(store).publish(3, [Finish()], readers=1)).start()
    assert exchange(store).receive(3, 0) == Finish()


def test_a_slow_planner_is_waited_for_while_it_lives():
    store = dist.HashStore()
    first, other = exchange(store, patience_s=0.2), exchange(store, patience_s=0.2)
    with first.heartbeat():
        threading.Timer(1.0, lambda: first.publish(0, [Finish()], readers=1)).start()
        waited = []
        assert other.receive(0, 0, waited.append) == Finish()
    assert len(waited) >= 2 and waited == sorted(waited)


def test_a_silent_first_rank_is_an_error():
    store = dist.HashStore()
    other = exchange(store, patience_s=0.3)
    with exchange(store, patience_s=0.3).heartbeat():
        time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(FirstRankSilent, match="no sign of life"):
        other.receive(0, 0)
    assert time.monotonic() - start < 5.0
