"""A diffusion transformer trained by flow matching (DiT, arXiv 2212.09748; flow matching, arXiv 2210.02747).

    before   noise, time step, projection of noisy latents                          carries x
    blocks   attention within each item, cross-attention to a condition, gated MLP  carries x
    after    norm, projection to a velocity, squared error                          loss

The data set supplies "latents", [tokens, channels]. An item draws one time t and noise e; the model sees
(1 - t) * latents + t * e and is asked for e - latents. The loss is a sum over latent values: an item's size
"elements" is tokens * channels. Time and noise are drawn anew wherever they are needed, from the item's own
generator, so that only x travels. Blocks learn of t by an adaptive norm of low rank.

Example: t = 0.25, latent 4, noise 0: the model sees 3 and is asked for -4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from pipeweaver.model import layers
from pipeweaver.model.attention import positions, rotary
from pipeweaver.model.graph import LayerSpec, LossSpec, Module, Reading, TensorSpec
from pipeweaver.model.layers import (
    WHOLE,
    Activation,
    Attention,
    GatedMlp,
    Linear,
    Mlp,
    NumLayers,
    Sublayer,
    residual_deviation,
    run_attention,
)
from pipeweaver.model.part import PartView

PositiveInt = Annotated[int, Meta(ge=1)]


class DiffusionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="diffusion"):
    """[model.NAME] with type = "diffusion".

    `channels` is the width of a latent row. `kv_heads` are by default `heads`, `cross_kv_heads` (of the
    cross-attention) too, `ffn` is 4 * hidden. Rotary positions count rows ("line"), or frames, rows and
    columns ("grid": items have the sizes "height", "width" and, where there are several, "frames").
    `time_rank` is the width between time and norms. With `zero_init` a new model predicts 0 and blocks
    begin as identities, as in DiT. With `sublayers` a block is two layers, its attentions and the MLP: chunks may begin
    between them.
    """

    layers: NumLayers
    hidden: PositiveInt
    heads: PositiveInt
    channels: PositiveInt
    kv_heads: PositiveInt | None = None
    cross_kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    positions: Literal["line", "grid"] = "line"
    rope_base: Annotated[float, Meta(gt=1)] = 10_000.0
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    time_rank: Annotated[int, Meta(ge=2, multiple_of=2)] = 256
    zero_init: bool = True
    sublayers: bool = False
    trainable: bool = True

    def __post_init__(self) -> None:
        layers.check_heads(self.hidden, self.heads)
        layers.check_rotary(self.head_dim, axes=3 if self.positions == "grid" else 1)
        for name in ("kv_heads", "cross_kv_heads"):
            if (count := getattr(self, name)) and self.heads % count:
                raise ValueError(f"{name} = {count} do not divide heads = {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def width(self) -> int:
        """Width inside the MLP."""
        return self.ffn or 4 * self.hidden


def diffusion(name: str, config: DiffusionConfig, readings: Sequence[Reading] = ()) -> Module:
    """The module: `before` and `after` load "latents", every block reads the condition if there is one.

    Raises ValueError if more than one flow leads here.
    """
    if len(readings) > 1:
        names = ", ".join(f"{reading.source}.{reading.spec.name}" for reading in readings)
        raise ValueError(f"{name} takes one condition, but {len(readings)} flows lead to it: {names}")
    condition = readings[0] if readings else None
    x = TensorSpec(name="x", width=config.hidden)
    before = LayerSpec(
        kind=layers.kind("diffusion.before", hidden=config.hidden, channels=config.channels),
        build=lambda: LatentEmbedding(config),
        loads=("latents",),
        carries=(x,),
        trainable=config.trainable,
    )

    def block(halves: tuple[Sublayer, ...]) -> LayerSpec:
        reads = (condition.name,) if condition and "attention" in halves else ()
        return LayerSpec(
            kind=layers.block_kind(
                "diffusion",
                halves,
                both=dict(hidden=config.hidden, bias=config.bias, time_rank=config.time_rank),
                attention=dict(
                    heads=config.heads,
                    kv_heads=config.kv_heads or config.heads,
                    condition=condition.spec.width if condition else 0,
                    cross_kv_heads=(config.cross_kv_heads or config.heads) if condition else 0,
                ),
                mlp=dict(ffn=config.width, gated=config.gated, activation=config.activation),
            ),
            build=lambda: DiffusionBlock(config, condition, halves),
            reads=reads,
            carries=(x,),
            trainable=config.trainable,
        )

    after = LayerSpec(
        kind=layers.kind("diffusion.after", hidden=config.hidden, channels=config.channels, time_rank=config.time_rank),
        build=lambda: Velocity(config),
        loads=("latents",),
        trainable=config.trainable,
    )
    return Module(
        name=name,
        layers=layers.block_layers(config.layers, config.sublayers, block),
        before=before,
        after=after,
        loss=LossSpec(units="elements"),
    )


class LatentEmbedding(nn.Module):
    """latents [tokens, channels] -> x [tokens, hidden], of the latents with noise"""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.latents = Linear(config.channels, config.hidden, bias=True)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        latents, noise = _latents_and_noise(part)
        time = draw_time(part).index_select(0, item_of_row(part))[:, None]
        return {"x": self.latents(((1 - time) * latents + time * noise).to(part.dtype))}


class DiffusionBlock(nn.Module):
    """x + gate * attention(norm(x)), x + cross-attention(norm(x), condition), x + gate * mlp(norm(x)); or only the first
    two, or the last.

    Norms of attention and MLP are shifted and scaled, and their gates set, by the item's time.
    """

    def __init__(
        self, config: DiffusionConfig, condition: Reading | None, halves: tuple[Sublayer, ...] = WHOLE
    ) -> None:
        super().__init__()
        self.config, self.halves = config, halves
        self.condition = condition
        deviation = residual_deviation(config.hidden, config.layers)
        self.modulation = Modulation(config, 3 * len(halves))
        if "attention" in halves:
            self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, elementwise_affine=False)
            self.attention = Attention(
                config.hidden,
                heads=config.heads,
                key_heads=config.kv_heads or config.heads,
                head_dim=config.head_dim,
                bias=config.bias,
                out_bias=config.bias,
                out_deviation=deviation,
            )
        if "attention" in halves and condition is not None:
            self.cross_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
            self.cross_attention = Attention(
                config.hidden,
                heads=config.heads,
                key_heads=config.cross_kv_heads or config.heads,
                head_dim=config.head_dim,
                bias=config.bias,
                out_bias=config.bias,
                condition_width=condition.spec.width,
                out_deviation=0.0 if config.zero_init else deviation,
            )
        if "mlp" in halves:
            self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, elementwise_affine=False)
            self.mlp = (GatedMlp if config.gated else Mlp)(
                config.hidden,
                config.width,
                config.activation,
                bias=config.bias,
                out_deviation=residual_deviation(config.width, config.layers),
            )

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x, modulation = state["x"], self.modulation(part)
        if "attention" in self.halves:
            shift, scale, gate = modulation[:3]
            normed = self.attention_norm(x) * (1 + scale) + shift
            x = x + gate * run_attention(part, self.attention, normed, part.sizes(), angles=self._angles(part))
            if self.condition is not None:
                x = x + run_attention(
                    part,
                    self.cross_attention,
                    self.cross_norm(x),
                    part.sizes(),
                    condition=state[self.condition.name],
                    condition_lengths=part.linked_sizes(self.condition.source, self.condition.spec.rows),
                )
        if "mlp" in self.halves:
            shift, scale, gate = modulation[-3:]
            x = x + gate * self.mlp(self.mlp_norm(x) * (1 + scale) + shift)
        return {"x": x}

    def _angles(self, part: PartView) -> tuple[Tensor, Tensor]:
        config = self.config

        def make() -> tuple[Tensor, Tensor]:
            on_grid = config.positions == "grid"
            coordinates = frame_positions(part) if on_grid else (positions(part.sizes(), part.device),)
            return rotary(coordinates, config.head_dim, config.rope_base, part.dtype)

        return part.once(("rotary", config.positions, "video", config.head_dim, config.rope_base), make)


class Velocity(nn.Module):
    """x [tokens, hidden] -> the squared error of the predicted velocity, summed over latent values"""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.channels = config.channels
        self.modulation = Modulation(config, 2)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, elementwise_affine=False)
        self.velocity = Linear(config.hidden, config.channels, bias=True, deviation=0.0 if config.zero_init else None)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        for item in part.items:
            if item.sizes["elements"] != item.sizes["tokens"] * self.channels:
                raise ValueError(
                    f"{item.name}: {item.sizes['elements']} elements, but {item.sizes['tokens']} tokens "
                    f"of {self.channels} channels"
                )
        shift, scale = self.modulation(part)
        velocity = self.velocity(self.norm(state["x"]) * (1 + scale) + shift)
        latents, noise = _latents_and_noise(part)
        precise = torch.promote_types(velocity.dtype, torch.float32)
        return {"loss": F.mse_loss(velocity.to(precise), (noise - latents).to(precise), reduction="sum")}


class Modulation(nn.Module):
    """`count` tensors [tokens, hidden] that depend on the item's time alone: shifts, scales, gates."""

    def __init__(self, config: DiffusionConfig, count: int) -> None:
        super().__init__()
        self.rank = config.time_rank
        self.count = count
        self.down = Linear(config.time_rank, config.time_rank, bias=True)
        self.up = Linear(
            config.time_rank, count * config.hidden, bias=True, deviation=0.0 if config.zero_init else None
        )

    def forward(self, part: PartView) -> tuple[Tensor, ...]:
        waves = part.once(("time", self.rank), lambda: time_waves(draw_time(part), self.rank).to(part.dtype))
        modulation = self.up(F.silu(self.down(waves)))
        return modulation.index_select(0, item_of_row(part)).chunk(self.count, dim=-1)


def draw_time(part: PartView) -> Tensor:
    """Each item's time in [0, 1), [items]: 0 is data, 1 is noise."""
    return part.uniform("time")


def time_waves(time: Tensor, width: int) -> Tensor:
    """Cosines and sines of 1000 * time at width / 2 frequencies, [items, width]."""
    half = width // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, dtype=time.dtype, device=time.device) / half)
    angles = 1000 * time[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def item_of_row(part: PartView) -> Tensor:
    """The number of the item that each row belongs to, [tokens]."""

    def make() -> Tensor:
        rows = [torch.full((length,), number) for number, length in enumerate(part.sizes())]
        return torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(part.device, non_blocking=True)

    return part.once("item of row", make)


def frame_positions(part: PartView) -> tuple[Tensor, Tensor, Tensor]:
    """(frame, y, x) of every row, frames one below the other, row after row. Raises ValueError, naming the item,
    if an item's tokens are not frames * height * width."""
    grids = [torch.empty((0, 3), dtype=torch.int64)]
    for item in part.items:
        shape = (item.sizes.get("frames", 1), item.sizes["height"], item.sizes["width"])
        if math.prod(shape) != item.sizes["tokens"]:
            frames, height, width = shape
            raise ValueError(f"{item.name}: {item.sizes['tokens']} tokens, but {frames} x {height} x {width} latents")
        grids.append(torch.cartesian_prod(*(torch.arange(size) for size in shape)))
    frame, y, x = torch.cat(grids).to(part.device, non_blocking=True).unbind(1)
    return frame, y, x


def _latents_and_noise(part: PartView) -> tuple[Tensor, Tensor]:
    latents = part.loaded["latents"].to(part.dtype)
    return latents, part.normal("noise", latents.shape[1])
