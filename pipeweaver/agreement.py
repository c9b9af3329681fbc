"""Do a job's model, workers and data fit together? Layers, tokens, patches, placeholders, names, flows.

    check_model(job, graph)
    -> ValueError: workers.pipeline = 12: the model has 8 layers, and every worker needs one; use 8 workers at most
    check_agreement(job, "main", dataset)
    -> ValueError: run.toml: model.language.vocab = 200: the data has 259 tokens; set it to 259 or more

Each is checked by whoever uses it too, but late, and in its own words.
"""

from __future__ import annotations

import warnings

import torch

from pipeweaver.config import AUTO, Job, Task
from pipeweaver.data.dataset import Dataset
from pipeweaver.data.items import Sample
from pipeweaver.model.diffusion import DiffusionConfig
from pipeweaver.model.graph import ModelGraph, positions
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.refused import check_layer
from pipeweaver.model.vit import VitConfig

MOST_SAMPLES = 64
"""So many of the first samples are looked at: enough to see which modules the data has items for."""


def check_model(job: Job, graph: ModelGraph) -> None:
    """Raises ValueError if layers cannot be built, a module is for nothing, nothing is trained, or there are fewer
    layers than workers. Warns of settings that the model's layers do not allow. Allocates nothing."""
    for module in graph.modules:
        for kind, layer in {layer.kind: layer for _, layer in positions(module)}.items():
            try:
                with torch.device("meta"):
                    built = layer.build()
            except Exception as error:  # torch and users' own layers raise whatever comes to them
                words = str(error).splitlines()[0] if str(error) else "no message"
                raise ValueError(
                    f"model.{module.name}: layer {kind!r} cannot be built: {type(error).__name__}: {words}"
                ) from error
            check_layer(f"model.{module.name}: layer {kind!r}", built)
        if module.loss is None and not any(flow.source == module.name for flow in graph.flows):
            raise ValueError(f"model.{module.name}: it has no loss, and no flow leads from it: it is for nothing")
        if not any(module.name in task.modules for task in job.tasks.values()):
            raise ValueError(
                f"model.{module.name}: no task activates it; name it in the modules of one, or leave it out"
            )
        if module.loss is not None and module.loss.joint and job.workers.replicas > 1:
            raise ValueError(
                f"workers.replicas = {job.workers.replicas}: the loss of {module.name} is joint, it needs a task's whole "
                f"batch in one place; use 1 replica and more workers in workers.pipeline"
            )
    for name, task in job.tasks.items():
        _check_use(graph, name, task)
    layers = [layer for module in graph.modules for _, layer in positions(module)]
    if not any(layer.trainable for layer in layers):
        raise ValueError("model: nothing is left to train; set trainable = true for a module")
    count = sum(len(module.layers) for module in graph.modules)
    if count < job.workers.pipeline:
        raise ValueError(
            f"workers.pipeline = {job.workers.pipeline}: the model has {count} layers, and every worker needs one; "
            f"use {count} workers at most"
        )
    if job.policy.name in ("dynamic", "pipeweaver", AUTO):
        _warn_of_few_layers(job, graph)


def _warn_of_few_layers(job: Job, graph: ModelGraph) -> None:
    for name, wanted in job.policy.options.chunks_per_worker.items():
        count, workers = len(graph.by_name[name].layers), job.workers.pipeline
        possible = max(1, count // workers)
        if wanted > possible:
            warnings.warn(
                f"policy.chunks_per_worker.{name} = {wanted}: {name} has {count} layers, too few for {wanted} chunks on "
                f"each of {workers} workers; it gets {possible}",
                stacklevel=3,
            )


def _check_use(graph: ModelGraph, name: str, task: Task) -> None:
    """Every module that a task activates has a loss, or flows of the task lead from it to one."""
    useful = {module for module in task.modules if graph.by_name[module].loss is not None}
    if not useful:
        raise ValueError(f"tasks.{name}: none of its modules has a loss, only others have; it trains nothing")
    while more := {f.source for f in graph.flows if task.moves(f) and f.destination in useful} - useful:
        useful |= more
    for module in task.modules:
        if module not in useful:
            raise ValueError(
                f"tasks.{name}.modules: {module} has no loss, and no flow leads from it to a module of the task: "
                f"it is for nothing there"
            )


def check_agreement(job: Job, task: str, dataset: Dataset) -> None:
    """Whether a task's data fits the modules that it activates. Modules of the user's own are left to them.

    Raises ValueError, one line that names the key to change.
    """
    settings = job.tasks[task]
    for name in settings.modules:
        config, where = job.modules[name], f"{job.path}: model.{name}"
        if isinstance(config, VitConfig):
            _check_width(f"{where}.patch = {config.patch}", "pixels", config.patch_values, dataset)
            _check_merge(f"{where}.merge = {config.merge}", config.merge, task, settings)
        if isinstance(config, DiffusionConfig):
            _check_width(f"{where}.channels = {config.channels}", "latents", config.channels, dataset)
        if isinstance(config, LanguageConfig):
            _check_tokens(where, name, config, job, dataset)
    number = MOST_SAMPLES if dataset.num_records is None else min(MOST_SAMPLES, dataset.num_records)
    samples = [dataset.sample(record, task=task) for record in range(number)]
    _check_modules(job, task, samples)
    _check_links(job, task, samples)
    _check_placeholders(job)


def _check_width(where: str, tensor: str, width: int, dataset: Dataset) -> None:
    found = dataset.widths.get(tensor)
    if found is None:
        loaded = ", ".join(dataset.widths) or "no such tensors"
        raise ValueError(f"{where}: the module takes {tensor}, but the data has {loaded}")
    if found != width:
        raise ValueError(f"{where}: a row of {tensor} is {width} values for the module, {found} in the data")


def _check_merge(where: str, merge: int, task: str, settings: Task) -> None:
    """The data counts the rows that an image becomes, so it must know how patches are merged."""
    found = getattr(settings.data, "merge", merge)
    if found != merge:
        raise ValueError(f"{where}: tasks.{task}.data.merge = {found}; both must be the same")


def _check_tokens(where: str, name: str, config: LanguageConfig, job: Job, dataset: Dataset) -> None:
    if config.vocab < dataset.vocabulary:
        raise ValueError(
            f"{where}.vocab = {config.vocab}: the data has {dataset.vocabulary} tokens; set it to that or more"
        )
    for flow in job.flows:
        token = dataset.placeholders.get(flow.source)
        given = config.placeholders.get(flow.name)
        if flow.destination == name and token is not None and given is not None and token != given:
            raise ValueError(f"{where}.placeholders.{flow.name} = {given}: in the data it is token {token}")


def _check_modules(job: Job, task: str, samples: list[Sample]) -> None:
    settings = job.tasks[task]
    found = {item.module for sample in samples for item in sample.items}
    for module in sorted(found - set(settings.modules)):
        known = "activates" if module in job.modules else "defines"
        where = f"tasks.{task}.modules" if module in job.modules else "[model]"
        raise ValueError(
            f"{job.path}: tasks.{task}.data has items for module {module}, but {where} {known} only "
            f"{', '.join(settings.modules if module in job.modules else job.modules)}"
        )
    if settings.backbone not in found:
        raise ValueError(
            f'{job.path}: tasks.{task}.backbone = "{settings.backbone}": the first {len(samples)} samples have no items '
            f"for it, only for {', '.join(sorted(found)) or 'nothing'}"
        )
    # Where a task says what it activates, it means all of it.
    missing = [module for module in settings.modules if module not in found]
    if missing and len(job.tasks) > 1:
        raise ValueError(
            f"{job.path}: tasks.{task}.modules: the first {len(samples)} samples have no items for {', '.join(missing)}, "
            f"only for {', '.join(sorted(found))}"
        )


def _check_links(job: Job, task: str, samples: list[Sample]) -> None:
    """Items are linked where flows of the task lead, and rows of linked items take all flows of the model there."""
    linked = {
        (sample.items[source].module, sample.items[destination].module)
        for sample in samples
        for source, destination in sample.links
    }
    for source, destination in sorted(linked):
        flows = [flow for flow in job.flows if (flow.source, flow.destination) == (source, destination)]
        left_out = [flow for flow in flows if not job.tasks[task].moves(flow)]
        if flows and left_out:
            raise ValueError(
                f"{job.path}: tasks.{task}.flows: in the data, items of {source} belong into items of {destination}, but "
                f'the task leaves out "{source}.{left_out[0].tensor} -> {destination}"'
            )
        if not flows:
            raise ValueError(
                f"{job.path}: model.flows: in the data, items of {source} belong into items of {destination}, "
                f'but no flow leads there; add "{source}.TENSOR -> {destination}"'
            )


def _check_placeholders(job: Job) -> None:
    """Placeholders that no flow fills would stay tokens like any other."""
    for name, config in job.modules.items():
        brought = {flow.name for flow in job.flows if flow.destination == name}
        for reading in config.placeholders if isinstance(config, LanguageConfig) else ():
            if reading not in brought:
                raise ValueError(
                    f"{job.path}: model.{name}.placeholders.{reading}: no flow brings {reading} to {name}; "
                    f'add "MODULE.TENSOR -> {name}.{reading}" to model.flows, or leave the placeholder out'
                )
