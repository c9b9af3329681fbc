"""A pool of real processes with Gloo between them, for tests: plans go in as messages, results come out.

The processes are started once; each case is run by the first `world_size` of them in a process group of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.runtime.transport import ProcessTransport, WorkerMap
from pipeweaver.runtime.watchdog import Watchdog
from pipeweaver.schedule.ir import Plan
from tests.runtime.graphs import graph_of, load
from tests.runtime.threads import make_worker

TIMEOUT_S = 60


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to run: steps[s][r] is the plan of replica r. Gradients of the first step are not clipped."""

    number: int
    graph: str
    layers: int
    steps: list[list[Plan]]
    rates: list[float]
    clip_norm: float


class Pool:
    """Processes that run jobs. `folder` is where they find each other."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = folder
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            end, far = context.Pipe()
            process = context.Process(target=serve, args=(rank, far, str(folder)), daemon=True)
            process.start()
            far.close()
            self.ends.append(end)
            self.processes.append(process)

    def run(self, world_size: int, job: Job) -> list[dict[str, Any]]:
        """Results by rank: {"losses", "norm", "gradients", "parameters"}. Raises AssertionError with a process's error."""
        ends = self.ends[:world_size]
        for end in ends:
            end.send_bytes(msgspec.msgpack.encode((world_size, job)))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < world_size:
            ready = wait([end for i, end in enumerate(ends) if i not in results], deadline - time.monotonic())
            assert ready, f"processes {sorted(set(range(world_size)) - results.keys())} hang"
            for end in ready:
                kind, content = end.recv()
                assert kind == "result", content
                results[ends.index(end)] = content
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank: int, end: Connection, folder: str) -> None:
    """A process of the pool."""
    torch.set_num_threads(1)
    while True:
        world_size, job = msgspec.msgpack.decode(end.recv_bytes(), type=tuple[int, Job])
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous-{job.number}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            end.send(("result", _run(world_size, job)))
            dist.destroy_process_group()
        except BaseException:
            end.send(("error", traceback.format_exc()))
            return


def run_with_signal(rank: int, folder: str, number: int, plan: bytes) -> None:
    """A process for one step of "one module"; as worker 1 it sends itself a signal when it loads for the third time.

    What it says goes to `folder`/stderr-RANK. Its watchdog is set to 2 s; an error ends it with exit code 1.
    """
    sys.stderr = open(f"{folder}/stderr-{rank}", "w", buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    decoded = msgspec.msgpack.decode(plan, type=Plan)
    transport = ProcessTransport(WorkerMap(num_replicas=1, num_workers=2), torch.device("cpu"))
    worker = make_worker(graph_of("one module"), decoded.placement, transport, watchdog=Watchdog(2.0))
    loads = 0

    def load_or_stop(items: Any, records: Any, names: Any) -> dict[str, torch.Tensor]:
        nonlocal loads
        loads += 1
        if rank == 1 and loads == 3:
            os.kill(os.getpid(), number)
        return load(items, records, names)

    worker.load = load_or_stop
    try:
        worker.run(decoded)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _run(world_size: int, job: Job) -> dict[str, Any]:
    graph = graph_of(job.graph, job.layers)
    plan = job.steps[0][0]
    transport = ProcessTransport(WorkerMap(plan.num_replicas, plan.placement.workers), torch.device("cpu"))
    replica = transport.address.replica
    worker = make_worker(graph, plan.placement, transport)
    result = worker.run(job.steps[0][replica])
    gradients = {name: p.grad.numpy().copy() for name, p in worker.parameters.items() if p.requires_grad}
    worker = make_worker(graph, plan.placement, transport, OptimizerConfig(clip_norm=job.clip_norm))
    for plans, rate in zip(job.steps, job.rates, strict=True):
        worker.run(plans[replica], learning_rate=rate)
    transport.close()
    return {
        "losses": result.losses,
        "norm": result.gradient_norm,
        "gradients": gradients,
        "parameters": {name: p.detach().numpy().copy() for name, p in worker.parameters.items()},
    }
