"""The worked examples of the paper's method come out as written (spindle.md, sections 1, 3 and 4)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeweaver.wavefront.allocate import Allotment, count_for, relaxed, two_counts
from pipeweaver.wavefront.contract import Layer, contract, sharing
from pipeweaver.wavefront.metagraph import DataFlow, MetaGraph
from pipeweaver.wavefront.waves import Rules, make_waves
from tests.wavefront.graphs import meta_op


def test_contraction_of_two_tasks_that_share_text_vision_and_language():
    runs = {
        "M1": ("ABC", "audio", (8, 229, 768)),
        "M2": ("DE", "text", (8, 77, 768)),
        "M3": ("FGH", "language", (8, 512, 1024)),
        "M4": ("IJ", "text", (4, 77, 768)),
        "M5": ("KL", "vision", (4, 257, 768)),
        "M6": ("MN", "vision", (4, 197, 768)),
        "M7": ("OPQ", "language", (4, 512, 1024)),
    }
    layers = [
        Layer(name=letter, kind=kind, size=size, parameters=f"{kind}.{depth}")
        for letters, kind, size in runs.values()
        for depth, letter in enumerate(letters)
    ]
    at = {layer.name: i for i, layer in enumerate(layers)}
    flows = [(at[a], at[b]) for letters, _, _ in runs.values() for a, b in pairwise(letters)]
    flows += [(at[a], at[b]) for a, b in ("CF", "EF", "JO", "LO", "NO")]
    found = contract(layers, flows)
    assert ["".join(layers[i].name for i in run) for run in found.members] == [
        letters for letters, _, _ in runs.values()
    ]
    names = list(runs)
    assert [{names[m] for m, level in enumerate(found.level) if level == depth} for depth in (0, 1)] == [
        {"M1", "M2", "M4", "M5", "M6"},
        {"M3", "M7"},
    ]
    shared = {frozenset(names[m] for m in group) for group in sharing(layers, found.members)}
    assert shared == {frozenset({"M2", "M4"}), frozenset({"M5", "M6"}), frozenset({"M3", "M7"})}


def test_what_keeps_layers_apart():
    def runs(kinds, flows, sizes=None):
        layers = [Layer(name=str(i), kind=k, size=(sizes or [1] * len(kinds))[i : i + 1]) for i, k in enumerate(kinds)]
        return contract(layers, flows).members

    chain = [(0, 1), (1, 2)]
    assert runs("aaa", chain) == ((0, 1, 2),)
    assert runs("aab", chain) == ((0, 1), (2,))
    assert runs("aaa", chain, (8, 8, 4)) == ((0, 1), (2,))
    assert runs("aaa", [(0, 1), (0, 2)]) == ((0,), (1,), (2,))  # two successors
    assert runs("aaa", [(0, 2), (1, 2)]) == ((0,), (1,), (2,))  # two predecessors
    assert runs("aaa", [*chain, (0, 2)]) == ((0, 1, 2),)  # a skip that the chain implies
    assert runs("caaa", [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)]) == ((0,), (1, 2, 3))  # all layers read the condition


def test_level_is_the_longest_path():
    # Breadth first, c would be on the level of b, on which it depends.
    ops = tuple(meta_op(name, 1, {1: 10}) for name in "abc")
    graph = MetaGraph(ops=ops, flows=(DataFlow(0, 1), DataFlow(1, 2), DataFlow(0, 2)))
    assert graph.level == (0, 1, 2)


def test_rounding_at_four_workers():
    ops = [
        meta_op("M1", 8, {1: 22_000, 2: 12_000}),
        meta_op("M2", 12, {1: 11_830, 2: 6_830}),
        meta_op("M3", 6, {1: 10_000}),
    ]
    assert [count_for(op, 100_000, 4) for op in ops] == pytest.approx((1.9, 1.5, 0.6), abs=0.08)
    makespan, counts = relaxed(ops, 4)
    assert makespan == pytest.approx(100_000, rel=0.02)
    assert sum(counts) == pytest.approx(4)
    shares = [two_counts(op, number, 100_000, 4) for number, op in enumerate(ops)]
    assert shares == [[Allotment(0, 2, 8)], [Allotment(1, 2, 8), Allotment(1, 1, 4)], [Allotment(2, 1, 6)]]


def test_waves_at_eight_workers():
    times = {
        "M1": {4: 10_100, 8: 5_500},
        "M2": {1: 9_000, 2: 5_000},
        "M3": {1: 1},
        "M4": {1: 6_600, 2: 4_000},
        "M5": {1: 10_000},
        "M6": {1: 2_800},
    }
    layers = {"M1": 11, "M2": 16, "M3": 1, "M4": 16, "M5": 6, "M6": 6}
    ops = [meta_op(name, layers[name], times[name]) for name in times]
    shares = [
        Allotment(op, count, num_layers)
        for op, tuples in {
            0: [(8, 2), (4, 9)],
            1: [(2, 14), (1, 2)],
            3: [(2, 3), (1, 13)],
            4: [(1, 6)],
            5: [(1, 6)],
        }.items()
        for count, num_layers in tuples
    ]
    waves = make_waves(ops, shares, 8, Rules())
    assert [set(wave) for wave in waves] == [
        {(0, 8, 2)},
        {(0, 4, 1), (1, 2, 2), (3, 2, 3)},
        {(0, 4, 6), (1, 2, 12), (3, 1, 9), (4, 1, 6)},
        {(0, 4, 2), (1, 1, 2), (3, 2, 4), (5, 1, 6)},
    ]
