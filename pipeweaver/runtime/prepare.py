"""From a job to what runs it: model graph, data, batches, and what a plan depends on.

    graph = job_graph(job)
    loader = job_loader(job, job_datasets(job)["train"])
    planning = place(job, graph, loader, costs)

The same functions serve every command, so that `plan` shows what `train` will do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pipeweaver.config import DEFAULT_ROUNDS, Job
from pipeweaver.costs import Costs
from pipeweaver.data.config import CustomData, DataConfig, DigitsData, JsonLinesData, build_dataset
from pipeweaver.data.dataset import Dataset
from pipeweaver.data.items import Batch
from pipeweaver.data.loader import Loader
from pipeweaver.model.build import build_graph
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import share_out
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.ahead import Planning
from pipeweaver.runtime.exchange import Data
from pipeweaver.schedule.ir import Placement

SAMPLE_BATCHES = 8
"""Batches that costs are measured on and a placement is made for: the first ones of the run."""

SAMPLE_DRAWS = 10_000
"""So many samples of endless data are looked through for items of a module that the first batches have none of."""


def job_graph(job: Job) -> ModelGraph:
    return build_graph(job.modules, job.flows, job.task.loss_weights)


def job_datasets(job: Job) -> dict[Data, Dataset]:
    """Data to train on and, where the job has some, to evaluate on. Paths in the job are relative to its file."""
    folder = Path(job.path).parent
    datasets: dict[Data, Dataset] = {"train": build_dataset(job.data, "train", seed=job.run.seed, folder=folder)}
    if _has_held_out(job.data):
        datasets["held-out"] = build_dataset(job.data, "held-out", seed=job.run.seed, folder=folder)
    return datasets


def job_loader(job: Job, dataset: Dataset) -> Loader:
    """Batches to train on, endlessly, shuffled by the run's seed."""
    return Loader(
        dataset,
        backbone=job.task.backbone,
        tokens_per_microbatch=job.task.tokens_per_microbatch,
        microbatches=job.task.microbatches,
        task=job.task.name,
        seed=job.run.seed,
        max_items=job.task.max_items,
        too_long=job.task.too_long,
    )


def held_out_batches(job: Job, dataset: Dataset) -> list[Batch]:
    """All held-out samples, each once, always in the same batches."""
    return list(held_out_loader(job, dataset))


def held_out_loader(job: Job, dataset: Dataset) -> Loader:
    return Loader(
        dataset,
        backbone=job.task.backbone,
        tokens_per_microbatch=job.task.tokens_per_microbatch,
        microbatches=job.task.microbatches,
        task=job.task.name,
        shuffle=False,
        epochs=1,
        max_items=job.task.max_items,
        too_long=job.task.too_long,
    )


def sample_batches(loader: Loader, graph: ModelGraph) -> list[Batch]:
    """The first batches of the run, and behind them the first that have items of modules still missing.

    Changes nothing about the loader. Raises ValueError if an epoch (of endless data: `SAMPLE_DRAWS` samples) has no
    item of some module.
    """
    first = cursor = loader.cursor
    draws = SAMPLE_DRAWS if cursor.num_records is None else cursor.num_records
    missing = {module.name for module in graph.modules}
    batches: list[Batch] = []
    while len(batches) < SAMPLE_BATCHES or (missing and cursor.draw - first.draw < draws):
        batch, cursor = loader.draw(cursor)
        if batch is None:
            break
        found = missing & {item.module for sample in batch.samples for item in sample.items}
        if len(batches) < SAMPLE_BATCHES or found:
            batches.append(batch)
        missing -= found
    if missing:
        raise ValueError(
            f"model.{min(missing)}: none of {cursor.draw - first.draw} samples has an item for it, so there is nothing "
            "to train it on, or to measure its cost with; leave the module out, with its flows"
        )
    return batches


def place(job: Job, graph: ModelGraph, loader: Loader, costs: Costs, budget_bytes: int | None) -> Planning:
    """Chunks on workers, from the first batches of the run, and all else that plans depend on.

    Changes nothing about the loader. Raises ValueError if the policy cannot place the model.
    """
    replicas = job.workers.replicas
    shares = [share for batch in sample_batches(loader, graph) for share in share_out(graph, batch, replicas, costs)]
    policy = POLICIES[job.policy.name]
    placement = policy.place(
        graph,
        job.workers.pipeline,
        costs,
        shares,
        job.policy.options,
        dtype=job.run.dtype,
        budget_bytes=budget_bytes,
    )
    return planning(job, graph, placement, costs, budget_bytes)


def planning(job: Job, graph: ModelGraph, placement: Placement, costs: Costs, budget_bytes: int | None) -> Planning:
    return Planning(
        graph=graph,
        placement=placement,
        costs=costs,
        policy=job.policy.name,
        options=job.policy.options,
        num_replicas=job.workers.replicas,
        dtype=job.run.dtype,
        budget_bytes=budget_bytes,
        seed=job.run.seed,
        rounds=DEFAULT_ROUNDS if job.policy.rounds is None else job.policy.rounds,
    )


def fingerprint(job: Job) -> str:
    """Equal for equal jobs, wherever their files are."""
    content = msgspec.msgpack.encode(msgspec.to_builtins(msgspec.structs.replace(job, path="")))
    return hashlib.sha256(content).hexdigest()[:16]


def _has_held_out(data: DataConfig) -> bool:
    match data:
        case DigitsData():
            return data.held_out_records > 0
        case JsonLinesData():
            return data.held_out is not None
        case CustomData():
            return True
