"""A small vision-language model, parts of its data, and chunks run with their bytes counted."""

import random
from dataclasses import dataclass

import torch

from pipeweaver.data.items import linked
from pipeweaver.measure.parts import records_of
from pipeweaver.model.build import build_graph, materialise
from pipeweaver.model.graph import Flow
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.part import PartView
from pipeweaver.model.vit import VitConfig
from pipeweaver.runtime.stage import build_chunk, run_backward, run_forward
from pipeweaver.schedule.ir import Chunk
from tests.live import LiveBytes

ENDS = [("vision", 0, 2), ("vision", 1, 3), ("language", 0, 3), ("language", 1, 2)]

FLOWS = (Flow(source="vision", tensor="features", destination="language", name="vision"),)


def make_graph(*, layers: int = 3, trainable: bool | str = True, hidden: int = 32):
    return build_graph(
        {
            "vision": VitConfig(
                layers=layers, hidden=32, heads=2, patch=4, merge=2, channels=1, output=hidden, trainable=trainable
            ),
            "language": LanguageConfig(
                layers=layers, hidden=hidden, heads=2, vocab=259, placeholders={"vision": 258}, answers=True
            ),
        },
        FLOWS,
    )


def chunk_of(module, start, stop):
    return Chunk(task="main", module=module, start=start, stop=stop, worker=0)


def draw_part(batches, module, seed):
    draw = random.Random(seed)
    batch = draw.choice(batches)
    samples = draw.sample(range(len(batch.samples)), 3)
    found = []
    for sample in (batch.samples[i] for i in samples):
        found += [
            pair
            for pair in zip(sample.items, linked(sample.items, sample.links), strict=True)
            if pair[0].module == module
        ]
    return [item for item, _ in found], [sources for _, sources in found]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes of a chunk that ran on a part, as they are named in costs."""

    saved: int
    loaded: int
    forward_workspace: int
    backward_workspace: int
    away: int = 0
    weight: int = 0


def run_counted(graph, batches, load, chunk, items, links, *, strategies=(), split=False) -> Counted:
    built = build_chunk(graph, chunk, materialise(graph, [chunk], seed=0))
    for layer in built.layers:
        for parameter in layer.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    loaded = load(items, records_of(batches), built.loads)
    inputs = {}
    for name, spec in built.inputs.items():
        sources = items if name == "x" else [source for found in links for source in found]
        inputs[name] = torch.randn(sum(source.sizes[spec.rows] for source in sources), spec.width)
    last = chunk.stop == len(graph.by_name[chunk.module].layers)
    outputs = {"x"} if not last else {"features"} if chunk.module == "vision" else set()

    def view():
        device, dtype = torch.device("cpu"), torch.float32
        return PartView(items=items, links=links, loaded=dict(loaded), step=0, seed=0, device=device, dtype=dtype)

    with LiveBytes() as live:
        state = run_forward(
            built,
            inputs,
            view(),
            outputs=outputs,
            grad=True,
            needs_grad=set(inputs),
            strategies=strategies,
            split=split,
        )
        held, peak = live.now, live.peak
        away = state.offloaded.num_bytes if state.offloaded else 0
        saved = held - live.bytes_of(state.outputs.values()) - away
    gradients = {name: torch.ones_like(tensor) for name, tensor in state.outputs.items()}
    live.reset_peak()
    with live:
        returned = run_backward(state, gradients)
        backward_workspace = live.peak - held - live.bytes_of(returned.values())
    weight = state.later.num_bytes if state.later else 0
    return Counted(
        saved=saved,
        loaded=sum(t.numel() * t.element_size() for t in loaded.values()),
        forward_workspace=peak - held,
        backward_workspace=backward_workspace,
        away=away,
        weight=weight,
    )
