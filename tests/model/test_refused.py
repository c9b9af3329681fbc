"""Batch norm, dropout and torch's global generator are refused by name, wherever a layer hides them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeweaver.data.items import Item
from pipeweaver.model.build import materialise_all
from pipeweaver.model.graph import LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.model.refused import check_layer
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer, run_forward

X = TensorSpec(name="x", width=4)


class Layer(nn.Module):
    def __init__(self, run=lambda x: x, **parts) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, state, part):
        return {"x": self.run(state["x"] @ self.w)}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (nn.BatchNorm1d(4), "m.layers.0.part is a BatchNorm1d: its statistics mix the items"),
        (nn.SyncBatchNorm(4), "m.layers.0.part is a SyncBatchNorm: its statistics mix the items"),
        (nn.Dropout(0.1), "m.layers.0.part is a Dropout with dropout 0.1: torch's global generator"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout2d(0.5)), "m.layers.0.part.1 is a Dropout2d with dropout 0.5"),
        (nn.MultiheadAttention(4, 2, dropout=0.2), "m.layers.0.part is a MultiheadAttention with dropout 0.2"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.3), "m.layers.0.part is a LSTM with dropout 0.3"),
    ],
)
def test_modules_that_depend_on_the_plan_are_refused_by_name(part, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        check_layer("m.layers.0", Layer(part=part))
    check_layer("m.layers.0", Layer(part=part.eval()))
    spec = LayerSpec(kind="layer", build=lambda: Layer(part=part.train()), carries=(X,))
    module = Module(name="m", layers=(spec,), loss=LossSpec(units="tokens"))
    with pytest.raises(ValueError, match=re.escape(words)):
        materialise_all(ModelGraph(modules=(module,)), seed=0)


@pytest.mark.parametrize("part", [nn.Dropout(0.0), nn.MultiheadAttention(4, 2), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_what_does_not_is_not(part):
    check_layer("m.layers.0", Layer(part=part))


def forward(layer, strategy, rows=5):
    spec = LayerSpec(kind="layer", build=nn.Identity, carries=(X,))
    built = BuiltLayer(name="m.layers.0", spec=spec, module=layer, inside={})
    chunk = BuiltChunk(layers=(built,), inputs={"x": X}, loads=(), loss=None)
    items = [Item(task="main", draw=0, module="m", position=0, sizes={"tokens": rows})] if rows else []
    device = torch.device("cpu")
    view = PartView(items=items, links=[()] * len(items), loaded={}, step=0, seed=0, device=device, dtype=torch.float32)
    return run_forward(
        chunk, {"x": torch.ones(rows, 4)}, view, outputs={"x"}, grad=True, needs_grad={"x"}, strategies=(strategy,)
    )


@pytest.mark.parametrize("strategy", ["keep", "recompute", "recompute-attention", "offload"])
@pytest.mark.parametrize("run", [lambda x: F.dropout(x, 0.1), lambda x: x + torch.rand_like(x)])
def test_draws_from_the_global_generator_are_refused_when_they_first_happen(run, strategy):
    with pytest.raises(ValueError, match=r"layer m.layers.0, or .*, draws at random: torch's global generator"):
        forward(Layer(run), strategy)


def test_draws_from_generators_of_their_own_are_not():
    layer = Layer(lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(forward(layer, "keep").outputs["x"], forward(layer, "recompute").outputs["x"])


def test_a_part_without_rows_shows_nothing_yet():
    layer = Layer(lambda x: F.dropout(x, 0.1) if len(x) else x)
    forward(layer, "keep", rows=0)
    with pytest.raises(ValueError, match="draws at random"):
        forward(layer, "keep")
