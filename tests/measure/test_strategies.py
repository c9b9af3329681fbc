"""Memory strategies and split backwards, as calibrated: bytes as the runtime has them, times that add up."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from pipeweaver.costs import with_strategies
from tests.measure.cases import ENDS, chunk_of, draw_part, run_counted

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


def test_corrected_costs_scale_the_times_of_a_module_on_a_worker_and_nothing_else(batches, costs):
    corrected = costs.corrected({"language/0": 2.0})
    items, links = draw_part(batches, "language", 1)
    chunk = chunk_of("language", 0, 3)
    plain, changed = costs.stage(chunk, items, links), corrected.stage(chunk, items, links)
    for name in ("forward_ns", "backward_ns", "input_ns", "weight_ns"):
        assert getattr(changed, name) == 2 * getattr(plain, name)
    assert changed.saved_bytes == plain.saved_bytes and changed.load_ns == plain.load_ns
    once, twice = costs.strategies(chunk, items, links), corrected.strategies(chunk, items, links)
    for a, b in zip(once, twice, strict=True):
        for name in a:
            assert a[name].saved_bytes == b[name].saved_bytes
            assert b[name].extra_ns == pytest.approx(2 * a[name].extra_ns, abs=1)
    elsewhere = replace(chunk, worker=1)
    assert corrected.stage(elsewhere, items, links) == plain
    assert corrected.source == f"{costs.source}, corrected: language/0 by 2"
    assert costs.corrected({}).source == costs.source
