"""Memory strategies and split backwards, as calibrated: bytes as the runtime has them, times that add up."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from pipeweaver.costs import with_strategies
from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.model.graph import LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.profile.layers import profile_layers
from pipeweaver.profile.measured import LinkSample, Profile, StrategyProfile
from pipeweaver.profile.table import TableCosts, merge
from tests.profile.cases import ENDS, chunk_of, draw_part, run_counted

REPORTED = 4 * 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ends", ENDS)
def test_saved_bytes_are_exact_under_strategies_drawn_at_random(graph, batches, load, costs, ends, seed):
    chunk = chunk_of(*ends)
    items, links = draw_part(batches, chunk.module, seed)
    if not items:
        pytest.skip("a part without items")
    draw = random.Random(seed)
    layers = costs.strategies(chunk, items, links)
    chosen = tuple(draw.choice(list(known)) for known in layers)
    cost = with_strategies(costs.stage(chunk, items, links), chosen, layers)
    found = run_counted(graph, batches, load, chunk, items, links, strategies=chosen)
    # What is recomputed holds on to its part, and to the few numbers that the part has reported.
    assert cost.saved_bytes <= found.saved <= cost.saved_bytes + REPORTED, chosen
    assert found.backward_workspace <= 1.01 * cost.backward_workspace_bytes
    # The same with the backward split: what W needs.
    found = run_counted(graph, batches, load, chunk, items, links, strategies=chosen, split=True)
    assert cost.saved_bytes <= found.saved <= cost.saved_bytes + REPORTED, chosen
    assert cost.weight_bytes == found.weight
    assert found.backward_workspace <= 1.01 * cost.backward_workspace_bytes + cost.weight_bytes


@pytest.mark.parametrize("ends", ENDS)
def test_each_strategy_saves_what_it_should(graph, batches, load, costs, ends):
    chunk = chunk_of(*ends)
    items, links = draw_part(batches, chunk.module, 1)
    keep = costs.stage(chunk, items, links)
    layers = costs.strategies(chunk, items, links)
    names = [name for name, _ in graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
    assert len(layers) == len(names)
    blocks = [known for known, name in zip(layers, names, strict=True) if ".layers." in name]
    for known in blocks:
        # A CPU's memory is the host's: offloading would save nothing.
        assert set(known) == {"keep", "recompute", "recompute-attention"}
        assert 0 <= known["recompute"].saved_bytes < known["recompute-attention"].saved_bytes
        assert known["recompute-attention"].saved_bytes < known["keep"].saved_bytes
        assert 0 < known["recompute-attention"].extra_ns < known["recompute"].extra_ns
    all_again = with_strategies(keep, ["recompute" if "recompute" in known else "keep" for known in layers], layers)
    assert all_again.forward_ns == keep.forward_ns
    # What is run again takes about as long as before.
    extra = all_again.backward_ns - keep.backward_ns
    assert 0.3 * keep.forward_ns < extra < 3 * keep.forward_ns
    assert all_again.input_ns - keep.input_ns == extra
    assert all_again.weight_ns == keep.weight_ns


def test_the_halves_of_a_backward_are_about_the_whole(batches, costs):
    for module in ("vision", "language"):
        chunk = chunk_of(module, 0, 3)
        cost = costs.stage(chunk, *draw_part(batches, module, 1))
        assert 0 < cost.weight_ns < cost.backward_ns
        assert 0.5 < (cost.input_ns + cost.weight_ns) / cost.backward_ns < 2
        assert cost.weight_bytes > 0


def test_corrected_costs_scale_all_times_of_a_module(batches, costs):
    corrected = costs.corrected({"language": 2.0})
    items, links = draw_part(batches, "language", 1)
    chunk = chunk_of("language", 0, 3)
    plain, changed = costs.stage(chunk, items, links), corrected.stage(chunk, items, links)
    assert (changed.input_ns, changed.weight_ns) == (2 * plain.input_ns, 2 * plain.weight_ns)
    once, twice = costs.strategies(chunk, items, links), corrected.strategies(chunk, items, links)
    for a, b in zip(once, twice, strict=True):
        assert {n: (c.saved_bytes, 2 * c.extra_ns) for n, c in a.items()} == {
            n: (c.saved_bytes, c.extra_ns) for n, c in b.items()
        }


class Convolution(nn.Module):
    """Nothing to put off, and torch.func inside, which cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, state, part):
        x = state["x"] if "x" in state else torch.ones(sum(part.sizes()), 4, device=part.device, dtype=part.dtype)
        slope = torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(x.detach())
        return {"x": self.conv(x.T[None])[0].T + slope}


class Total(nn.Module):
    def forward(self, state, part):
        return {"loss": state["x"].square().sum()}


def test_what_cannot_be_split_or_recomputed_is_known():
    x = TensorSpec(name="x", width=4)
    layer = LayerSpec(kind="convolution", build=Convolution, carries=(x,))
    last = LayerSpec(kind="total", build=Total, trainable=False)
    graph = ModelGraph(
        modules=(Module(name="only", layers=(layer, layer), after=last, loss=LossSpec(units="supervised")),)
    )
    items = [
        Item(task="main", draw=i, module="only", position=0, sizes={"tokens": 3 + i, "supervised": 1}) for i in range(4)
    ]
    samples = tuple(Sample(task="main", draw=i, record=i, items=(item,)) for i, item in enumerate(items))
    batch = Batch(step=0, samples=samples, microbatches=((0, 1), (2, 3)))
    layers, stage = profile_layers(
        graph,
        [batch],
        lambda items, records, names: {},
        device=torch.device("cpu"),
        dtype=torch.float32,
        barrier=lambda: None,
        seconds_per_variant=0.01,
    )
    profile = Profile(layers=layers, stage=stage)
    costs = TableCosts(merge([profile], fingerprint="f", source="a profile", dtype="float32"), graph)
    chunk = chunk_of("only", 0, 2)
    cost = costs.stage(chunk, items[:2], [()] * 2)
    assert cost.weight_bytes == 0
    assert cost.weight_ns < cost.input_ns / 4
    assert [set(known) for known in costs.strategies(chunk, items[:2], [()] * 2)][:2] == [{"keep"}] * 2


def test_offloading_costs_the_way_to_the_host(graph, profile, batches):
    # As a GPU's table has it: all is offloaded at a microsecond and 8 bytes per nanosecond.
    link = [LinkSample(ends=(), num_bytes=size, duration_ns=1000 + size // 8) for size in (1 << 16, 1 << 24)]
    layers = {}
    for name, layer in profile.layers.items():
        nothing = (0,) * len(layer.sizes)
        offload = {"offload": StrategyProfile(extra_ns=nothing, saved_bytes=nothing)}
        layers[name] = replace(layer, strategies=layer.strategies | offload)
    profile = Profile(layers=layers, stage=profile.stage, host=tuple(link))
    costs = TableCosts(merge([profile], fingerprint="f", source="a profile", dtype="float32"), graph)
    chunk = chunk_of("language", 1, 2)
    items, links = draw_part(batches, "language", 1)
    (known,) = costs.strategies(chunk, items, links)
    kept = known["keep"].saved_bytes
    assert known["offload"].saved_bytes == 0
    assert known["offload"].offload_ns == pytest.approx(1000 + kept / 8, rel=0.02)
    cost = with_strategies(costs.stage(chunk, items, links), ["offload"], [known])
    assert (cost.offloaded_bytes, cost.offload_ns) == (kept, known["offload"].offload_ns)


@pytest.mark.parametrize("ends", ENDS)
def test_offloaded_bytes_are_about_all_that_is_saved(graph, batches, load, costs, ends):
    """What leaves is all that the layers save, and the tensors between them."""
    chunk = chunk_of(*ends)
    items, links = draw_part(batches, chunk.module, 1)
    names = [name for name, _ in graph.by_name[chunk.module].range(chunk.start, chunk.stop)]
    found = run_counted(graph, batches, load, chunk, items, links, strategies=("offload",) * len(names))
    kept = costs.stage(chunk, items, links).saved_bytes
    assert found.saved + found.away == kept
    shared = kept - sum(known["keep"].saved_bytes for known in costs.strategies(chunk, items, links))
    assert found.saved <= shared
