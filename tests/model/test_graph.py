"""Graphs that cannot be are told apart, each in its own words."""

import pytest
from torch import nn

from pipeweaver.model.graph import Flow, LayerSpec, ModelGraph, Module, TensorSpec, topological


def layer(loads=(), reads=(), sends=(), carries=("x",)):
    return LayerSpec(
        kind="plain",
        build=nn.Identity,
        loads=loads,
        reads=reads,
        carries=tuple(TensorSpec(name=name, width=4) for name in carries),
        sends=tuple(TensorSpec(name=name, width=4) for name in sends),
    )


def module(name, *layers, **ends):
    return Module(name=name, layers=layers or (layer(), layer()), **ends)


def flow(source, destination, tensor="out", name="seen"):
    return Flow(source=source, tensor=tensor, destination=destination, name=name)


SENDS = dict(after=layer(sends=("out",), carries=()))
READS = dict(before=layer(reads=("seen",)))

BROKEN = {
    "module a is defined 2 times": ([module("a"), module("a")], []),
    "module a has no layers": ([Module(name="a", layers=())], []),
    "there is no module c; there are a, b": ([module("a", **SENDS), module("b", **READS)], [flow("a", "c")]),
    "a.missing -> b: no layer of a sends it": (
        [module("a", **SENDS), module("b", **READS)],
        [flow("a", "b", tensor="missing")],
    ),
    "no layer of b reads other": ([module("a", **SENDS), module("b")], [flow("a", "b", name="other")]),
    "two flows bring seen to c": (
        [module("a", **SENDS), module("b", **SENDS), module("c", **READS)],
        [flow("a", "c"), flow("b", "c")],
    ),
    "layer -1 of b reads seen, but no flow brings it": ([module("a"), module("b", **READS)], []),
    "layer 0 reads seen, which layer 2 sends only later": (
        [module("a", layer(reads=("seen",)), layer(), **SENDS)],
        [flow("a", "a")],
    ),
    "layers 0 and 1 of a both send out": ([module("a", layer(sends=("out",)), layer(sends=("out",)))], []),
    "layer 1 of a sends x, which layers of a also carry": (
        [module("a", layer(), layer(sends=("x",), carries=()))],
        [],
    ),
    "the flows form a cycle": (
        [module("a", **SENDS, **READS), module("b", **SENDS, **READS)],
        [flow("a", "b"), flow("b", "a")],
    ),
    "its name x is also that of a tensor that layers of b carry": (
        [module("a", **SENDS), module("b", before=layer(reads=("x",)))],
        [flow("a", "b", name="x")],
    ),
}


@pytest.mark.parametrize(("message", "parts"), BROKEN.items(), ids=BROKEN)
def test_graphs_that_cannot_be(message, parts):
    with pytest.raises(ValueError, match=message):
        ModelGraph(modules=tuple(parts[0]), flows=tuple(parts[1]))


def test_topological_order_keeps_the_declared_one_where_it_can():
    modules = (module("c", **READS), module("z"), module("a", **SENDS))
    assert topological(ModelGraph(modules=modules, flows=(flow("a", "c"),))) == ("z", "a", "c")


def test_a_chunk_has_the_ends_that_belong_to_it():
    one = module("m", before=layer(), after=layer())
    names = [[name for name, _ in one.range(start, stop)] for start, stop in ((0, 1), (1, 2), (0, 2))]
    assert names == [
        ["m.before", "m.layers.0"],
        ["m.layers.1", "m.after"],
        ["m.before", "m.layers.0", "m.layers.1", "m.after"],
    ]


def test_a_flow_knows_who_sends_it():
    graph = ModelGraph(modules=(module("a", **SENDS), module("b", **READS)), flows=(flow("a", "b"),))
    position, spec = graph.sent(graph.flows[0])
    assert (position, spec.name) == (2, "out")
