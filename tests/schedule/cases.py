"""Small model graphs, shares and drafts for the tests of the schedule."""

from __future__ import annotations

from torch import nn

from pipeweaver.data.items import Item, Share
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Stage

X = TensorSpec(name="x", width=8)


def module(name, layers=4, *, loads="tokens", reads=(), sends=(), loss=None, trainable=True, carries=(X,)):
    build = nn.Identity
    return Module(
        name=name,
        layers=tuple(
            LayerSpec(kind=f"{name}.block", build=build, carries=carries, trainable=trainable) for _ in range(layers)
        ),
        before=LayerSpec(
            kind=f"{name}.before", build=build, loads=(loads,), reads=reads, carries=carries, trainable=trainable
        ),
        after=LayerSpec(kind=f"{name}.after", build=build, sends=sends, trainable=trainable),
        loss=loss,
    )


def vision_language(layers=4, frozen=False):
    features = TensorSpec(name="features", rows="features", width=8)
    return ModelGraph(
        modules=(
            module("vision", layers, loads="pixels", sends=(features,), trainable=not frozen),
            module("language", layers, reads=("vision",), loss=LossSpec(units="supervised")),
        ),
        flows=(Flow(source="vision", tensor="features", destination="language", name="vision"),),
    )


def share(images_per_document, *, documents_per_microbatch=1, replica=0, num_replicas=1, step=0):
    """Documents with so many images each, packed in order; image k of a document has 4 * (k + 1) tokens."""
    items, links, microbatches, records = [], [], [], {}
    for draw, images in enumerate(images_per_document):
        first = len(items)
        for k in range(images):
            sizes = {"tokens": 4 * (k + 1), "features": k + 1}
            items.append(Item(task="main", draw=draw, module="vision", position=k, sizes=sizes))
        text = {"tokens": 10 + sum(range(1, images + 1)), "supervised": 5}
        items.append(Item(task="main", draw=draw, module="language", position=0, sizes=text))
        links += [(first + k, first + images) for k in range(images)]
        records[f"main/{draw}"] = draw
        if draw % documents_per_microbatch == 0:
            microbatches.append(())
        microbatches[-1] += tuple(range(first, len(items)))
    return Share(
        step=step,
        replica=replica,
        num_replicas=num_replicas,
        items=tuple(items),
        links=tuple(links),
        microbatches=tuple(microbatches),
        records=records,
        normalisers={"main/language": max(1, 5 * len(images_per_document))},
    )


def two_workers(share_, *, layers=4, backward=True, frozen=False):
    """The example of ir.py: vision in two chunks, language in two per worker; images in parts of two."""
    half = layers // 2
    chunks = [Chunk(task="main", module="vision", start=w * half, stop=(w + 1) * half, worker=w) for w in range(2)]
    quarter = max(1, layers // 4)
    chunks += [
        Chunk(task="main", module="language", start=i * quarter, stop=(i + 1) * quarter, worker=i % 2) for i in range(4)
    ]
    placement = Placement(workers=2, chunks=tuple(chunks))
    vision, language = [], []
    for m, microbatch in enumerate(share_.microbatches):
        images = [i for i in microbatch if share_.items[i].module == "vision"]
        vision += [Part(items=tuple(images[i : i + 2]), microbatch=m) for i in range(0, len(images), 2)]
        language.append(Part(items=tuple(i for i in microbatch if share_.items[i].module == "language"), microbatch=m))
    parts = (tuple(vision),) * 2 + (tuple(language),) * 4
    orders = ([], [])
    for m in range(len(share_.microbatches)):
        seen = [p for p, part in enumerate(vision) if part.microbatch == m]
        forward = [(c, p, "F") for c in (0, 1) for p in seen] + [(c, m, "F") for c in (2, 3, 4, 5)]
        back = [(c, m, "B") for c in (5, 4, 3, 2)]
        if not frozen:
            back += [(c, p, "B") for c in (1, 0) for p in seen]
        for chunk, part, phase in forward + (back if backward else []):
            orders[placement.chunks[chunk].worker].append(Stage(chunk, part, phase))
    return Draft(
        placement=placement, parts=parts, order=tuple(map(tuple, orders)), forward_only=not backward, policy="test"
    )
