"""Run the workers of a step as threads of this process, and compare them with a single process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Batch
from pipeweaver.model.build import materialise, materialise_all, named_parameters
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.reference import count_units, run_all
from pipeweaver.runtime.optimizer import OptimizerConfig
from pipeweaver.runtime.transport import Address
from pipeweaver.runtime.transport_local import Hub
from pipeweaver.runtime.worker import StepResult, Worker
from pipeweaver.schedule.ir import Placement, Plan
from tests.runtime.graphs import load

SEED = 5


def flat_costs(graph: ModelGraph) -> FlatCosts:
    return FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})


def local_workers(
    graph: ModelGraph, placement: Placement, num_replicas: int, *, queue="pair", optimizer=None, **more
) -> dict[Address, Worker]:
    """A worker per (replica, worker) on one hub, float64."""
    hub = Hub(num_replicas, placement.workers, queue)
    return {address: make_worker(graph, placement, hub.end(address), optimizer, **more) for address in hub.addresses}


def make_worker(graph, placement, transport, optimizer=None, dtype=torch.float64, device=None, **more) -> Worker:
    chunks = [placement.chunks[i] for i in placement.on(transport.address.worker)]
    modules = materialise(graph, chunks, seed=SEED, dtype=dtype, device=device or "cpu")
    return Worker(
        graph,
        modules=modules,
        parameters=named_parameters(graph, modules),
        transport=transport,
        load=more.pop("load", load),
        optimizer=optimizer or OptimizerConfig(clip_norm=0.0),
        seed=SEED,
        dtype=dtype,
        device=device,
        **more,
    )


def in_threads(workers: Mapping[Address, Worker], task: Callable[[Worker], object]) -> dict[Address, object]:
    """Run a task per worker, each in a thread of its own. The first error is raised, the others are let go."""
    results: dict[Address, object] = {}
    errors: list[BaseException] = []

    def run(address: Address, worker: Worker) -> None:
        try:
            results[address] = task(worker)
        except BaseException as error:
            errors.append(error)
            worker.transport.hub.fail(f"{address} failed: {error}")
        finally:
            worker.transport.close()

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in workers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]
    return results


def run_steps(
    workers: Mapping[Address, Worker], steps: Sequence[Sequence[Plan]], rates: Sequence[float | None] | None = None
) -> dict[Address, list[StepResult]]:
    """Run steps in a row; steps[s][r] is the plan of replica r."""
    rates = rates or [None] * len(steps)

    def task(worker: Worker) -> list[StepResult]:
        replica = worker.transport.address.replica
        return [worker.run(plans[replica], learning_rate=rate) for plans, rate in zip(steps, rates, strict=True)]

    return in_threads(workers, task)


class SingleProcess:
    """The whole batch in one process: what every schedule must reproduce."""

    def __init__(self, graph: ModelGraph, optimizer: OptimizerConfig | None = None, dtype=torch.float64) -> None:
        self.graph, self.dtype = graph, dtype
        self.modules = materialise_all(graph, seed=SEED, dtype=dtype)
        self.parameters = named_parameters(graph, self.modules)
        self.config = optimizer or OptimizerConfig(clip_norm=0.0)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
        )

    def step(self, batch: Batch, rate: float | None = None) -> dict[str, float]:
        """Losses over their units. Gradients stay in place, zero where no data came."""
        items, links = [], []
        for sample in batch.samples:
            links += [(len(items) + a, len(items) + b) for a, b in sample.links]
            items += sample.items
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)
        outcome = run_all(
            self.graph,
            self.modules,
            items,
            links,
            lambda chosen, names: load(chosen, {}, names),
            step=batch.step,
            seed=SEED,
            dtype=self.dtype,
        )
        if outcome.loss.requires_grad:
            outcome.loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.trained.items()}
        self.norm = torch.nn.utils.clip_grad_norm_(
            self.trained.values(), self.config.clip_norm or float("inf"), error_if_nonfinite=True
        ).item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr if rate is None else rate
        self.optimizer.step()
        units = count_units(self.graph, items)
        return {key: loss.item() / max(1, units[key]) for key, loss in outcome.losses.items()}


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Rule 6: per tensor max|a-b| <= 1e-9 max|b| + 1e-14 g, g the largest entry of all."""
    largest = max((float(tensor.detach().abs().max()) for tensor in expected.values()), default=0.0)
    for name, tensor in found.items():
        wanted = expected[name]
        difference = float((tensor - wanted).detach().abs().max())
        limit = 1e-9 * float(wanted.detach().abs().max()) + 1e-14 * largest
        assert difference <= limit, f"{name}: differs by {difference:.3g}, allowed {limit:.3g}"
