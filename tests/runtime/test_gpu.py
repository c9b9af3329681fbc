"""The same on a GPU: exact, and measured by its own clock."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from pipeweaver.runtime.clock import StreamClock
from pipeweaver.runtime.transport import Address, ProcessTransport, WorkerMap
from tests.runtime.cases import Case, make_batch, make_graph, make_plans
from tests.runtime.threads import SingleProcess, assert_close, local_workers, make_worker, run_steps

pytestmark = pytest.mark.gpu

CASE = Case(graph="encoder and diffusion", policy="interleaved-1f1b", workers=2, num_replicas=1, batch="mixed", seed=2)


def test_a_schedule_on_one_gpu_equals_a_single_process():
    device = torch.device("cuda", 0)
    graph = make_graph(CASE)
    batch = make_batch(CASE, graph, 0)
    (plans,) = make_plans(CASE, graph, [batch])
    workers = local_workers(graph, plans[0].placement, 1, device=device)
    results = run_steps(workers, [plans])
    single = SingleProcess(graph)
    losses = single.step(batch)
    for address, worker in workers.items():
        assert results[address][0].losses == pytest.approx(losses, rel=1e-9)
        assert_close({name: p.grad.cpu() for name, p in worker.parameters.items()}, single.gradients)
        spans = results[address][0].spans
        assert all(a.end_ns == b.start_ns and a.end_ns >= a.start_ns for a, b in itertools.pairwise(spans))
        assert results[address][0].peak_bytes > 0


def test_nccl_alone(tmp_path):
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        case = Case(graph="tied", policy="gpipe", workers=1, num_replicas=1, batch="mixed", seed=2)
        graph = make_graph(case)
        batch = make_batch(case, graph, 0)
        (plans,) = make_plans(case, graph, [batch])
        transport = ProcessTransport(WorkerMap(num_replicas=1, num_workers=1), device)
        assert transport.address == Address(0, 0)
        worker = make_worker(graph, plans[0].placement, transport, device=device)
        result = worker.run(plans[0])
        single = SingleProcess(graph)
        assert result.losses == pytest.approx(single.step(batch), rel=1e-9)
        assert_close({name: p.grad.cpu() for name, p in worker.parameters.items()}, single.gradients)
    finally:
        dist.destroy_process_group()


def test_marks_of_a_stream_are_in_the_hosts_time():
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    x @ x
    before = time.perf_counter_ns()
    clock = StreamClock(device)
    clock.mark()
    for _ in range(20):
        x = x @ x
    clock.mark()
    # The host runs ahead of the device.
    assert clock.reached() <= 2
    start, end = clock.times()
    assert before <= start <= end <= time.perf_counter_ns() + 1_000_000
    assert clock.reached() == 2
