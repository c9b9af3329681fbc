"""Before the first step, a worker that falls silent is noticed by the one before it in the ring."""

import time

import torch.distributed as dist

from pipeweaver.runtime.company import Company
from pipeweaver.runtime.exchange import Silence
from pipeweaver.runtime.watchdog import EXIT_CODE
from tests.train.processes import wait_for

PATIENCE_S = 0.5


def company(store, rank, ended, **changes):
    limits = {"patience_s": PATIENCE_S, "start_s": 60.0} | changes
    return Company(store, rank=rank, world_size=3, end=lambda code: ended.append((rank, code)), **limits)


def test_nobody_is_ended_while_all_live_or_have_left():
    store, ended = dist.HashStore(), []
    ring = [company(store, rank, ended) for rank in range(3)]
    time.sleep(2 * PATIENCE_S)
    ring[1].close()
    time.sleep(2 * PATIENCE_S)
    for one in ring:
        one.close()
    assert ended == []


def test_a_silent_worker_is_named(capfd):
    store, ended = dist.HashStore(), []
    ring = [company(store, rank, ended) for rank in range(3)]
    wait_for(lambda: store.add("alive/2", 0))
    ring[2]._closed.set()  # its thread ends without a word, as that of a frozen process
    wait_for(lambda: ended, 20)
    assert ended == [(1, EXIT_CODE)]
    assert "worker process 1: worker process 2 of 3 has given no sign of life" in capfd.readouterr().err


def test_a_worker_that_never_starts_has_more_time():
    store, ended = dist.HashStore(), []
    one = company(store, 0, ended, start_s=3 * PATIENCE_S)
    time.sleep(2 * PATIENCE_S)
    assert ended == []
    wait_for(lambda: ended, 20)
    one.close()


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pipeweaver.runtime.exchange.time.monotonic", lambda: now[0])
    silence, heard = Silence(1.0), []
    for seconds, count in [(1, 1), (1, 1), (100, 1), (1, 1), (1, 2), (1, 2)]:
        now[0] += seconds
        heard.append(silence.after(count))
    assert heard == [0, 1, 3, 4, 0, 1]
