"""A module of one's own: a small convolutional encoder in place of the vision transformer.

A module is a list of layers, with what comes before the first and after the last. A layer is a plain
torch.nn.Module whose forward takes packed rows, all items of a part one below the other, and the part, which
knows the sizes of its items. Any run of layers may be cut out and placed on another worker, so layers share
nothing but what they carry. examples/own_module.toml uses this one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeweaver.model.graph import LayerSpec, Module, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.model.vit import image_shapes, merge_windows

MERGE = 2


def convolutions(name: str, *, layers: int, hidden: int, output: int, patch_values: int = 16) -> Module:
    """Patches -> `hidden` channels -> `layers` blocks of 3 x 3 convolutions -> features of width `output`."""
    x = TensorSpec(name="x", width=hidden)
    # Equal kinds mean equal structure: such layers cost the same for the same sizes, and are measured once.
    block = LayerSpec(kind=f"convolution {hidden}", build=lambda: Block(hidden), carries=(x,))
    return Module(
        name=name,
        before=LayerSpec(
            kind=f"convolution stem {patch_values} {hidden}",
            build=lambda: Stem(patch_values, hidden),
            loads=("pixels",),
            carries=(x,),
        ),
        layers=(block,) * layers,
        after=LayerSpec(
            kind=f"convolution head {hidden} {output}",
            build=lambda: Head(hidden, output),
            sends=(TensorSpec(name="features", rows="features", width=output),),
        ),
    )


class Stem(nn.Module):
    """pixels [tokens, values of a patch] -> x [tokens, hidden]"""

    def __init__(self, patch_values: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(patch_values, hidden)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        return {"x": self.project(part.loaded["pixels"].to(part.dtype))}


class Block(nn.Module):
    """x + mlp(norm(convolution(x))), the convolution over each image's own grid of patches."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(hidden, hidden, kernel_size=3, padding=1, groups=hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x = state["x"]
        images = zip(x.split(part.sizes()), image_shapes(part), strict=True)
        mixed = [self.convolution(rows.T.reshape(1, -1, *shape)).flatten(2)[0].T for rows, shape in images]
        return {"x": x + self.mlp(self.norm(torch.cat(mixed)))}


class Head(nn.Module):
    """x [tokens, hidden] -> features [features, output]: 2 x 2 patches become one feature."""

    def __init__(self, hidden: int, output: int) -> None:
        super().__init__()
        self.project = nn.Linear(MERGE * MERGE * hidden, output)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        windows = state["x"].index_select(0, merge_windows(part, MERGE))
        return {"features": self.project(windows.reshape(-1, self.project.in_features))}
