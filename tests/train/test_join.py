"""A worker's place: device and cores."""

import os
import sys
import threading

import pytest

from pipeweaver.cluster import Workers
from pipeweaver.runtime.join import choose_device, join
from pipeweaver.runtime.process import use_cores


def test_cpu_where_there_is_no_cuda_device_for_each_worker(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(choose_device("auto", 1, 2)) == "cuda:1"
    assert str(choose_device("auto", 1, 3)) == "cpu"
    assert str(choose_device("cpu", 0, 1)) == "cpu"
    with pytest.raises(ValueError, match="this host has 2 CUDA devices for 3 workers"):
        choose_device("cuda", 0, 3)


def test_wrong_world_size_says_what_was_asked_for(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"3 processes were started, but .* pipeline = 2 times replicas = 2; start 4"):
        join(Workers(pipeline=2, replicas=2), "cpu", patience_s=60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins threads")
def test_cores_are_those_of_the_calling_thread():
    before, found = os.sched_getaffinity(0), []
    core = min(before)

    def helper():
        use_cores({core})
        found.append(os.sched_getaffinity(0))
        use_cores(())
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    assert found == [{core}, {core}]
    assert os.sched_getaffinity(0) == before
