"""Two towers compared: which of the batch's texts belongs to which image (CLIP, arXiv 2103.00020).

    layer    per pair, the mean of each tower's rows, projected, of length 1       carries pairs
    after    similarities of all with all, cross-entropy in both directions        loss

The data set has one item per pair, of one token, linked to an item of each tower, and supplies "classes", [pairs]:
pairs of equal class match each other too (two images of a three, and their captions). The loss mixes all pairs of a
task's batch, so it is `joint`: it takes them in one part. Its units are pairs. Example, three pairs of classes 3 7 3:

    image of pair 0 is to choose texts 0 and 2, half each; image of pair 1 text 1; and texts images likewise
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from pipeweaver.model import layers
from pipeweaver.model.graph import LayerSpec, LossSpec, Module, Reading, TensorSpec
from pipeweaver.model.layers import Linear
from pipeweaver.model.part import PartView

SHARPEST = math.log(100.0)
"""Largest logarithm of the factor on similarities, as in CLIP."""


class ContrastiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="contrastive"):
    """[model.NAME] with type = "contrastive". Towers are compared in `width` dimensions; similarities, at most 1, are
    divided by a `temperature` that is learned, from this value on."""

    width: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0.01, le=1)] = 0.07
    trainable: bool = True


def contrastive(name: str, config: ContrastiveConfig, readings: Sequence[Reading] = ()) -> Module:
    """The module: its layer reads both towers, `after` loads "classes" and has the joint loss.

    Raises ValueError unless two flows lead here.
    """
    if len(readings) != 2:
        found = ", ".join(f"{reading.source}.{reading.spec.name}" for reading in readings) or "none"
        raise ValueError(f"{name} compares two towers, so two flows must lead to it, not {len(readings)}: {found}")
    towers = (readings[0], readings[1])
    widths = [reading.spec.width for reading in towers]
    meet = LayerSpec(
        kind=layers.kind("contrastive.meet", width=config.width, first=widths[0], second=widths[1]),
        build=lambda: Meet(config, towers),
        reads=tuple(reading.name for reading in towers),
        carries=(TensorSpec(name="pairs", width=2 * config.width),),
        trainable=config.trainable,
    )
    after = LayerSpec(
        kind=layers.kind("contrastive.after", width=config.width),
        build=lambda: Contrast(config),
        loads=("classes",),
        trainable=config.trainable,
    )
    return Module(name=name, layers=(meet,), after=after, loss=LossSpec(units="pairs", joint=True))


class Meet(nn.Module):
    """Rows of both towers -> pairs [pairs, 2 * width]: each tower's mean row per pair, projected, of length 1."""

    def __init__(self, config: ContrastiveConfig, towers: tuple[Reading, Reading]) -> None:
        super().__init__()
        self.towers = towers
        self.projections = nn.ModuleList(Linear(tower.spec.width, config.width) for tower in towers)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        sides = []
        for tower, projection in zip(self.towers, self.projections, strict=True):
            means = mean_rows(state[tower.name], tower, part)
            sides.append(F.normalize(projection(means), dim=-1))
        return {"pairs": torch.cat(sides, dim=1)}


class Contrast(nn.Module):
    """pairs [pairs, 2 * width] -> the loss, summed over pairs. Reports the share of images that find a text of theirs."""

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor([-math.log(config.temperature)]))

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        pairs, classes = state["pairs"], part.loaded["classes"]
        precise = pairs if pairs.dtype == torch.float64 else pairs.float()
        one, other = precise.chunk(2, dim=1)
        logits = self.sharpness.clamp(max=SHARPEST).exp() * (one @ other.T)
        same = (classes[:, None] == classes[None, :]).to(logits.dtype)
        wanted = same / same.sum(1, keepdim=True)
        right = same.gather(1, logits.detach().argmax(1, keepdim=True))
        part.report("matched", right.sum(), len(part.items))
        both = F.cross_entropy(logits, wanted, reduction="sum") + F.cross_entropy(logits.T, wanted, reduction="sum")
        return {"loss": both / 2}


def mean_rows(rows: Tensor, tower: Reading, part: PartView) -> Tensor:
    """The mean of the rows that each item's linked items of a tower bring, [items, width].

    Raises ValueError, naming the item, for one that no row is linked to.
    """
    counts = part.linked_sizes(tower.source, tower.spec.rows)
    for item, count in zip(part.items, counts, strict=True):
        if count == 0:
            raise ValueError(
                f"{item.name}: no {tower.source} item is linked to it, but pairs are compared by two towers"
            )

    def places() -> tuple[Tensor, Tensor]:
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return numbers.to(part.device, non_blocking=True), torch.tensor(counts)[:, None].to(part.device)

    number, divisors = part.once(("rows of pairs", tower.name), places)
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, number, rows)
    return sums / divisors
