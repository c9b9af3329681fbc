"""MetaGraphs of model graphs, cuts of items, clusters as costs show them, passes."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from msgspec.structs import replace

from pipeweaver.costs import FlatCosts
from pipeweaver.wavefront.bind import bind, cluster_of, step_bound_ns, useful_counts
from pipeweaver.wavefront.bound import area_bound_ns
from pipeweaver.wavefront.cuts import even_cuts, largest_run
from pipeweaver.wavefront.metagraph import Links
from pipeweaver.wavefront.passes import split_passes
from tests.wavefront.jobs import costs_of, graph_of, share_of


def test_cuts_of_the_example():
    assert even_cuts([4, 1, 1, 2], 2) == (0, 1, 4)
    assert even_cuts([5] * 5, 3) == (0, 2, 4, 5)
    assert even_cuts([5, 5], 4) == (0, 1, 2, 2, 2)
    assert largest_run([4, 1, 1, 2], (0, 1, 4)) == 0


@pytest.mark.parametrize("seed", range(30))
def test_cuts_have_the_smallest_largest_run(seed):
    draw = random.Random(seed)
    costs = [draw.randint(1, 20) for _ in range(draw.randint(1, 9))]
    runs = draw.randint(1, 5)
    cuts = even_cuts(costs, runs)
    assert len(cuts) == runs + 1 and cuts[0] == 0 and cuts[-1] == len(costs)
    assert all(a <= b for a, b in pairwise(cuts))
    if len(costs) >= runs:
        assert all(a < b for a, b in pairwise(cuts))
        best = min(
            max(sum(costs[a:b]) for a, b in pairwise((0, *chosen, len(costs))))
            for chosen in combinations(range(1, len(costs)), runs - 1)
        )
        assert max(sum(costs[a:b]) for a, b in pairwise(cuts)) == best


def test_useful_counts_leave_fewer_items_each_time():
    assert useful_counts(8, 16) == [1, 2, 3, 4, 8]
    assert useful_counts(5, 3) == [1, 2, 3]
    assert useful_counts(1, 9) == [1]


def test_metaops_of_four_tasks():
    graph = graph_of()
    share = share_of(graph, {"caption": 4, "text": 3, "paint": 2, "matching": 2}, uneven=False)
    bound = bind(graph, share, costs_of(graph), 4)
    assert [op.name for op in bound.ops] == [
        "caption/vision[0:4]", "caption/language[0:8]", "text/language[0:8]", "paint/language[0:8]",
        "paint/diffusion[0:4]", "matching/vision[0:4]", "matching/text[0:4]", "matching/match[0:1]",
    ]  # fmt: skip
    names = [op.name.split("[")[0] for op in bound.ops]
    assert {(names[f.source], names[f.destination]) for f in bound.flows} == {
        ("caption/vision", "caption/language"),
        ("paint/language", "paint/diffusion"),
        ("matching/vision", "matching/match"),
        ("matching/text", "matching/match"),
    }
    vision, match = bound.ops[0], bound.ops[-1]
    assert vision.counts == (1, 2, 4)
    assert vision.layer_ns == tuple(3 * 2_000 * 24 * items for items in (4, 2, 1))
    assert match.counts == (1,)
    assert (vision.module, vision.first_layer, vision.carried_bytes) == ("vision", 0, 4 * 24 * 8 * 4)


def test_a_frozen_module_has_no_backward():
    graph = graph_of(frozen=True)
    share = share_of(graph, {"caption": 2}, uneven=False)
    assert bind(graph, share, costs_of(graph), 2).ops[0].layer_ns == (2_000 * 48, 2_000 * 24)


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_of_a_step_is_below_that_of_its_metagraph(seed):
    graph, draw = graph_of(), random.Random(seed)
    share = share_of(graph, {task: draw.randint(1, 9) for task in ("caption", "text", "paint")}, seed=seed)
    costs = costs_of(graph)
    for workers in (1, 3, 8):
        bound = step_bound_ns(graph, share, costs, workers)
        assert 0 < bound <= area_bound_ns(bind(graph, share, costs, workers), workers)
    even = share_of(graph, {"caption": 8, "text": 4}, uneven=False)
    assert step_bound_ns(graph, even, costs, 1) == area_bound_ns(bind(graph, even, costs, 1), 1)


def test_items_that_are_paired_take_what_they_take_on_average():
    graph = graph_of()
    costs = costs_of(graph)
    unit = 3 * 24 * 1_000  # forward and backward of a layer of language on one item
    # Five items on three workers are 2, 2 and 1: on average 9/5 of a unit per layer, while workers are busy for 5/3.
    texts = share_of(graph, {"text": 5}, uneven=False)
    assert step_bound_ns(graph, texts, costs, 3) == pytest.approx(8 * unit * 9 / 5, rel=1e-6)
    # The same behind four layers of images, of two units each.
    captions = share_of(graph, {"caption": 5}, uneven=False)
    assert step_bound_ns(graph, captions, costs, 3) == pytest.approx((8 + 4 * 2) * unit * 9 / 5, rel=1e-6)
    # With a link missing nobody knows which items share a path: workers' time is all that counts.
    fewer = replace(captions, links=captions.links[1:])
    assert step_bound_ns(graph, fewer, costs, 3) == pytest.approx((8 + 4 * 2) * unit * 5 / 3, rel=1e-6)


def test_an_empty_share_is_said():
    graph = graph_of()
    with pytest.raises(ValueError, match="the batch has no items"):
        bind(graph, share_of(graph, {}), costs_of(graph), 2)


def test_links_and_islands_are_told_from_transfer_times():
    class Islands(FlatCosts):
        def transfer_ns(self, sender, receiver, num_bytes):
            near = sender // 4 == receiver // 4
            return 0 if sender == receiver else (1_000 if near else 5_000) + num_bytes * 1_000 // (400 if near else 50)

    cluster = cluster_of(Islands(layers={}), 8)
    assert (cluster.island, cluster.workers) == (4, 8)
    assert cluster.inside == Links(latency_ns=1_000, bytes_per_us=400)
    assert cluster.across == Links(latency_ns=5_000, bytes_per_us=50)
    assert cluster_of(Islands(layers={}), 3).island == 3
    assert cluster_of(Islands(layers={}), 1).island == 1


@pytest.mark.parametrize("passes", [1, 2, 3, 7])
def test_passes_share_out_every_sample_once(passes):
    graph = graph_of()
    share = share_of(graph, {"caption": 5, "text": 4, "matching": 3, "paint": 1})
    parts = split_passes(graph, share, passes)
    assert len(parts) <= passes
    names = [item.name for part in parts for item in part.items]
    assert sorted(names) == sorted(item.name for item in share.items)
    assert sum(len(part.links) for part in parts) == len(share.links)
    assert sum(any(item.task == "matching" for item in part.items) for part in parts) == 1
