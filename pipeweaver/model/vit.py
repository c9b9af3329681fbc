"""A vision transformer for images of different sizes (Dosovitskiy et al., arXiv 2010.11929).

The data set supplies "pixels", [tokens, patch * patch * channels]: the patches of an image row after row
(row-major over the image), the pixels of a patch in the order (channel, y, x). An image item has the sizes
"height" and "width" in patches, "tokens" = height * width and "features" = tokens / merge**2.

    before   patch embedding, learned positions      carries x
    blocks   attention within each image, MLP        carries x
    after    norm, merge of m x m patches, projector sends features

Example: an image of 4 x 6 patches, merge 2. Its 24 rows become 6 features; the first takes rows 0, 1, 6, 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from pipeweaver.model import layers
from pipeweaver.model.attention import rotary
from pipeweaver.model.graph import LayerSpec, Module, TensorSpec
from pipeweaver.model.layers import (
    WHOLE,
    Activation,
    Attention,
    Linear,
    Mlp,
    NumLayers,
    Sublayer,
    residual_deviation,
    run_attention,
)
from pipeweaver.model.part import PartView

PositiveInt = Annotated[int, Meta(ge=1)]


class VitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="vit"):
    """[model.NAME] with type = "vit".

    `patch` is in pixels. `ffn` is by default 4 * hidden. `positions`: "rotary" on two axes, "learned" as a
    table of `grid` x `grid` patches, interpolated for images of other sizes, or "both".
    `output` is the width of the features, the hidden size of who reads them. The projector is "mlp" (two
    matrices, `projector_hidden` between them, by default `output`), "linear" or "none" (features are the
    merged patches, and `output` follows). `trainable` may be true, false, or "projector": what comes after
    the last block only. With `sublayers` a block is two layers, attention and MLP: chunks may begin between them.
    """

    layers: NumLayers
    hidden: PositiveInt
    heads: PositiveInt
    patch: PositiveInt
    output: PositiveInt | None = None
    channels: PositiveInt = 3
    ffn: PositiveInt | None = None
    merge: PositiveInt = 1
    positions: Literal["rotary", "learned", "both"] = "rotary"
    grid: PositiveInt = 16
    rope_base: Annotated[float, Meta(gt=1)] = 10_000.0
    projector: Literal["mlp", "linear", "none"] = "mlp"
    projector_hidden: PositiveInt | None = None
    activation: Activation = "gelu"
    patch_bias: bool = True
    bias: bool = True
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    sublayers: bool = False
    trainable: bool | Literal["projector"] = True

    def __post_init__(self) -> None:
        layers.check_heads(self.hidden, self.heads)
        if self.rotary:
            layers.check_rotary(self.head_dim, axes=2)
        if self.projector == "none" and self.output not in (None, self.merged):
            raise ValueError(
                f"output = {self.output}: without a projector features are merge * merge * hidden = {self.merged} wide"
            )
        if self.projector != "none" and self.output is None:
            raise ValueError("output is missing: the width of the features, the hidden size of who reads them")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def rotary(self) -> bool:
        return self.positions in ("rotary", "both")

    @property
    def learned(self) -> bool:
        return self.positions in ("learned", "both")

    @property
    def merged(self) -> int:
        """Width of merge x merge patches side by side."""
        return self.merge**2 * self.hidden

    @property
    def patch_values(self) -> int:
        """Values of one patch: the width of "pixels"."""
        return self.patch**2 * self.channels


def vit(name: str, config: VitConfig) -> Module:
    """The module: `before` loads "pixels", `after` sends "features"."""
    x = TensorSpec(name="x", width=config.hidden)
    features = TensorSpec(name="features", rows="features", width=config.output or config.merged)

    def block(halves: tuple[Sublayer, ...]) -> LayerSpec:
        return LayerSpec(
            kind=layers.block_kind(
                "vit",
                halves,
                both=dict(hidden=config.hidden, bias=config.bias),
                attention=dict(heads=config.heads, rotary=config.rotary),
                mlp=dict(ffn=config.ffn or 4 * config.hidden, activation=config.activation),
            ),
            build=lambda: VitBlock(config, halves),
            carries=(x,),
            trainable=config.trainable is True,
        )

    learned = config.grid if config.learned else 0
    before = LayerSpec(
        kind=layers.kind(
            "vit.before",
            hidden=config.hidden,
            values=config.patch_values,
            bias=config.patch_bias,
            learned=learned,
        ),
        build=lambda: PatchEmbedding(config),
        loads=("pixels",),
        carries=(x,),
        trainable=config.trainable is True,
    )
    after = LayerSpec(
        kind=layers.kind(
            "vit.after",
            hidden=config.hidden,
            merge=config.merge,
            projector=config.projector,
            projector_hidden=config.projector_hidden or features.width,
            output=features.width,
        ),
        build=lambda: Projector(config),
        sends=(features,),
        trainable=config.trainable is not False,
    )
    return Module(
        name=name, layers=layers.block_layers(config.layers, config.sublayers, block), before=before, after=after
    )


class PatchEmbedding(nn.Module):
    """pixels [tokens, patch * patch * channels] -> x [tokens, hidden]"""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.patch = Linear(config.patch_values, config.hidden, bias=config.patch_bias)
        self.positions = None
        if config.learned:
            self.positions = nn.Parameter(torch.empty(config.grid, config.grid, config.hidden))
            nn.init.normal_(self.positions, std=0.02)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        shapes = image_shapes(part)
        x = self.patch(part.loaded["pixels"].to(part.dtype))
        if self.positions is not None and shapes:
            tables = {shape: self._table(*shape) for shape in dict.fromkeys(shapes)}
            x = x + torch.cat([tables[shape] for shape in shapes])
        return {"x": x}

    def _table(self, height: int, width: int) -> Tensor:
        """Positions of an image's patches, [height * width, hidden]."""
        assert self.positions is not None
        table: Tensor = self.positions
        if table.shape[:2] != (height, width):
            stretched = F.interpolate(table.permute(2, 0, 1)[None], size=(height, width), mode="bicubic")
            table = stretched[0].permute(1, 2, 0)
        return table.reshape(height * width, -1)


class VitBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or one of these; attention within each image, in both directions."""

    def __init__(self, config: VitConfig, halves: tuple[Sublayer, ...] = WHOLE) -> None:
        super().__init__()
        ffn = config.ffn or 4 * config.hidden
        self.config, self.halves = config, halves
        if "attention" in halves:
            self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
            self.attention = Attention(
                config.hidden,
                heads=config.heads,
                key_heads=config.heads,
                head_dim=config.head_dim,
                bias=config.bias,
                out_bias=config.bias,
                out_deviation=residual_deviation(config.hidden, config.layers),
            )
        if "mlp" in halves:
            self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
            self.mlp = Mlp(
                config.hidden,
                ffn,
                config.activation,
                bias=config.bias,
                out_deviation=residual_deviation(ffn, config.layers),
            )

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x = state["x"]
        if "attention" in self.halves:
            normed, angles = self.attention_norm(x), self._angles(part)
            x = x + run_attention(part, self.attention, normed, part.sizes(), angles=angles)
        if "mlp" in self.halves:
            x = x + self.mlp(self.mlp_norm(x))
        return {"x": x}

    def _angles(self, part: PartView) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if not config.rotary:
            return None
        return part.once(
            ("rotary", "grid", config.head_dim, config.rope_base),
            lambda: rotary(
                grid_positions(image_shapes(part), part.device), config.head_dim, config.rope_base, part.dtype
            ),
        )


class Projector(nn.Module):
    """x [tokens, hidden] -> features [features, output]: norm, merge of windows, projection."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.merge = config.merge
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        if config.projector == "none":
            self.projector: nn.Module = nn.Identity()
            return
        assert config.output is not None
        if config.projector == "linear":
            self.projector = Linear(config.merged, config.output, bias=True)
        else:
            between = config.projector_hidden or config.output
            self.projector = nn.Sequential(
                Linear(config.merged, between, bias=True), nn.GELU(), Linear(between, config.output, bias=True)
            )

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x = self.norm(state["x"])
        if self.merge > 1:
            windows = part.once(("windows", self.merge), lambda: merge_windows(part, self.merge))
            x = x.index_select(0, windows).reshape(-1, self.merge**2 * x.shape[-1])
        return {"features": self.projector(x)}


def image_shapes(part: PartView) -> list[tuple[int, int]]:
    """(height, width) of each image in patches. Raises ValueError, naming the item, if its tokens differ."""
    shapes = list(zip(part.sizes("height"), part.sizes("width"), strict=True))
    for item, (height, width) in zip(part.items, shapes, strict=True):
        if item.sizes["tokens"] != height * width:
            raise ValueError(f"image {item.name}: {item.sizes['tokens']} tokens, but {height} x {width} patches")
    return shapes


def grid_positions(shapes: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(y, x) of every patch, images one below the other, row after row."""
    empty = torch.empty(0, dtype=torch.int64)
    y = torch.cat([empty, *(torch.arange(height).repeat_interleave(width) for height, width in shapes)])
    x = torch.cat([empty, *(torch.arange(width).repeat(height) for height, width in shapes)])
    return y.to(device, non_blocking=True), x.to(device, non_blocking=True)


def merge_windows(part: PartView, merge: int) -> Tensor:
    """Rows in the order that puts the patches of each merge x merge window one after the other.

    Windows go row after row over the image, and so do patches in a window. Raises ValueError, naming the
    item, if windows do not fit an image or its "features" are not their number.
    """
    orders = [torch.empty(0, dtype=torch.int64)]
    start = 0
    for item, (height, width) in zip(part.items, image_shapes(part), strict=True):
        if height % merge or width % merge:
            raise ValueError(
                f"image {item.name}: {height} x {width} patches cannot be merged {merge} x {merge}; "
                f"both sides must be multiples of {merge} patches"
            )
        if item.sizes["features"] != height * width // merge**2:
            raise ValueError(
                f"image {item.name}: {item.sizes['features']} features, but {height} x {width} patches "
                f"merged {merge} x {merge} make {height * width // merge**2}"
            )
        rows = torch.arange(start, start + height * width).view(height // merge, merge, width // merge, merge)
        orders.append(rows.transpose(1, 2).reshape(-1))
        start += height * width
    return torch.cat(orders).to(part.device, non_blocking=True)
