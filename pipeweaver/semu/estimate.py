"""What a job would do on a machine that is not at hand: step time, MFU, memory per worker with its parts.

    found = estimate(load("job.toml"), "H800", tensor_parallel=8)
    print("\\n".join(render(found)))

Plans are those that training would make, with emulated costs in place of measured ones; `workers.memory`, or the
memory of a worker's devices, is the budget. MFU counts forward and backward of every item once, causal attention by
its share, over the peak of all devices for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeweaver.cluster import format_bytes
from pipeweaver.config import Job
from pipeweaver.data.items import linked
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime import prepare
from pipeweaver.runtime.ahead import plan_batch
from pipeweaver.runtime.compare import place
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.ir import Action, Compute, Free, Plan
from pipeweaver.schedule.memory import allocations, held_bytes
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import Machine, load_machine


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a worker holds: while which action, and of what, bytes by name. "static" is parameters,
    gradients and optimizer state; the others are kinds of buffers, and "workspace"."""

    action: str
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Plans of all replicas for one step, and what follows from them. `flops` by module, over all replicas."""

    plans: tuple[Plan, ...]
    machine: Machine
    tensor_parallel: int
    dtype: str
    flops: dict[str, float]
    costs: SemuCosts

    @property
    def step_ns(self) -> int:
        return max(plan.prediction.step_ns for plan in self.plans if plan.prediction is not None)

    @property
    def num_devices(self) -> int:
        return sum(plan.placement.workers for plan in self.plans) * self.tensor_parallel

    @property
    def mfu(self) -> float:
        """Model FLOPs over what all devices could have done in the step's time."""
        possible = self.num_devices * self.machine.peak(self.dtype) * self.step_ns / 1e9
        return sum(self.flops.values()) / possible


def estimate(job: Job, machine: str, *, tensor_parallel: int = 1, step: int = 0) -> Estimate:
    """Estimate a step of a job on a machine.

    Raises ValueError if there is no such machine or dtype, the model cannot be placed, or memory does not suffice.
    """
    graph, costs, (plans,) = emulated_plans(job, machine, tensor_parallel=tensor_parallel, steps=range(step, step + 1))
    flops: dict[str, float] = {}
    for plan in plans:
        sources = linked(plan.items, plan.links)
        for module in graph.by_name:
            mine = [i for i, item in enumerate(plan.items) if item.module == module]
            found = costs.flops(module, [plan.items[i] for i in mine], [sources[i] for i in mine])
            flops[module] = flops.get(module, 0.0) + found
    return Estimate(
        plans=plans,
        machine=costs.machine,
        tensor_parallel=tensor_parallel,
        dtype=job.run.dtype,
        flops=flops,
        costs=costs,
    )


def emulated_plans(
    job: Job, machine: str, *, tensor_parallel: int, steps: range
) -> tuple[ModelGraph, SemuCosts, list[tuple[Plan, ...]]]:
    """The plans of some steps, per step and replica, that a job would have on a machine. Raises as `estimate` does."""
    device = load_machine(machine)
    tasks = prepare.task_set_of(job, steps).tasks
    _check_degree(job, tensor_parallel)
    graph = prepare.job_graph(job)
    datasets = prepare.job_datasets(job)["train"]
    loaders = prepare.job_loaders(job, datasets)
    costs = SemuCosts(
        graph,
        device,
        tensor_parallel=tensor_parallel,
        dtype=job.run.dtype,
        widths=prepare.job_widths(datasets),
        workers=job.workers.pipeline,
    )
    budget = job.workers.memory_bytes or device.memory_bytes * tensor_parallel
    planning = place(job, graph, prepare.job_sample(job, loaders, tasks), costs, budget)
    batches = prepare.step_batches(job, loaders, steps)
    return graph, costs, [tuple(map(records, plan_batch(planning, batch))) for batch in batches]


def peak(plan: Plan, worker: int) -> Peak:
    """What a worker holds where it holds most."""
    during = held_bytes(plan, worker)[1]
    actions = plan.actions[worker]
    highest = max(range(len(actions)), key=lambda i: during[i], default=-1)
    sizes: dict[object, tuple[str, int]] = {}
    for action in actions[: highest + 1]:
        for buffer, num_bytes in allocations(action):
            # What is on the host takes none of the worker's memory.
            sizes[buffer] = (buffer.kind, 0 if buffer.kind == "host" else num_bytes)
        if isinstance(action, Free) and action is not actions[highest]:
            for buffer in action.buffers:
                del sizes[buffer]
    parts = {"static": plan.static_bytes[worker]}
    for kind, num_bytes in sizes.values():
        parts[kind] = parts.get(kind, 0) + num_bytes
    last = actions[highest] if actions else None
    if isinstance(last, Compute):
        parts["workspace"] = last.workspace_bytes
    return Peak(action=_text(last), parts=parts)


def render(found: Estimate) -> list[str]:
    """Step time, MFU with FLOPs per module, memory per worker, and how much rests on defaults."""
    lines = [
        f"step time {found.step_ns / 1e9:.4g} s on {found.num_devices} x {found.machine.name}, MFU {100 * found.mfu:.3g} %",
        "model FLOPs per step: " + ", ".join(f"{name} {flops:.3g}" for name, flops in found.flops.items()),
    ]
    for plan in found.plans:
        for worker in range(plan.placement.workers):
            most = peak(plan, worker)
            owner = max(most.parts, key=lambda name: most.parts[name])
            listed = ", ".join(f"{_WORDS[name]} {format_bytes(size)}" for name, size in most.parts.items() if size)
            replica = f"replica {plan.replica} " if len(found.plans) > 1 else ""
            lines.append(
                f"{replica}worker {worker}: peak {format_bytes(most.num_bytes)} in {most.action}, "
                f"most of it {_WORDS[owner]}: {listed}"
            )
    coverage, machine = found.costs.coverage, found.machine
    lines.append(f"machine {machine.name}: {machine.calibrated or 'not calibrated'}; {coverage}; {machine.source}")
    return lines


_WORDS = {
    "static": "parameters, gradients, optimizer state",
    "loaded": "loaded data",
    "saved": "activations",
    "output": "outputs",
    "gradient": "gradients of inputs",
    "received": "received tensors",
    "weight": "kept for weight gradients",
    "leaving": "on the way to the host",
    "returned": "back from the host",
    "workspace": "inside the running stage",
}


def _check_degree(job: Job, tensor_parallel: int) -> None:
    for name, module in job.modules.items():
        heads = getattr(module, "heads", tensor_parallel)
        if heads % tensor_parallel:
            raise ValueError(
                f"{job.path}: --tensor-parallel {tensor_parallel}: {name} has {heads} heads, which so many devices cannot "
                "share evenly"
            )


def _text(action: Action | None) -> str:
    if isinstance(action, Compute):
        return f"stage {action.stage}"
    return "no action" if action is None else f"a {type(action).__name__.lower()}"
