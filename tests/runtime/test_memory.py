"""Tensors live as long as the plan says, and are as large."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pipeweaver.runtime.execution import Execution
from pipeweaver.runtime.offload import SavedTensors
from pipeweaver.runtime.split import WeightGradients
from pipeweaver.schedule.ir import Free
from tests.runtime.cases import Case, make_batch, make_graph, make_plans
from tests.runtime.threads import local_workers, run_steps


@pytest.mark.parametrize("kind", ["encoder and diffusion", "frozen encoder", "skip"])
def test_buffers_are_what_the_plan_says_and_go_when_it_says(kind, monkeypatch):
    case = Case(graph=kind, policy="interleaved-1f1b", workers=2, num_replicas=1, batch="mixed", seed=4)
    graph = make_graph(case)
    ((plan,),) = make_plans(case, graph, [make_batch(case, graph, 0)])
    alive: dict = {}
    seen: set = set()
    sizes: dict = {}
    allocate, perform = Execution._allocate, Execution.perform

    def recording(self, allocations, content):
        allocate(self, allocations, content)
        for (kind, first, second), num_bytes in allocations:
            key = (self.address.worker, kind, first, second)
            tensors = tensors_of(content)
            seen.add(key)
            alive[key] = [weakref.ref(tensor) for tensor in tensors]
            if kind in ("received", "gradient", "output"):
                sizes[key] = (sum(tensor.nbytes for tensor in tensors), num_bytes)

    def checking(self, action):
        perform(self, action)
        if isinstance(action, Free):
            for kind, first, second in action.buffers:
                left = [ref() for ref in alive.pop((self.address.worker, kind, first, second))]
                assert not any(tensor is not None for tensor in left), (kind, first, second)

    monkeypatch.setattr(Execution, "_allocate", recording)
    monkeypatch.setattr(Execution, "perform", checking)
    gc.disable()
    try:
        run_steps(local_workers(graph, plan.placement, 1), [[plan]])
    finally:
        gc.enable()
    assert not alive
    assert {key[1] for key in sizes} >= {"received", "gradient"}
    assert {key[1] for key in seen} >= {"weight", "leaving", "host", "returned"}
    for key, (found, planned) in sizes.items():
        assert found == planned, key


def tensors_of(content):
    if isinstance(content, torch.Tensor):
        return [content]
    if isinstance(content, dict):
        return list(content.values())
    if isinstance(content, WeightGradients):
        return [tensor for product in content._products for tensor in (product.inputs, product.gradient)]
    if isinstance(content, SavedTensors):
        return [*content._on_host, *(storage.bytes() for storage in content._storages)]
    return list(content.outputs.values())
