"""Small multi-task jobs: three tasks over shared modules, and one with a joint loss; shares of any size."""

from __future__ import annotations

import random

from torch import nn

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Item, Share
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, TensorSpec

X = TensorSpec(name="x", width=8)
FEATURES = TensorSpec(name="features", rows="features", width=8)
HIDDEN = TensorSpec(name="hidden", width=8)


def module(name, layers, *, loads="tokens", reads=(), sends=(), loss=None, trainable=True, middle_reads=()):
    def spec(where, **more):
        return LayerSpec(kind=f"{name}.{where}", build=nn.Identity, trainable=trainable, **more)

    return Module(
        name=name,
        before=spec("before", loads=(loads,), reads=reads, carries=(X,)),
        layers=(spec("block", carries=(X,), reads=middle_reads),) * layers,
        after=spec("after", sends=sends),
        loss=loss,
    )


def graph_of(layers=4, *, frozen=False):
    """vision -> language -> diffusion (read by every block); match, with a joint loss, reads vision and text."""
    return ModelGraph(
        modules=(
            module("vision", layers, loads="pixels", sends=(FEATURES,), trainable=not frozen),
            module("text", layers, sends=(FEATURES,)),
            module("language", 2 * layers, reads=("vision",), sends=(HIDDEN,), loss=LossSpec(units="supervised")),
            module("diffusion", layers, loads="latents", middle_reads=("condition",), loss=LossSpec(units="elements")),
            module("match", 1, reads=("picture", "words"), loss=LossSpec(units="pairs", joint=True)),
        ),
        flows=(
            Flow(source="vision", tensor="features", destination="language", name="vision"),
            Flow(source="language", tensor="hidden", destination="diffusion", name="condition"),
            Flow(source="vision", tensor="features", destination="match", name="picture"),
            Flow(source="text", tensor="features", destination="match", name="words"),
        ),
    )


TASKS = {
    "caption": (("vision", "language"), (("vision", "language"),)),
    "text": (("language",), ()),
    "paint": (("language", "diffusion"), (("language", "diffusion"),)),
    "matching": (("vision", "text", "match"), (("vision", "match"), ("text", "match"))),
}
UNITS = {"language": "supervised", "diffusion": "elements", "match": "pairs"}


def share_of(graph, batches, *, seed=0, uneven=True, step=0):
    """A share with so many samples of each task; tokens are drawn, or all equal."""
    draw = random.Random(seed)
    items, links, records = [], [], {}
    normalisers = {f"{task}/{m.name}": 1 for task in batches for m in graph.modules if m.loss}
    for task, count in batches.items():
        modules, flows = TASKS[task]
        for number in range(count):
            at = {name: len(items) + i for i, name in enumerate(modules)}
            for name in modules:
                sizes = {"tokens": draw.randint(8, 40) if uneven else 24, "features": 2}
                if name == "match":
                    sizes["tokens"] = 4
                if name in UNITS:
                    sizes[UNITS[name]] = 3
                    normalisers[f"{task}/{name}"] += 3
                items.append(Item(task=task, draw=number, module=name, position=0, sizes=sizes))
            links += [(at[source], at[destination]) for source, destination in flows]
            records[f"{task}/{number}"] = number
    return Share(
        step=step,
        replica=0,
        num_replicas=1,
        items=tuple(items),
        links=tuple(links),
        microbatches=(tuple(range(len(items))),),
        records=records,
        normalisers=normalisers,
    )


def costs_of(graph, **more):
    """Flat costs with time and parameters small enough that side by side beats one after another."""
    rows = {"vision": 2_000, "text": 700, "language": 1_000, "diffusion": 1_500, "match": 500}
    given = {"layer_bytes": 1 << 12, "latency_ns": 100, "bytes_per_us": 100_000} | more
    return FlatCosts(layers={m.name: len(m.layers) for m in graph.modules}, row_ns=rows, **given)
