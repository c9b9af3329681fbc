"""Jobs shaped like those that Spindle is measured on (arXiv 2409.03365, section 5), fixed before any tuning.

    graph, tasks = JOBS["CLIP-4"]        model graph; per task the modules of its samples and its batch
    share = batch_of("CLIP-4", scale=0.5)

The paper publishes parameters, modalities and numbers of tasks, but neither batches nor layers. Layers and widths here
are those of the models that it names: ImageBind's towers for Multitask-CLIP (1.2 B), an encoder and a decoder of OFA's
size behind light adaptors for OFASys (0.66 B), ViT-bigG, a Whisper encoder and a 7B language model for QWen-VAL (9.25 B).
Batches are chosen so that tasks differ by up to 8x, that one task after another takes a good part of the paper's step
time on the fewest devices, and that activations fit there at scale 1. All samples of a task have equal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeweaver.data.items import Item, Share
from pipeweaver.model.build import ModuleConfig, build_graph
from pipeweaver.model.diffusion import DiffusionConfig, diffusion
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, Reading, TensorSpec
from pipeweaver.model.language import LanguageConfig, language
from pipeweaver.model.layers import Linear
from pipeweaver.model.part import PartView
from pipeweaver.model.vit import VitConfig, vit

EMBEDDING = 1024
"""Width in which the towers of Multitask-CLIP are compared."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a sample of a task consists of: sizes of the item of each module; rows flow along `links` between them."""

    batch: int
    items: Mapping[str, Mapping[str, int]]
    links: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its tasks, and how many devices make up a worker. `devices` are those that the paper measures it on."""

    graph: ModelGraph
    tasks: Mapping[str, Task]
    tensor_parallel: int
    devices: tuple[int, ...]
    pixels: int
    """Columns of what encoders load."""


def share_of(job: Job, scale: float = 1.0) -> Share:
    """The batch of a step, all tasks, with every task's batch times `scale`."""
    items: list[Item] = []
    links: list[tuple[int, int]] = []
    records: dict[str, int] = {}
    for name, task in job.tasks.items():
        for draw in range(max(1, round(task.batch * scale))):
            at = {module: len(items) + i for i, module in enumerate(task.items)}
            items += [
                Item(task=name, draw=draw, module=module, position=0, sizes=dict(sizes))
                for module, sizes in task.items.items()
            ]
            links += [(at[source], at[destination]) for source, destination in task.links]
            records[f"{name}/{draw}"] = draw
    losses = [module for module in job.graph.modules if module.loss is not None]
    normalisers = {
        f"{name}/{module.name}": max(
            1, sum(i.sizes[module.loss.units] for i in items if (i.task, i.module) == (name, module.name))
        )
        for name in job.tasks
        for module in losses
        if module.loss is not None
    }
    everything = tuple(range(len(items)))
    return Share(
        step=0,
        replica=0,
        num_replicas=1,
        items=tuple(items),
        links=tuple(links),
        microbatches=(everything,),
        records=records,
        normalisers=normalisers,
    )


# Multitask-CLIP: two towers of ImageBind and a contrastive loss per task.

TOWERS = {
    # layers, hidden, heads, tokens per item
    "vision": (32, 1280, 16, 257),
    "text": (24, 1024, 16, 77),
    "audio": (12, 768, 12, 229),
    "depth": (12, 384, 6, 197),
    "thermal": (12, 768, 12, 197),
    "motion": (6, 512, 8, 251),
}

PAIRS = (
    ("vision", "text", 256),
    ("audio", "text", 128),
    ("vision", "audio", 128),
    ("vision", "depth", 96),
    ("depth", "text", 64),
    ("thermal", "text", 64),
    ("motion", "text", 128),
    ("vision", "thermal", 64),
    ("audio", "thermal", 32),
    ("vision", "motion", 32),
)
"""Towers and batch of each task; a job of n tasks takes the first n."""


class Pool(nn.Module):
    """x [tokens, hidden] -> features [items, width]: the first row of each item, normed and projected."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.project = Linear(hidden, width, bias=False)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        def firsts() -> Tensor:
            sizes = torch.tensor([0, *part.sizes()[:-1]])
            return sizes.cumsum(0).to(part.device)

        rows = state["x"].index_select(0, part.once("firsts", firsts))
        return {"features": self.project(self.norm(rows))}


class Contrast(nn.Module):
    """Features of both towers, [pairs, width] each -> the symmetric cross-entropy of their similarities."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        rows = F.normalize(torch.cat([state[name] for name in self.names]).float(), dim=-1)
        one, other = rows[: len(part.items)], rows[-len(part.items) :]
        logits = self.scale.float().exp() * one @ other.T
        wanted = torch.arange(len(part.items), device=logits.device)
        both = F.cross_entropy(logits, wanted, reduction="sum") + F.cross_entropy(logits.T, wanted, reduction="sum")
        return {"loss": both}


def clip(num_tasks: int) -> Job:
    """Multitask-CLIP with the first tasks of PAIRS, and the towers that they use."""
    pairs = PAIRS[:num_tasks]
    used = [name for name in TOWERS if any(name in pair[:2] for pair in pairs)]
    contrast = Module(
        name="contrast",
        layers=(LayerSpec(kind="contrast", build=lambda: Contrast(tuple(used)), reads=tuple(used)),),
        loss=LossSpec(units="pairs", joint=True),
    )
    graph = ModelGraph(
        modules=(*(_tower(name) for name in used), contrast),
        flows=tuple(Flow(source=name, tensor="features", destination="contrast", name=name) for name in used),
    )
    tasks = {
        f"{one}-{other}": Task(
            batch=batch,
            items={
                one: _image(TOWERS[one][3], 1),
                other: _image(TOWERS[other][3], 1),
                "contrast": {"tokens": 1, "pairs": 1},
            },
            links=((one, "contrast"), (other, "contrast")),
        )
        for one, other, batch in pairs
    }
    return Job(graph=graph, tasks=tasks, tensor_parallel=1, devices=(8, 16, 32), pixels=588)


def _tower(name: str) -> Module:
    layers, hidden, heads, _ = TOWERS[name]
    module = vit(
        name, VitConfig(layers=layers, hidden=hidden, heads=heads, patch=14, positions="learned", output=EMBEDDING)
    )
    after = LayerSpec(
        kind=f"pool {hidden}",
        build=lambda: Pool(hidden, EMBEDDING),
        sends=(TensorSpec(name="features", rows="features", width=EMBEDDING),),
    )
    return replace(module, after=after)


# OFASys: adaptors -> encoder -> decoder, one token loss.

OFA_HIDDEN = 1024
OFA_VOCABULARY = 60_000
ADAPTORS = {
    # layers, hidden, heads, tokens per item, features handed to the encoder
    "image": (12, 768, 12, 576, 144),
    "sound": (6, 768, 12, 400, 100),
    "video": (12, 768, 12, 1568, 392),
    "gesture": (4, 512, 8, 256, 64),
    "structure": (2, 512, 8, 256, 64),
}
OFA_TASKS = (
    # name, adaptor or none, text into the encoder, text out of the decoder, batch
    ("caption", "image", 32, 32, 256),
    ("speech", "sound", 32, 64, 192),
    ("grounding", "image", 64, 16, 128),
    ("summary", None, 512, 64, 96),
    ("video-caption", "video", 32, 64, 48),
    ("gesture-text", "gesture", 32, 64, 128),
    ("table-text", "structure", 128, 64, 96),
)


def ofasys(num_tasks: int) -> Job:
    """OFASys with the first tasks of OFA_TASKS, and the adaptors that they use."""
    chosen = OFA_TASKS[:num_tasks]
    used = [name for name in ADAPTORS if any(task[1] == name for task in chosen)]
    configs: dict[str, ModuleConfig] = {
        name: VitConfig(
            layers=ADAPTORS[name][0], hidden=ADAPTORS[name][1], heads=ADAPTORS[name][2], patch=14, merge=2,
            positions="learned", output=OFA_HIDDEN,
        )
        for name in used
    }  # fmt: skip
    text = LanguageConfig(layers=12, hidden=OFA_HIDDEN, heads=16, vocab=OFA_VOCABULARY, gated=False, activation="gelu")
    places = {name: OFA_VOCABULARY - 1 - i for i, name in enumerate(used)}
    configs["encoder"] = msgspec.structs.replace(text, head=False, sends_hidden=True, placeholders=places)
    flows = [Flow(source=name, tensor="features", destination="encoder", name=name) for name in used]
    before_decoder = build_graph(configs, flows)
    graph = ModelGraph(
        modules=(*before_decoder.modules, _decoder(text)),
        flows=(*flows, Flow(source="encoder", tensor="hidden", destination="decoder", name="condition")),
    )
    tasks = {}
    for name, adaptor, source, target, batch in chosen:
        features = ADAPTORS[adaptor][4] if adaptor else 0
        items = {adaptor: _image(ADAPTORS[adaptor][3], features)} if adaptor else {}
        items["encoder"] = {"tokens": source + features}
        items["decoder"] = {"tokens": target, "supervised": target}
        links = ((adaptor, "encoder"),) if adaptor else ()
        tasks[name] = Task(batch=batch, items=items, links=(*links, ("encoder", "decoder")))
    return Job(graph=graph, tasks=tasks, tensor_parallel=1, devices=(8, 16, 32), pixels=588)


def _decoder(text: LanguageConfig) -> Module:
    """Blocks with cross-attention to the encoder, between the embedding and the token loss of a language model."""
    blocks = DiffusionConfig(layers=text.layers, hidden=text.hidden, heads=text.heads, channels=64, gated=False)
    condition = Reading(name="condition", source="encoder", spec=TensorSpec(name="hidden", width=text.hidden))
    ends = language("decoder", text)
    return replace(diffusion("decoder", blocks, (condition,)), before=ends.before, after=ends.after, loss=ends.loss)


# QWen-VAL: encoders -> a 7B language model, tensor-parallel.

QWEN_VOCABULARY = 151_936
QWEN_TASKS = (
    # name, modules that feed the language model, text tokens, batch
    ("vision-language", ("vision",), 256, 96),
    ("audio-language", ("audio",), 131, 96),
    ("vision-audio-language", ("vision", "audio"), 131, 48),
)
QWEN_ENCODERS = {
    # layers, hidden, heads, ffn, tokens, features
    "vision": (48, 1664, 16, 8192, 1024, 256),
    "audio": (32, 1280, 20, 5120, 500, 125),
}


def qwen_val() -> Job:
    """QWen-VAL, three tasks; a worker is a group of four devices, without which its states do not fit."""
    configs: dict[str, ModuleConfig] = {
        name: VitConfig(
            layers=layers, hidden=hidden, heads=heads, ffn=ffn, patch=14, merge=2, positions="learned", output=4096
        )
        for name, (layers, hidden, heads, ffn, _, _) in QWEN_ENCODERS.items()
    }
    places = {name: QWEN_VOCABULARY - 1 - i for i, name in enumerate(QWEN_ENCODERS)}
    configs["language"] = LanguageConfig(
        layers=32, hidden=4096, heads=32, ffn=11_008, vocab=QWEN_VOCABULARY, qkv_bias=True, placeholders=places
    )
    flows = [Flow(source=name, tensor="features", destination="language", name=name) for name in QWEN_ENCODERS]
    tasks = {}
    for name, encoders, text, batch in QWEN_TASKS:
        items: dict[str, dict[str, int]] = {e: _image(QWEN_ENCODERS[e][4], QWEN_ENCODERS[e][5]) for e in encoders}
        items["language"] = {"tokens": text + sum(QWEN_ENCODERS[e][5] for e in encoders), "supervised": text}
        tasks[name] = Task(batch=batch, items=items, links=tuple((e, "language") for e in encoders))
    return Job(graph=build_graph(configs, flows), tasks=tasks, tensor_parallel=4, devices=(32, 64), pixels=588)


JOBS = {
    "CLIP-4": lambda: clip(4),
    "CLIP-7": lambda: clip(7),
    "CLIP-10": lambda: clip(10),
    "OFASys-4": lambda: ofasys(4),
    "OFASys-7": lambda: ofasys(7),
    "QWen-VAL-3": qwen_val,
}

PUBLISHED = {
    # Spindle over one task after another, by devices (figure 8).
    "CLIP-4": {8: 1.21, 16: 1.22, 32: 1.52},
    "CLIP-7": {8: 1.31, 16: 1.26, 32: 1.54},
    "CLIP-10": {8: 1.37, 16: 1.33, 32: 1.71},
    "OFASys-4": {8: 1.53, 16: 1.42, 32: 1.51},
    "OFASys-7": {8: 1.71, 16: 1.43, 32: 1.33},
    "QWen-VAL-3": {32: 1.16, 64: 1.63},
}


def _image(tokens: int, features: int) -> dict[str, int]:
    """Sizes of an item of an encoder: one row of patches, two where features are merged from 2 x 2 of them."""
    if features == 1:
        return {"tokens": tokens, "features": 1, "height": 1, "width": tokens}
    return {"tokens": tokens, "features": features, "height": 2, "width": tokens // 2}
