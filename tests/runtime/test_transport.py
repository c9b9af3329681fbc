"""Workers and ranks; what the transport between processes refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipeweaver.runtime.transport import Address, ProcessTransport, TransferError, WorkerMap
from pipeweaver.schedule.ir import Transfer


def test_a_worker_may_be_several_ranks():
    workers = WorkerMap(num_replicas=2, num_workers=3, width=4)
    assert workers.world_size == 24
    assert list(workers.ranks(Address(1, 2))) == [20, 21, 22, 23]
    for rank in range(24):
        address, position = workers.locate(rank)
        assert workers.ranks(address)[position] == rank


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_as_many_processes_as_workers(alone):
    with pytest.raises(ValueError, match="2 replicas of 3 workers need 6 processes, but 1 were started"):
        ProcessTransport(WorkerMap(num_replicas=2, num_workers=3), torch.device("cpu"))


def test_one_cuda_queue_is_refused(alone, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        ProcessTransport(WorkerMap(num_replicas=1, num_workers=1), torch.device("cuda"))


def test_tensors_are_checked_before_they_are_sent(alone):
    transport = ProcessTransport(WorkerMap(num_replicas=1, num_workers=1), torch.device("cpu"))
    transfer = Transfer(edge=0, phase="F", sender=0, receiver=1, shape=(2, 3), dtype="float32", num_bytes=24)
    for tensor in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)):
        with pytest.raises(TransferError, match=r"transfer 4 from worker 0 to 1 should be .2, 3. torch.float32 by"):
            transport.post(4, transfer, tensor)
    assert transport.all_sum([1.5, -2.0]) == [1.5, -2.0]
    transport.close()
