"""The same training step under torch.distributed.pipelining, as its users have to write it.

`Schedule1F1B` wants one shape for all microbatches and a chain of stages. So the encoder sits on the first
stage, the language model is split evenly, and every microbatch has as many images as the fullest one of the
run, each on a canvas as large as the largest image; attention masks keep the padding out of the result. The
layers, parameters and loss are the ones of our own runtime: the losses must agree.

Loading and padding are left out of the timed part, in favour of this side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.flop_counter import FlopCounterMode

from pipeweaver.data.items import Batch, Item, Share
from pipeweaver.model.attention import rotary, rotate
from pipeweaver.model.build import materialise, materialise_all
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.part import PartView
from pipeweaver.model.reference import run_all
from pipeweaver.runtime.execution import Loader
from pipeweaver.runtime.optimizer import OptimizerConfig, adamw, clip_factor
from pipeweaver.schedule.ir import Chunk

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What every microbatch of the run is padded to."""

    images: int
    side: int
    """Patches along a side of the canvas."""
    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A batch, one row per microbatch."""

    pixels: Tensor  # [microbatches, images, side * side, values]
    valid: Tensor  # [microbatches, images, side * side], bool
    features: Tensor  # [microbatches, images, (side / merge) ** 2], bool
    tokens: Tensor  # [microbatches, tokens]
    labels: Tensor  # [microbatches, tokens]
    lengths: Tensor  # [microbatches, documents + 1]: of the documents, then of the padding
    normaliser: int


def shapes(batches: Sequence[Batch], tokens: int) -> Shapes:
    """The fullest microbatch and the largest image of the run."""
    images, side, documents = 0, 0, 0
    for batch in batches:
        for microbatch in batch.microbatches:
            items = [item for i in microbatch for item in batch.samples[i].items if item.module == "vision"]
            images = max(images, len(items))
            documents = max(documents, len(microbatch))
            side = max([side, *(max(item.sizes["height"], item.sizes["width"]) for item in items)])
    return Shapes(images=images, side=side, tokens=tokens, documents=documents)


def pad(batch: Batch, load, shape: Shapes, merge: int) -> Padded:  # type: ignore[no-untyped-def]
    """`load(items, records, names)` brings content, as for our own workers."""
    values = None
    count = len(batch.microbatches)
    area, merged = shape.side**2, (shape.side // merge) ** 2
    tokens = torch.zeros(count, shape.tokens, dtype=torch.int64)
    labels = torch.full((count, shape.tokens), IGNORED)
    lengths = torch.zeros(count, shape.documents + 1, dtype=torch.int64)
    valid = torch.zeros(count, shape.images, area, dtype=torch.bool)
    features = torch.zeros(count, shape.images, merged, dtype=torch.bool)
    pixels = torch.zeros(0)
    records = {f"{sample.task}/{sample.draw}": sample.record for sample in batch.samples}
    for m, microbatch in enumerate(batch.microbatches):
        items = [item for i in microbatch for item in batch.samples[i].items]
        texts = [item for item in items if item.module == "language"]
        images = [item for item in items if item.module == "vision"]
        content = load(texts, records, ("tokens", "labels"))
        rows = len(content["tokens"])
        tokens[m, :rows], labels[m, :rows] = content["tokens"], content["labels"]
        lengths[m, : len(texts)] = torch.tensor([item.sizes["tokens"] for item in texts])
        lengths[m, -1] = shape.tokens - rows
        patches = load(images, records, ("pixels",))["pixels"] if images else torch.zeros(0, 1)
        if values is None and images:
            values = patches.shape[1]
            pixels = torch.zeros(count, shape.images, area, values)
        start = 0
        for n, item in enumerate(images):
            height, width = item.sizes["height"], item.sizes["width"]
            inside = torch.zeros(shape.side, shape.side, dtype=torch.bool)
            inside[:height, :width] = True
            valid[m, n] = inside.flatten()
            inside = torch.zeros(shape.side // merge, shape.side // merge, dtype=torch.bool)
            inside[: height // merge, : width // merge] = True
            features[m, n] = inside.flatten()
            pixels[m, n, valid[m, n]] = patches[start : start + height * width]
            start += height * width
    return Padded(
        pixels=pixels,
        valid=valid,
        features=features,
        tokens=tokens,
        labels=labels,
        lengths=lengths,
        normaliser=sum(item.sizes.get("supervised", 0) for sample in batch.samples for item in sample.items),
    )


class FirstStage(nn.Module):
    """The encoder on padded images, the token embedding and the first half of the language model."""

    def __init__(self, layers: Mapping[str, Any], shape: Shapes) -> None:
        super().__init__()
        self.shape = shape
        self.embed_patches: Any = layers["vision.before"]
        self.blocks: Any = nn.ModuleList(_blocks(layers, "vision"))
        self.projector: Any = layers["vision.after"]
        self.embed_tokens: Any = layers["language.before"]
        self.placeholder = self.embed_tokens.placeholders["vision"]
        self.language: Any = nn.ModuleList(_blocks(layers, "language"))

    def forward(self, pixels: Tensor, valid: Tensor, features: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        side = self.shape.side
        count, area, values = pixels.shape[1:]
        patches = PartView(
            items=[_item("vision", side * side, height=side, width=side, features=features.shape[-1])] * count,
            links=[()] * count,
            loaded={"pixels": pixels.reshape(count * area, values)},
            step=0,
            seed=0,
            device=pixels.device,
            dtype=pixels.dtype,
        )
        x = self.embed_patches({}, patches)["x"]
        # Images without a single real patch attend to everything: a row with no key at all has no softmax.
        mask = (valid[0] | ~valid[0].any(-1, keepdim=True))[:, None, None, :]
        axis = torch.arange(side)
        angles = None
        for block in self.blocks:
            if angles is None:
                grid = (axis.repeat_interleave(side).repeat(count), axis.repeat(side).repeat(count))
                angles = rotary(grid, block.config.head_dim, block.config.rope_base, x.dtype)
            x = x + _dense_attention(block.attention, block.attention_norm(x), angles, mask, count)
            x = x + block.mlp(block.mlp_norm(x))
        rows = self.projector({"x": x}, patches)["features"][features.flatten()]
        text = _text(tokens, lengths)
        here = tokens[0] == self.placeholder
        x = self.embed_tokens.embedding(tokens[0]).index_put((here.nonzero()[:, 0],), rows)
        for block in self.language:
            x = block({"x": x}, text)["x"]
        return x[None]


class LastStage(nn.Module):
    """The second half of the language model and its head."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.language: Any = nn.ModuleList(_blocks(layers, "language"))
        self.after: Any = layers["language.after"]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        text = _text(torch.zeros(x.shape[:2], dtype=torch.int64), lengths)
        rows = x[0]
        for block in self.language:
            rows = block({"x": rows}, text)["x"]
        return self.after.head(self.after.norm(rows))[None]


class TorchPipeline:
    """One of two workers of `Schedule1F1B`. `layers` are those of its stage, by name."""

    def __init__(
        self, rank: int, layers: Mapping[str, Any], shape: Shapes, microbatches: int, example: Padded,
        hidden: int, vocab: int, optimizer: OptimizerConfig,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.module: nn.Module = FirstStage(layers, shape) if rank == 0 else LastStage(layers)
        device = torch.device("cpu")
        x = torch.zeros(1, shape.tokens, hidden, requires_grad=True)
        logits = torch.zeros(1, shape.tokens, vocab)
        inputs = (example.pixels[:1],) if rank == 0 else (x,)
        # Shapes are given: to find them out torch would run the stage on meta tensors, which have no lengths.
        stage = PipelineStage(
            self.module, rank, 2, device, input_args=inputs, output_args=(x if rank == 0 else logits,)
        )
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=self._loss, scale_grads=False)
        self.normaliser = 1
        self.config = optimizer
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.parameters = list(parameters.values())
        self.optimizer = adamw(optimizer, parameters)

    def step(self, batch: Padded) -> float:
        """One training step; the loss on the last stage, 0 on the first."""
        self.normaliser = batch.normaliser
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(
                batch.pixels,
                valid=batch.valid, features=batch.features, tokens=batch.tokens, lengths=batch.lengths,
            )  # fmt: skip
        else:
            self.schedule.step(target=batch.labels, losses=losses, lengths=batch.lengths)
        squares = torch.stack([p.grad.double().square().sum() for p in self.parameters if p.grad is not None]).sum()
        torch.distributed.all_reduce(squares)
        factor = clip_factor(self.config.clip_norm, float(squares.sqrt()))
        if factor < 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.optimizer.step()
        return float(torch.stack(losses).detach().sum()) if losses else 0.0

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[0], labels[0], ignore_index=IGNORED, reduction="sum") / self.normaliser


def torch_layers(graph: ModelGraph, rank: int, seed: int) -> dict[str, nn.Module]:
    """The layers of torch's stage `rank`: the encoder and half of the language model, or the other half."""
    language = graph.by_name["language"]
    half = len(language.layers) // 2
    encoder = Chunk(task="main", module="vision", start=0, stop=len(graph.by_name["vision"].layers), worker=0)
    chunks = (
        [encoder, Chunk(task="main", module="language", start=0, stop=half, worker=0)]
        if rank == 0
        else [Chunk(task="main", module="language", start=half, stop=len(language.layers), worker=1)]
    )
    return materialise(graph, chunks, seed=seed, device=torch.device("cpu"), dtype=torch.float32)


def padding_flops_share(graph: ModelGraph, share: Share, load: Loader, padded: Padded, shape: Shapes) -> float:
    """Share of the forward FLOPs of torch's stages that go into padding, on one batch."""
    layers = materialise_all(graph, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    first, last = FirstStage(layers, shape), LastStage(layers)
    with torch.no_grad(), FlopCounterMode(display=False) as without:
        run_all(graph, layers, share.items, share.links, lambda items, names: load(items, share.records, names))
    with torch.no_grad(), FlopCounterMode(display=False) as with_padding:
        for m in range(len(padded.tokens)):
            row = slice(m, m + 1)
            x = first(
                padded.pixels[row], padded.valid[row], padded.features[row], padded.tokens[row], padded.lengths[row]
            )
            last(x, padded.lengths[row])
    return 1 - without.get_total_flops() / with_padding.get_total_flops()


def _blocks(layers: Mapping[str, Any], module: str) -> list[Any]:
    names = [name for name in layers if name.startswith(f"{module}.layers.")]
    return [layers[name] for name in sorted(names, key=lambda name: int(name.rpartition(".")[2]))]


def _item(module: str, tokens: int, **sizes: int) -> Item:
    return Item(task="main", draw=0, module=module, position=0, sizes={"tokens": tokens, **sizes})


def _text(tokens: Tensor, lengths: Tensor) -> PartView:
    """The packed documents of a microbatch, its padding as one more."""
    sizes = [length for length in lengths[0].tolist() if length]
    return PartView(
        items=[_item("language", length) for length in sizes],
        links=[()] * len(sizes),
        loaded={"tokens": tokens[0]},
        step=0,
        seed=0,
        device=tokens.device,
        dtype=torch.float32,
    )


def _dense_attention(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, count: int) -> Tensor:
    """Attention of padded images, all in one call."""
    heads = x.shape[-1] // attention.head_dim
    q, k, v = (part(x).unflatten(-1, (heads, attention.head_dim)) for part in (attention.q, attention.k, attention.v))
    q, k = rotate(q, *angles), rotate(k, *angles)
    q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attention.out(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
