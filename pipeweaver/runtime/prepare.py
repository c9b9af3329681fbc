"""From a job to what runs it: model graph, data, batches, and what a plan depends on.

    graph = job_graph(job)
    loaders = job_loaders(job, job_datasets(job)["train"])
    planning = place(job, "dynamic", graph, job_sample(job, loaders), costs, budget_bytes)

The same functions serve every command, so that `plan` shows what `train` will do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from pipeweaver.config import DEFAULT_ROUNDS, Job, TaskSet
from pipeweaver.costs import Costs
from pipeweaver.data.config import CustomData, DataConfig, DigitsData, JsonLinesData, build_dataset
from pipeweaver.data.dataset import Dataset
from pipeweaver.data.items import Batch
from pipeweaver.data.loader import Loader
from pipeweaver.data.tasks import TaskBatches, joined
from pipeweaver.model.build import Activation, build_graph
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.part import seed_of
from pipeweaver.planner.assign import share_out
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.ahead import Planning
from pipeweaver.runtime.exchange import Data
from pipeweaver.runtime.planner_messages import JobSetup
from pipeweaver.schedule.ir import Placement

SAMPLE_BATCHES = 8
"""Batches that costs are measured on and a placement is made for: the first ones of the run."""

SAMPLE_DRAWS = 10_000
"""So many samples of endless data are looked through for items of a module that the first batches have none of."""


def job_graph(job: Job) -> ModelGraph:
    tasks = {name: Activation(task.modules, task.weight, task.loss_weights) for name, task in job.tasks.items()}
    return build_graph(job.modules, job.flows, tasks)


def job_datasets(job: Job) -> dict[Data, dict[str, Dataset]]:
    """Data of each task to train on and, where it has some, to evaluate on. Paths in the job are relative to its file."""
    folder = Path(job.path).parent
    datasets: dict[Data, dict[str, Dataset]] = {"train": {}}
    for name, task in job.tasks.items():
        for split in ("train", "held-out") if _has_held_out(task.data) else ("train",):
            dataset = build_dataset(task.data, split, seed=task_seed(job, name), folder=folder)
            datasets.setdefault(split, {})[name] = dataset
    return datasets


def task_seed(job: Job, task: str) -> int:
    """Each task draws for itself, even where two have the same data."""
    return seed_of(job.run.seed, task) % 2**32


def job_widths(datasets: Mapping[str, Dataset]) -> dict[str, int]:
    """Columns of the tensors that the data sets of all tasks load."""
    return {name: width for dataset in datasets.values() for name, width in dataset.widths.items()}


def job_loaders(job: Job, datasets: Mapping[str, Dataset], data: Data = "train") -> dict[str, Loader]:
    """Each task's batches: to train on, endlessly, shuffled by its seed; or all held-out samples once, in order."""
    loaders = {}
    for name, dataset in datasets.items():
        task = job.tasks[name]
        loaders[name] = Loader(
            dataset,
            backbone=task.backbone,
            tokens_per_microbatch=task.tokens_per_microbatch,
            microbatches=task.microbatches,
            task=name,
            seed=task_seed(job, name),
            shuffle=data == "train",
            epochs=None if data == "train" else 1,
            max_items=task.max_items,
            too_long=task.too_long,
        )
    return loaders


def job_sample(job: Job, loaders: Mapping[str, Loader], tasks: Collection[str] = ()) -> list[Batch]:
    """Batches of `tasks`, by default all, joined: what costs are measured on and a placement is made for."""
    return joined_rounds([sample_batches(loaders[task], job.tasks[task].modules) for task in tasks or job.tasks])


def task_set_of(job: Job, steps: range) -> TaskSet:
    """The task set that some steps belong to. Raises ValueError if there are no such steps, or they belong to several."""
    if steps.stop > job.run.steps:
        raise ValueError(
            f"{job.path}: there is no step {steps.stop - 1}: run.steps = {job.run.steps}, and steps count from 0"
        )
    first, last = job.task_set_at(steps.start), job.task_set_at(steps.stop - 1)
    if first != last:
        raise ValueError(
            f"{job.path}: steps {steps.start} and {steps.stop - 1} belong to different sets of run.task_sets, which have "
            "placements of their own; take steps of one set"
        )
    return job.task_sets[first]


def step_batches(job: Job, loaders: Mapping[str, Loader], steps: range) -> list[Batch]:
    """The batches of some steps, each task's data where the steps before leave it. `loaders` stand at their beginning,
    and are moved on."""
    found: list[Batch] = []
    first = 0
    for task_set in job.task_sets:
        batches = TaskBatches({task: loaders[task] for task in task_set.tasks}, first)
        stop = first + task_set.steps
        drawn = [batch for _, batch in zip(range(first, min(stop, steps.stop)), batches, strict=False)]
        found += [batch for batch in drawn if batch.step in steps]
        first = stop
    return found


def joined_rounds(tasks: Sequence[Sequence[Batch]]) -> list[Batch]:
    """First batches of all tasks joined, then second ones…, each of the tasks that still have some."""
    rounds = ([batch for batch in found if batch is not None] for found in zip_longest(*tasks))
    return [joined(batches, batches[0].step) for batches in rounds]


def sample_batches(loader: Loader, modules: Collection[str]) -> list[Batch]:
    """A task's first batches, and behind them the first that have items of those of its modules still missing.

    Changes nothing about the loader. Raises ValueError if an epoch (of endless data: `SAMPLE_DRAWS` samples) has no
    item of some module.
    """
    first = cursor = loader.cursor
    draws = SAMPLE_DRAWS if cursor.num_records is None else cursor.num_records
    missing = set(modules)
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


def place(
    job: Job, policy: str, graph: ModelGraph, batches: Sequence[Batch], costs: Costs, budget_bytes: int | None
) -> Planning:
    """Chunks on workers by a policy, from a sample of batches, and all else that plans depend on.

    Raises ValueError if the policy cannot place the model.
    """
    replicas = job.workers.replicas
    shares = [share for batch in batches for share in share_out(graph, batch, replicas, costs)]
    placement = POLICIES[policy].place(
        graph,
        job.workers.pipeline,
        costs,
        shares,
        job.policy.options,
        dtype=job.run.dtype,
        budget_bytes=budget_bytes,
    )
    return planning(job, policy, graph, placement, costs, budget_bytes)


def planning(
    job: Job, policy: str, graph: ModelGraph, placement: Placement, costs: Costs, budget_bytes: int | None
) -> Planning:
    return Planning(
        graph=graph,
        placement=placement,
        costs=costs,
        policy=policy,
        options=job.policy.options,
        num_replicas=job.workers.replicas,
        dtype=job.run.dtype,
        budget_bytes=budget_bytes,
        seed=job.run.seed,
        rounds=DEFAULT_ROUNDS if job.policy.rounds is None else job.policy.rounds,
    )


def job_setup(job: Job, planning: Planning, costs: bytes) -> JobSetup:
    """What planner processes make `planning` from; `costs` as `calibrate.pack_costs` writes them."""
    return JobSetup(
        path=job.path,
        overrides=job.overrides,
        fingerprint=fingerprint(job),
        policy=planning.policy,
        placement=planning.placement,
        budget_bytes=planning.budget_bytes,
        costs=costs,
    )


def fingerprint(job: Job) -> str:
    """Equal for equal jobs, wherever their files are."""
    content = msgspec.msgpack.encode(msgspec.to_builtins(msgspec.structs.replace(job, path="", overrides=())))
    return hashlib.sha256(content).hexdigest()[:16]


def _has_held_out(data: DataConfig) -> bool:
    match data:
        case DigitsData():
            return data.held_out_records > 0
        case JsonLinesData():
            return data.held_out is not None
        case CustomData():
            return True
