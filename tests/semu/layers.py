"""Layers that tests trace: ours, tiny, and items to run them on."""

from __future__ import annotations

from pipeweaver.data.items import Item
from pipeweaver.model.diffusion import DiffusionConfig, diffusion
from pipeweaver.model.graph import Flow, ModelGraph, Reading
from pipeweaver.model.language import LanguageConfig, language
from pipeweaver.model.vit import VitConfig, vit

WIDTHS = {"pixels": 12, "latents": 6}


def tiny_vlm(layers: int = 2, *, trainable: bool = True) -> ModelGraph:
    """A vision transformer whose features a language model reads."""
    vision = vit(
        "vision",
        VitConfig(layers=layers, hidden=32, heads=4, patch=2, merge=2, ffn=48, output=64, trainable=trainable),
    )
    reading = Reading(name="vision", source="vision", spec=vision.after.sends[0])  # type: ignore[union-attr]
    text = language(
        "language",
        LanguageConfig(layers=layers, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=128, placeholders={"vision": 3}),
        [reading],
    )
    flow = Flow(source="vision", tensor="features", destination="language", name="vision")
    return ModelGraph(modules=(vision, text), flows=(flow,))


def tiny_video(layers: int = 2) -> ModelGraph:
    """A language model whose hidden states a diffusion transformer reads."""
    text = language(
        "language", LanguageConfig(layers=layers, hidden=32, heads=4, ffn=48, vocab=64, head=False, sends_hidden=True)
    )
    reading = Reading(name="text", source="language", spec=text.after.sends[0])  # type: ignore[union-attr]
    video = diffusion(
        "diffusion",
        DiffusionConfig(layers=layers, hidden=64, heads=4, ffn=96, channels=6, time_rank=16, positions="grid"),
        [reading],
    )
    flow = Flow(source="language", tensor="hidden", destination="diffusion", name="text")
    return ModelGraph(modules=(text, video), flows=(flow,))


def clip(draw: int, frames: int, height: int, width: int) -> Item:
    tokens = frames * height * width
    sizes = {"tokens": tokens, "frames": frames, "height": height, "width": width, "elements": 6 * tokens}
    return Item(task="main", draw=draw, module="diffusion", position=draw, sizes=sizes)


def image(draw: int, height: int, width: int) -> Item:
    sizes = {"tokens": height * width, "height": height, "width": width, "features": height * width // 4}
    return Item(task="main", draw=draw, module="vision", position=draw, sizes=sizes)


def text(draw: int, tokens: int) -> Item:
    sizes = {"tokens": tokens, "supervised": tokens // 2}
    return Item(task="main", draw=draw, module="language", position=99, sizes=sizes)
