"""A job, read from one TOML file: what to train, on which workers, by which policy.

    [run]                               [tasks.main]
    output = "runs/digits"              backbone = "language"
    steps = 300                         tokens_per_microbatch = 512
                                        microbatches = 8
    [workers]
    pipeline = 2                        [tasks.main.data]
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
from itertools import accumulate
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


class TaskSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks of so many steps in a row."""

    tasks: Annotated[tuple[str, ...], Meta(min_length=1)]
    steps: PositiveInt


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]. `output` is by default runs/NAME for NAME.toml. `evaluate_every` and `trace_every` count steps;
    0 means at the end only. `task_sets` come one after the other; without any, all tasks run for `steps` steps.
    `plans`: a folder of recorded plans to replay instead of planning. A step that
    hangs longer than max(`watchdog_s`, 10 x predicted) ends the run."""

    output: str = ""
    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    task_sets: tuple[TaskSet, ...] = ()
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


AUTO = "auto"
"""The policy that takes the fastest of those that can run the job."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy]. `rounds` of improvement that a search makes per step, `DEFAULT_ROUNDS` if left out. `options` are
    the other keys of the table."""

    name: str = "dynamic"
    rounds: NonNegativeInt | None = None
    options: PolicyOptions = PolicyOptions()


class Planner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[planner]. `processes` plan beside training, by default as many as help, on half the cores at most; they are told
    of batches `ahead` orders before their plans are handed out, and search for `seconds` of processor time per step,
    less if the step begins before; where `policy.rounds` is set, for so many rounds."""

    processes: PositiveInt | None = None
    ahead: Annotated[int, Meta(ge=1, le=1000)] = 2
    seconds: NonNegativeFloat = 1.0


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[tasks.NAME]. A microbatch is samples whose `backbone` items fill `tokens_per_microbatch`, with at most
    `max_items` items of each module named there; a step has `microbatches` of them, over all replicas.
    `modules` are those that the task activates, and `flows`, of the model's, what it moves between them: all,
    where the task is the only one or its flows are left out. `too_long`: what becomes of a sample that fits into
    no microbatch. A loss counts `weight` times its module's of `loss_weights`, both 1 by default."""

    backbone: str
    tokens_per_microbatch: PositiveInt
    microbatches: PositiveInt
    modules: tuple[str, ...] = ()
    flows: tuple[str, ...] = ()
    max_items: dict[str, PositiveInt] = {}
    too_long: Literal["error", "skip", "truncate"] = "error"
    weight: NonNegativeFloat = 1.0
    loss_weights: dict[str, NonNegativeFloat] = {}
    data: DataConfig

    def moves(self, flow: Flow) -> bool:
        """Whether rows of the task go this way, if its data links items so."""
        ends = flow.source in self.modules and flow.destination in self.modules
        return ends and (not self.flows or any(parse_flow(text) == flow for text in self.flows))


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[costs]. `cache`: where calibrations are kept, by default the user's cache folder. `correct`: later plans
    learn from the steps measured before, so that runs are repeated bit for bit only by replaying their plans."""

    cache: str = ""
    correct: bool = True


MODULES = cast(dict[str, type[ModuleConfig]], CONFIGS)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `modules` and `tasks` map names to their records, in the order of the file. `path` and `overrides`
    are what it was read from."""

    path: str
    run: Run
    workers: Workers
    policy: Policy
    modules: dict[str, ModuleConfig]
    flows: tuple[Flow, ...]
    tasks: dict[str, Task]
    optimizer: OptimizerConfig
    costs: Costs
    planner: Planner
    overrides: tuple[str, ...]

    def rounds_of(self, policy: str) -> int | None:
        """Rounds of search per step under a policy; None for as many as there is time for."""
        return 0 if policy in (*_STATIC, *_ONCE_PER_RUN) else self.policy.rounds

    @property
    def task_sets(self) -> tuple[TaskSet, ...]:
        """What is trained for how long: at least one set; their steps are those of the run."""
        return self.run.task_sets or (TaskSet(tasks=tuple(self.tasks), steps=self.run.steps),)

    def task_set_at(self, step: int) -> int:
        """The number of the set that a step belongs to, the last one behind the end."""
        ends = accumulate(task_set.steps for task_set in self.task_sets)
        return min(sum(end <= step for end in ends), len(self.task_sets) - 1)

    @property
    def output(self) -> Path:
        return Path(self.run.output or f"runs/{Path(self.path).stem}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job; `overrides` are "section.key=value". Raises ValueError, one line, at the first mistake."""
    document = toml.read(path, overrides)
    tables = ("run", "workers", "policy", "model", "tasks", "optimizer", "costs", "planner")
    if "task" in document.table:
        raise document.error("task", "tasks have names: write [tasks.main] and [tasks.main.data], or another name")
    toml.check_keys(document, "", tables)
    run = _run(document)
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
        tasks=_tasks(document, names),
        optimizer=toml.convert(document, "optimizer", OptimizerConfig),
        costs=toml.convert(document, "costs", Costs),
        planner=toml.convert(document, "planner", Planner),
        overrides=tuple(overrides),
    )
    _check_names(document, job)
    return job


def without_effect(job: Job) -> tuple[str, ...]:
    """Warnings, one line each: settings of the job that change nothing."""
    found = []
    policy, options, default = job.policy.name, job.policy.options, PolicyOptions()
    for key, policies in _EFFECTIVE.items():
        looked_at = policy in policies or (policy == AUTO and "dynamic" in policies)  # one of its two candidates
        if getattr(options, key) != getattr(default, key) and not looked_at:
            found.append(f"policy.{key} has no effect with policy {policy}, only with {' or '.join(policies)}")
    if job.policy.rounds and policy in _STATIC:
        found.append(f"policy.rounds has no effect with policy {policy}, which does not search")
    if job.policy.rounds and policy in _ONCE_PER_RUN:
        found.append(f"policy.rounds has no effect with policy {policy}, which decides once per run")
    if job.planner.seconds != Planner().seconds:
        if policy in (*_STATIC, *_ONCE_PER_RUN):
            found.append(f"planner.seconds has no effect with policy {policy}, which does not search step by step")
        elif job.policy.rounds is not None:
            found.append("planner.seconds has no effect: policy.rounds is set, so that many rounds are waited for")
    cores = len(available_cores())
    if job.planner.processes is not None and job.planner.processes > cores:
        found.append(
            f"planner.processes = {job.planner.processes}: this machine has {cores} cores, so {cores} are started"
        )
    microbatches = sum(task.microbatches for task in job.tasks.values())
    if job.workers.replicas > microbatches:
        found.append(
            f"workers.replicas = {job.workers.replicas}: a step has {microbatches} microbatches, "
            f"so {job.workers.replicas - microbatches} replicas have nothing to do"
        )
    for name in job.tasks:
        if not any(name in task_set.tasks for task_set in job.task_sets):
            found.append(f"tasks.{name} has no effect: no set of run.task_sets has it")
    if job.run.evaluate_every > job.run.steps:
        found.append(f"run.evaluate_every = {job.run.evaluate_every} is beyond the last step, {job.run.steps}")
    needed = job.workers.total * job.workers.threads
    if job.workers.pin and job.run.device == "cpu" and needed > cores:
        found.append(
            f"workers.pin has no effect: {job.workers.total} workers of {job.workers.threads} threads "
            f"need {needed} cores, this machine has {cores}"
        )
    return tuple(found)


_STATIC = ("gpipe", "1f1b", "interleaved-1f1b")
_ONCE_PER_RUN = ("wavefront", "wavefront-levels", "task-parallel", "sequential")
_EFFECTIVE = {
    "balance": _STATIC,
    "encoder_first": _STATIC,
    "pieces_per_worker": ("interleaved-1f1b",),
    "chunks_per_worker": ("dynamic", "pipeweaver"),
    "items_per_part": ("dynamic", "pipeweaver"),
    "even_parts": ("dynamic",),
    "regroup": ("dynamic",),
    "exchange": ("dynamic",),
    "split_backward": ("dynamic",),
    "strategies": ("dynamic", "pipeweaver"),
}
"""Policies that look at an option."""


def _policy(document: toml.Document) -> Policy:
    """[policy]: the policy's name, its rounds and its options stand in one table."""
    options = [field.encode_name for field in msgspec.structs.fields(PolicyOptions)]
    toml.check_keys(document, "policy", ("name", "rounds", *options))
    policy = toml.convert(document, "policy", Policy, ignore=options)
    if policy.name not in (*POLICIES, AUTO):
        raise document.error("policy.name", f"expected one of {', '.join((*POLICIES, AUTO))}")
    found = toml.convert(document, "policy", PolicyOptions, ignore=("name", "rounds"))
    return msgspec.structs.replace(policy, options=found)


def _run(document: toml.Document) -> Run:
    """[run]; where there are task sets, they say how many steps it has."""
    run = toml.convert(document, "run", Run)
    if not run.task_sets:
        return run
    steps = sum(task_set.steps for task_set in run.task_sets)
    if "steps" in toml.table_at(document, "run") and run.steps != steps:
        raise document.error("run.steps", f"run.task_sets have {steps} steps together; leave run.steps out")
    return msgspec.structs.replace(run, steps=steps)


def _tasks(document: toml.Document, modules: Sequence[str]) -> dict[str, Task]:
    """[tasks.NAME] of all tasks. A sole task activates all modules, if it does not say which."""
    names = list(toml.table_at(document, "tasks"))
    if not names:
        raise document.error("tasks", "missing; a job needs at least one task, such as [tasks.main]")
    tasks = {}
    for name in names:
        path = f"tasks.{name}"
        table = toml.table_at(document, path)
        if "data" not in table:
            raise document.error(f"{path}.data", f"missing; a task needs data of its own, [{path}.data]")
        data = toml.convert_one_of(document, f"{path}.data", DATA)
        task = toml.convert(document, path, Task, given={"data": data})
        if not task.modules:
            if len(names) > 1:
                raise document.error(
                    f"{path}.modules",
                    f"missing; where there are several tasks, each names its own of {', '.join(modules)}",
                )
            task = msgspec.structs.replace(task, modules=tuple(modules))
        tasks[name] = task
    return tasks


_FLOW = re.compile(r"\s*([\w-]+)\.([\w-]+)\s*->\s*([\w-]+)(?:\.([\w-]+))?\s*")


def parse_flow(text: str) -> Flow | None:
    """`"vision.features -> language"`, or `"… -> language.images"` where the destination reads another name."""
    match = _FLOW.fullmatch(text)
    if match is None:
        return None
    source, tensor, destination, name = match.groups()
    return Flow(source=source, tensor=tensor, destination=destination, name=name or source)


def _flows(document: toml.Document) -> tuple[Flow, ...]:
    texts = document.table["model"].get("flows", [])
    if not isinstance(texts, list):
        raise document.error("model.flows", 'expected a list of flows, such as ["vision.features -> language"]')
    flows = []
    for text in texts:
        flow = parse_flow(text) if isinstance(text, str) else None
        if flow is None:
            raise document.error("model.flows", f'expected "SOURCE.TENSOR -> DESTINATION", not {text!r}')
        flows.append(flow)
    return tuple(flows)


def _check_names(document: toml.Document, job: Job) -> None:
    """Names are plain words, and every module and flow that the job mentions is one that it defines."""
    # Parameters and metrics are named after modules and tasks: "language.layers.3", "main/language".
    for path, name in [
        (f"{table}.{name}", name) for table in ("tasks", "model") for name in getattr(job, _NAMED[table])
    ]:
        if not re.fullmatch(r"[\w-]+", name):
            raise document.error(path, f"expected a name of letters, digits, - and _, not {name!r}")
    mentioned = [("model.flows", end) for flow in job.flows for end in (flow.source, flow.destination)]
    for task, settings in job.tasks.items():
        mentioned += [(f"tasks.{task}.backbone", settings.backbone)]
        mentioned += [(f"tasks.{task}.modules", name) for name in settings.modules]
        mentioned += [(f"tasks.{task}.loss_weights.{name}", name) for name in settings.loss_weights]
        mentioned += [(f"tasks.{task}.max_items.{name}", name) for name in settings.max_items]
    mentioned += [(f"policy.chunks_per_worker.{name}", name) for name in job.policy.options.chunks_per_worker]
    mentioned += [(f"policy.items_per_part.{name}", name) for name in job.policy.options.items_per_part]
    for path, name in mentioned:
        if name not in job.modules:
            raise document.error(path, f"there is no module {name}; [model] defines {', '.join(job.modules)}")
    for task, settings in job.tasks.items():
        _check_task(document, task, settings, job)
    for number, task_set in enumerate(job.run.task_sets):
        for task in task_set.tasks:
            if task not in job.tasks:
                raise document.error(
                    f"run.task_sets[{number}].tasks", f"there is no task {task}; there are {', '.join(job.tasks)}"
                )
            if task_set.tasks.count(task) > 1:
                raise document.error(f"run.task_sets[{number}].tasks", f"{task} is named twice")


def _check_task(document: toml.Document, name: str, task: Task, job: Job) -> None:
    """What the task mentions is what it activates, and its flows are flows of the model."""
    mentioned = [("backbone", task.backbone)]
    mentioned += [(f"{key}.{module}", module) for key in ("loss_weights", "max_items") for module in getattr(task, key)]
    for key, module in mentioned:
        if module not in task.modules:
            raise document.error(
                f"tasks.{name}.{key}", f"the task does not activate {module}, only {', '.join(task.modules)}"
            )
    for text in task.flows:
        flow = parse_flow(text)
        if flow not in job.flows:
            raise document.error(
                f"tasks.{name}.flows", f"{text!r} is not among model.flows, where all flows are defined"
            )
        if not task.moves(flow):
            raise document.error(
                f"tasks.{name}.flows",
                f"{text!r} joins modules of which the task activates only {', '.join(task.modules)}",
            )


_NAMED = {"tasks": "tasks", "model": "modules"}
"""Tables of named things, and the job's name for them."""
