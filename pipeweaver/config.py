"""A job, read from one TOML file: what to train, on which workers, by which policy.

    [run]                               [task]
    output = "runs/digits"              backbone = "language"
    steps = 300                         tokens_per_microbatch = 512
                                        microbatches = 8
    [workers]
    pipeline = 2                        [task.data]
                                        type = "digits"
    [model]
    flows = ["vision.features -> language"]

    [model.vision]                      [optimizer]
    type = "vit"                        lr = 1e-3
    ...

`load(path)` gives a `Job` or raises ValueError with one line: file, line, key, value and what would be right.
docs/configuration.md describes every key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from pipeweaver import toml
from pipeweaver.cluster import Workers, available_cores
from pipeweaver.data.config import DATA, DataConfig
from pipeweaver.model.build import CONFIGS, ModuleConfig
from pipeweaver.model.graph import Flow
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.policies import POLICIES
from pipeweaver.runtime.optimizer import OptimizerConfig

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]. `output` is by default runs/NAME for NAME.toml. `evaluate_every` and `trace_every` count steps;
    0 means at the end only. `plans`: a folder of recorded plans to replay instead of planning. A step that
    hangs longer than max(`watchdog_s`, 10 x predicted) ends the run."""

    output: str = ""
    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    evaluate_every: NonNegativeInt = 0
    trace_every: NonNegativeInt = 0
    plans: str = ""
    record_plans: bool = True
    watchdog_s: PositiveFloat = 60.0
    tensorboard: bool = False


DEFAULT_ROUNDS = 100
"""Half a percent of step time for some ten milliseconds of planning: docs/log.md, 2026-11-29."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy]. `rounds` of improvement that a search makes per step, `DEFAULT_ROUNDS` if left out. `options` are
    the other keys of the table."""

    name: str = "dynamic"
    rounds: NonNegativeInt | None = None
    options: PolicyOptions = PolicyOptions()


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[task]. A microbatch is samples whose `backbone` items fill `tokens_per_microbatch`, with at most
    `max_items` items of each module named there; a step has `microbatches` of them, over all replicas.
    `too_long`: what becomes of a sample that fits into no microbatch. `loss_weights` maps modules with a
    loss to its weight, 1 by default."""

    name: str = "main"
    backbone: str
    tokens_per_microbatch: PositiveInt
    microbatches: PositiveInt
    max_items: dict[str, PositiveInt] = {}
    too_long: Literal["error", "skip", "truncate"] = "error"
    loss_weights: dict[str, NonNegativeFloat] = {}


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[costs]. `cache`: where calibrations are kept, by default the user's cache folder. `correct`: later plans
    learn from the steps measured before, so that runs are repeated bit for bit only by replaying their plans."""

    cache: str = ""
    correct: bool = True


MODULES = cast(dict[str, type[ModuleConfig]], CONFIGS)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `modules` maps names to the records of their types, in the order of the file."""

    path: str
    run: Run
    workers: Workers
    policy: Policy
    modules: dict[str, ModuleConfig]
    flows: tuple[Flow, ...]
    task: Task
    data: DataConfig
    optimizer: OptimizerConfig
    costs: Costs

    @property
    def output(self) -> Path:
        return Path(self.run.output or f"runs/{Path(self.path).stem}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job; `overrides` are "section.key=value". Raises ValueError, one line, at the first mistake."""
    document = toml.read(path, overrides)
    toml.check_keys(document, "", ("run", "workers", "policy", "model", "task", "optimizer", "costs"))
    run = toml.convert(document, "run", Run)
    workers = toml.convert(document, "workers", Workers)
    policy = _policy(document)
    names = [name for name in toml.table_at(document, "model") if name != "flows"]
    if not names:
        raise document.error("model", "missing; a job needs at least one module, such as [model.language]")
    job = Job(
        path=str(path),
        run=run,
        workers=workers,
        policy=policy,
        modules={name: toml.convert_one_of(document, f"model.{name}", MODULES) for name in names},
        flows=_flows(document),
        task=toml.convert(document, "task", Task, ignore=("data",)),
        data=toml.convert_one_of(document, "task.data", DATA),
        optimizer=toml.convert(document, "optimizer", OptimizerConfig),
        costs=toml.convert(document, "costs", Costs),
    )
    _check_names(document, job)
    return job


def without_effect(job: Job) -> tuple[str, ...]:
    """Warnings, one line each: settings of the job that change nothing."""
    found = []
    policy, options, default = job.policy.name, job.policy.options, PolicyOptions()
    for key, policies in _EFFECTIVE.items():
        if getattr(options, key) != getattr(default, key) and policy not in policies:
            found.append(f"policy.{key} has no effect with policy {policy}, only with {' or '.join(policies)}")
    if job.policy.rounds and policy in _STATIC:
        found.append(f"policy.rounds has no effect with policy {policy}, which does not search")
    if job.policy.rounds and policy in _ONCE_PER_RUN:
        found.append(f"policy.rounds has no effect with policy {policy}, which decides once per run")
    if job.workers.replicas > job.task.microbatches:
        found.append(
            f"workers.replicas = {job.workers.replicas}: a step has {job.task.microbatches} microbatches, "
            f"so {job.workers.replicas - job.task.microbatches} replicas have nothing to do"
        )
    if job.run.evaluate_every > job.run.steps:
        found.append(f"run.evaluate_every = {job.run.evaluate_every} is beyond the last step, {job.run.steps}")
    needed = job.workers.total * job.workers.threads
    if job.workers.pin and job.run.device == "cpu" and needed > len(available_cores()):
        found.append(
            f"workers.pin has no effect: {job.workers.total} workers of {job.workers.threads} threads "
            f"need {needed} cores, this machine has {len(available_cores())}"
        )
    return tuple(found)


_STATIC = ("gpipe", "1f1b", "interleaved-1f1b")
_ONCE_PER_RUN = ("wavefront", "wavefront-levels", "task-parallel", "sequential")
_EFFECTIVE = {
    "balance": _STATIC,
    "encoder_first": _STATIC,
    "pieces_per_worker": ("interleaved-1f1b",),
    "chunks_per_worker": ("dynamic",),
    "items_per_part": ("dynamic",),
    "even_parts": ("dynamic",),
}
"""Policies that look at an option."""


def _policy(document: toml.Document) -> Policy:
    """[policy]: the policy's name, its rounds and its options stand in one table."""
    options = [field.encode_name for field in msgspec.structs.fields(PolicyOptions)]
    toml.check_keys(document, "policy", ("name", "rounds", *options))
    policy = toml.convert(document, "policy", Policy, ignore=options)
    if policy.name not in POLICIES:
        raise document.error("policy.name", f"expected one of {', '.join(POLICIES)}")
    found = toml.convert(document, "policy", PolicyOptions, ignore=("name", "rounds"))
    return msgspec.structs.replace(policy, options=found)


_FLOW = re.compile(r"\s*([\w-]+)\.([\w-]+)\s*->\s*([\w-]+)(?:\.([\w-]+))?\s*")


def _flows(document: toml.Document) -> tuple[Flow, ...]:
    """`"vision.features -> language"`, or `"… -> language.images"` where the destination reads another name."""
    texts = document.table["model"].get("flows", [])
    if not isinstance(texts, list):
        raise document.error("model.flows", 'expected a list of flows, such as ["vision.features -> language"]')
    flows = []
    for text in texts:
        match = _FLOW.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise document.error("model.flows", f'expected "SOURCE.TENSOR -> DESTINATION", not {text!r}')
        source, tensor, destination, name = match.groups()
        flows.append(Flow(source=source, tensor=tensor, destination=destination, name=name or source))
    return tuple(flows)


def _check_names(document: toml.Document, job: Job) -> None:
    """Names are plain words, and every module that the job mentions is one that it defines."""
    # Parameters and metrics are named after modules and tasks: "language.layers.3", "main/language".
    named = [("task.name", job.task.name), *((f"model.{name}", name) for name in job.modules)]
    for path, name in named:
        if not re.fullmatch(r"[\w-]+", name):
            raise document.error(path, f"expected a name of letters, digits, - and _, not {name!r}")
    mentioned = [("task.backbone", job.task.backbone)]
    mentioned += [("model.flows", end) for flow in job.flows for end in (flow.source, flow.destination)]
    mentioned += [(f"task.loss_weights.{name}", name) for name in job.task.loss_weights]
    mentioned += [(f"task.max_items.{name}", name) for name in job.task.max_items]
    mentioned += [(f"policy.chunks_per_worker.{name}", name) for name in job.policy.options.chunks_per_worker]
    mentioned += [(f"policy.items_per_part.{name}", name) for name in job.policy.options.items_per_part]
    for path, name in mentioned:
        if name not in job.modules:
            raise document.error(path, f"there is no module {name}; [model] defines {', '.join(job.modules)}")
