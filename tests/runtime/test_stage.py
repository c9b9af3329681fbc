"""A chunk on a part: chunks in a chain give the gradients of one graph, whatever becomes of saved tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeweaver.data.items import Item
from pipeweaver.model.build import materialise_all, named_parameters
from pipeweaver.model.graph import LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.runtime.stage import build_chunk, run_backward, run_forward
from pipeweaver.schedule.ir import Chunk
from tests.runtime.graphs import graph_of, load

ITEMS = [
    Item(
        task="main",
        draw=draw,
        module="language",
        position=0,
        sizes={"tokens": rows, "supervised": rows - 1, "vision": 0, "audio": 0},
    )
    for draw, rows in enumerate((3, 5, 2))
]


def view_of(items=ITEMS):
    return PartView(
        items=items,
        links=[()] * len(items),
        loaded=load(items, {}, ["tokens", "labels"]),
        step=0,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


def run_chain(graph, modules, cuts, strategies=()):
    """Forward and backward of language cut at `cuts`; returns loss, gradients and the last view."""
    chunks = [
        build_chunk(graph, Chunk(task="main", module="language", start=a, stop=b, worker=0), modules)
        for a, b in itertools.pairwise(cuts)
    ]
    inputs, states, views = {}, [], []
    for chunk in chunks:
        views.append(view_of())
        state = run_forward(
            chunk,
            inputs,
            views[-1],
            outputs={"x"} if chunk is not chunks[-1] else set(),
            grad=True,
            needs_grad=set(chunk.inputs),
            strategies=strategies[: len(chunk.layers)] if strategies else (),
        )
        states.append(state)
        inputs = state.outputs
    gradients: dict = {}
    for state in reversed(states):
        gradients = run_backward(state, gradients, loss_scale=0.5)
    return states[-1].loss.detach(), views[-1]


@pytest.mark.parametrize(
    "kind, cuts",
    [("one module", (0, 4)), ("one module", (0, 1, 4)), ("one module", (0, 1, 2, 3, 4)), ("skip", (0, 4))],
)
@pytest.mark.parametrize("strategy", ["keep", "recompute", "recompute-attention", "offload"])
def test_chunks_in_a_chain_give_the_gradients_of_one_graph(kind, cuts, strategy):
    graph = graph_of(kind, 3)
    modules = materialise_all(graph, seed=1, dtype=torch.float64)
    parameters = named_parameters(graph, modules)
    loss, view = run_chain(graph, modules, cuts, (strategy,) * 6 if strategy != "keep" else ())
    found = {name: p.grad for name, p in parameters.items()}

    x, skipped = None, None
    for name, spec in graph.by_name["language"].range(0, 4):
        state = {} if x is None else {"x": x}
        result = modules[name](state | ({"residual": skipped} if "residual" in spec.reads else {}), view_of())
        x, skipped = result.get("x"), result.get("skipped", skipped)
    assert torch.allclose(loss, result["loss"].detach(), rtol=1e-12)
    expected = torch.autograd.grad(0.5 * result["loss"], list(parameters.values()))
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-13), name
    # A layer that runs twice reports once.
    assert view.metrics["tokens"] == (10.0, 1)


def test_without_gradient_there_is_no_graph():
    graph = graph_of("one module")
    modules = materialise_all(graph, seed=1, dtype=torch.float64)
    chunk = build_chunk(graph, Chunk(task="main", module="language", start=0, stop=2, worker=0), modules)
    state = run_forward(chunk, {}, view_of(), outputs={"x"}, grad=False)
    assert state.outputs["x"].grad_fn is None and not state.outputs["x"].requires_grad


def test_recomputing_saves_less():
    graph = graph_of("one module")
    modules = materialise_all(graph, seed=1, dtype=torch.float64)
    chunk = build_chunk(graph, Chunk(task="main", module="language", start=1, stop=3, worker=0), modules)
    x = torch.randn(10, 4, dtype=torch.float64)
    saved = {}
    for strategy in ("keep", "recompute"):
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run_forward(
                chunk,
                {"x": x},
                view_of(),
                outputs={"x"},
                grad=True,
                needs_grad={"x"},
                strategies=(strategy,) * 2,
            )
        saved[strategy] = count
    assert saved["recompute"] == 0 < saved["keep"]


def test_an_output_without_gradient_counts_as_zero():
    graph = graph_of("skip", 4)
    modules = materialise_all(graph, seed=1, dtype=torch.float64)
    chunk = build_chunk(graph, Chunk(task="main", module="language", start=0, stop=1, worker=0), modules)
    gradient = torch.randn(10, 4, dtype=torch.float64)
    results = []
    for given in ({"x": gradient}, {"x": gradient, "skipped": torch.zeros_like(gradient)}):
        for module in modules.values():
            module.zero_grad()
        state = run_forward(chunk, {}, view_of(), outputs={"x", "skipped"}, grad=True)
        run_backward(state, given)
        results.append([p.grad.clone() for layer in chunk.layers for p in layer.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # No gradient at all: nothing happens, inputs get zeros.
    chunk = build_chunk(graph, Chunk(task="main", module="language", start=1, stop=2, worker=0), modules)
    state = run_forward(chunk, {"x": gradient}, view_of(), outputs={"x"}, grad=True, needs_grad={"x"})
    assert torch.equal(run_backward(state, {})["x"], torch.zeros_like(gradient))


class Wrong(nn.Module):
    def __init__(self, result) -> None:
        super().__init__()
        self.result = result

    def forward(self, state, part):
        return self.result


@pytest.mark.parametrize(
    "result, message",
    [
        ({}, "layer only.layers.0 returned nothing; its spec promises loss, x"),
        ({"x": torch.zeros(9, 4), "loss": torch.zeros(())}, "returned x of shape .9, 4., promised .10, 4."),
        (
            {"x": torch.zeros(10, 4).long(), "loss": torch.zeros(())},
            "returned x as torch.int64, promised torch.float64",
        ),
        ({"x": torch.zeros(10, 4).double(), "loss": torch.zeros(2)}, "returned a loss of shape .2."),
    ],
)
def test_a_layer_that_breaks_its_spec_is_named(result, message):
    spec = LayerSpec(kind="wrong", build=nn.Identity, carries=(TensorSpec(name="x", width=4),))
    graph = ModelGraph(modules=(Module(name="only", layers=(spec,), loss=LossSpec(units="supervised")),))
    whole = Chunk(task="main", module="only", start=0, stop=1, worker=0)
    chunk = build_chunk(graph, whole, {"only.layers.0": Wrong(result)})
    with pytest.raises(ValueError, match=message):
        run_forward(chunk, {}, view_of(), outputs=set(), grad=True)


def test_names_that_leave_a_chunk_must_differ():
    x = TensorSpec(name="x", width=4)
    layer = LayerSpec(kind="a", build=nn.Identity, carries=(x,))
    with pytest.raises(ValueError, match="sends x, which layers of m also carry"):
        ModelGraph(modules=(Module(name="m", layers=(layer, replace(layer, sends=(x,)))),))
    y = TensorSpec(name="y", width=4)
    with pytest.raises(ValueError, match="layers 0 and 1 of m both send y"):
        ModelGraph(modules=(Module(name="m", layers=(replace(layer, sends=(y,)),) * 2),))
