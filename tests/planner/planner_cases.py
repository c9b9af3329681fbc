"""Model graphs, batches and costs that the tests of planner and policies draw from."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import nn

from pipeweaver.costs import FlatCosts
from pipeweaver.data.items import Batch, Item, Sample, Share
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.planner.assign import share_out

X = TensorSpec(name="x", width=8)
FEATURES = TensorSpec(name="features", rows="features", width=8)
SUPERVISED = LossSpec(units="supervised")

GRAPHS = ("one", "encoder", "two encoders", "decoder", "three", "frozen", "skip")


def module(
    name: str,
    layers: int,
    *,
    reads: tuple[str, ...] = (),
    sends: tuple[TensorSpec, ...] = (),
    loss: LossSpec | None = None,
    trainable: bool = True,
    skip: bool = False,
) -> Module:
    """`skip`: the first layer sends a tensor that the last one reads."""

    def layer(i: int) -> LayerSpec:
        return LayerSpec(
            kind=f"{name}.block",
            build=nn.Identity,
            carries=(X,),
            sends=(TensorSpec(name="shortcut", width=4),) if skip and i == 0 else (),
            reads=("shortcut",) if skip and i == layers - 1 else (),
            trainable=trainable,
        )

    return Module(
        name=name,
        layers=tuple(layer(i) for i in range(layers)),
        before=LayerSpec(
            kind=f"{name}.before", build=nn.Identity, loads=("tokens",), reads=reads, carries=(X,), trainable=trainable
        ),
        after=LayerSpec(kind=f"{name}.after", build=nn.Identity, sends=sends, trainable=trainable),
        loss=loss,
    )


def graph_of(name: str, layers: Sequence[int] = (4, 4, 4)) -> ModelGraph:
    """One of `GRAPHS`; `layers` by module, in the order of the modules."""

    def flow(source: str, destination: str) -> Flow:
        return Flow(source=source, tensor="features", destination=destination, name=source)

    sends = (FEATURES,)
    match name:
        case "one":
            return ModelGraph(modules=(module("language", layers[0], loss=SUPERVISED),))
        case "encoder" | "frozen" | "skip":
            skip = name == "skip" and layers[0] > 1
            shortcut = Flow(source="vision", tensor="shortcut", destination="vision", name="shortcut")
            return ModelGraph(
                modules=(
                    module("vision", layers[0], sends=sends, trainable=name != "frozen", skip=skip),
                    module("language", layers[1], reads=("vision",), loss=SUPERVISED),
                ),
                flows=(flow("vision", "language"), *((shortcut,) if skip else ())),
            )
        case "two encoders":
            return ModelGraph(
                modules=(
                    module("vision", layers[0], sends=sends),
                    module("audio", layers[1], sends=sends),
                    module("language", layers[2], reads=("vision", "audio"), loss=SUPERVISED),
                ),
                flows=(flow("vision", "language"), flow("audio", "language")),
            )
        case "decoder":
            return ModelGraph(
                modules=(
                    module("language", layers[0], sends=sends),
                    module("diffusion", layers[1], reads=("language",), loss=SUPERVISED),
                ),
                flows=(flow("language", "diffusion"),),
            )
        case "three":
            return ModelGraph(
                modules=(
                    module("vision", layers[0], sends=sends),
                    module("language", layers[1], reads=("vision",), sends=sends),
                    module("diffusion", layers[2], reads=("language",), loss=SUPERVISED),
                ),
                flows=(flow("vision", "language"), flow("language", "diffusion")),
            )
    raise AssertionError(name)


def batch_of(graph: ModelGraph, counts: Sequence[int], *, seed: int = 0, per_microbatch: int = 1) -> Batch:
    """One sample per entry, with so many items of each encoder (or clips of a decoder) and one text."""
    draw = random.Random(seed)
    several = [m.name for m in graph.modules if m.name != "language"]
    samples = []
    for number, count in enumerate(counts):
        items: list[Item] = []
        at: dict[str, list[int]] = {}
        for name in [*several, "language"]:
            for position in range(count if name != "language" else 1):
                tokens = draw.choice((4, 8, 16)) if name != "language" else draw.randint(20, 60)
                sizes = {"tokens": tokens, "features": tokens // 4, "supervised": draw.randint(0, 5)}
                at.setdefault(name, []).append(len(items))
                items.append(Item(task="main", draw=number, module=name, position=position, sizes=sizes))
        links = tuple(
            (source, destination)
            for flow in graph.flows
            if flow.source != flow.destination
            for destination in at.get(flow.destination, ())
            for source in at.get(flow.source, ())
        )
        samples.append(Sample(task="main", draw=number, record=number, items=tuple(items), links=links))
    microbatches = tuple(
        tuple(range(i, min(i + per_microbatch, len(samples)))) for i in range(0, len(samples), per_microbatch)
    )
    return Batch(step=0, samples=tuple(samples), microbatches=microbatches)


def share_of(graph: ModelGraph, counts: Sequence[int], *, seed: int = 0, per_microbatch: int = 1) -> Share:
    return share_out(graph, batch_of(graph, counts, seed=seed, per_microbatch=per_microbatch), 1)[0]


def flat_costs(graph: ModelGraph, **settings: object) -> FlatCosts:
    return FlatCosts(layers={m.name: len(m.layers) for m in graph.modules}, **settings)  # type: ignore[arg-type]
