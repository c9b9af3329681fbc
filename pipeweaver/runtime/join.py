"""Join the other workers: rank, device, cores, process group, and the store that messages go through.

    membership = join(job.workers, device="auto", patience_s=60)
    membership.address     worker 1 of replica 0
    membership.device      cuda:1 with NCCL, or cpu with Gloo

Started by `launch` or by torchrun, a worker reads the same environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from pipeweaver.cluster import Workers, available_cores, cores_of
from pipeweaver.runtime.company import LEAST_PATIENCE_S, Company
from pipeweaver.runtime.exchange import MOST_WAIT, Store
from pipeweaver.runtime.heap import keep_memory
from pipeweaver.runtime.transport import Address, WorkerMap


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process among the workers of the run. `store` is for messages; the group is torch's default one.

    `company` watches over the others until it is closed.

    `helper_cores` are for threads beside the worker's own, such as the planner: cores that no worker is pinned
    to, or all if there are none; empty where nothing is pinned.
    """

    rank: int
    address: Address
    workers: WorkerMap
    device: torch.device
    store: Store
    company: Company
    helper_cores: frozenset[int]

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join(workers: Workers, device: str, *, patience_s: float = 60.0) -> Membership:
    """Take this process's place, its device and its cores, and meet the others.

    `device` is "cpu", "cuda" or "auto": CUDA if this host has a device for each of its workers. `patience_s` is how
    long a worker may give no sign of life from here to the end of `company`. Raises
    ValueError if the number of processes is not that of the job's workers, or there is no such device.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != workers.total:
        raise ValueError(
            f"{world_size} processes were started, but [workers] asks for {workers.total}: pipeline = "
            f"{workers.pipeline} times replicas = {workers.replicas}; start {workers.total}, or change [workers]"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    chosen = choose_device(device, local_rank, local_size)
    helper_cores = _take_cores(workers, local_rank, local_size) if chosen.type == "cpu" else frozenset()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store, _, _ = next(dist.rendezvous("env://"))
    company = Company(
        cast(Store, dist.PrefixStore("company", store)),
        rank=rank,
        world_size=world_size,
        patience_s=max(patience_s, LEAST_PATIENCE_S),
    )
    dist.init_process_group(
        # Messages between hosts, such as clock offsets, are CPU tensors.
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=MOST_WAIT,
    )
    workers_map = WorkerMap(workers.replicas, workers.pipeline)
    address, _ = workers_map.locate(rank)
    return Membership(
        rank=rank,
        address=address,
        workers=workers_map,
        device=chosen,
        store=cast(Store, dist.PrefixStore("messages", store)),  # torch's stubs know no bytes
        company=company,
        helper_cores=helper_cores,
    )


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of worker `local_rank` of the `local_size` on this host.

    Raises ValueError if CUDA is wanted and this host has no device for each of its workers.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count < local_size):
        return torch.device("cpu")
    if count < local_size:
        raise ValueError(
            f'run.device = "cuda", but this host has {count} CUDA devices for {local_size} workers; '
            'start fewer workers here, or set run.device = "cpu"'
        )
    return torch.device("cuda", local_rank)


def _take_cores(workers: Workers, local_rank: int, local_size: int) -> frozenset[int]:
    """Keep this process to its threads, its memory and, if asked for, to its cores; returns the cores for helpers."""
    torch.set_num_threads(workers.threads)
    keep_memory()
    cores = available_cores()
    mine = cores_of(local_rank, local_size, workers.threads, cores) if workers.pin else ()
    if not mine or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    os.sched_setaffinity(0, mine)
    return frozenset(cores[local_size * workers.threads :] or cores)
