"""Small models and hand-made batches that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipeweaver.data.items import Item
from pipeweaver.model.build import build_graph
from pipeweaver.model.diffusion import DiffusionConfig
from pipeweaver.model.graph import Flow, ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.part import seed_of
from pipeweaver.model.vit import VitConfig

IMAGE = 19
"""The token that image features replace."""

VISION = VitConfig(layers=2, hidden=16, heads=2, patch=2, channels=1, merge=2, output=24, positions="both", grid=4)
LANGUAGE = LanguageConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, ffn=32, vocab=20, answers=True, placeholders={"vision": IMAGE}
)


DIFFUSION = DiffusionConfig(layers=2, hidden=24, heads=2, ffn=32, channels=3, time_rank=8, zero_init=False)
WRITER = LanguageConfig(layers=2, hidden=20, heads=2, vocab=20, head=False, sends_hidden=True)


def text_diffusion(diffusion: DiffusionConfig = DIFFUSION, language: LanguageConfig = WRITER) -> ModelGraph:
    flow = Flow(source="language", tensor="hidden", destination="diffusion", name="text")
    return build_graph({"language": language, "diffusion": diffusion}, [flow])


def vision_language(
    vision: VitConfig = VISION, language: LanguageConfig = LANGUAGE, names: tuple[str, str] = ("vision", "language")
) -> ModelGraph:
    flow = Flow(source=names[0], tensor="features", destination=names[1], name="vision")
    return build_graph({names[0]: vision, names[1]: language}, [flow])


def image(position: int, height: int, width: int, *, draw: int = 0, merge: int = 2) -> Item:
    sizes = {"tokens": height * width, "features": height * width // merge**2, "height": height, "width": width}
    return Item(task="main", draw=draw, module="vision", position=position, sizes=sizes)


def text(tokens: int, *, supervised: int | None = None, draw: int = 0, position: int = 0) -> Item:
    sizes = {"tokens": tokens, "supervised": tokens // 2 if supervised is None else supervised}
    return Item(task="main", draw=draw, module="language", position=position, sizes=sizes)


def latents(height: int, width: int, *, frames: int = 1, channels: int = 3, draw: int = 0, position: int = 0) -> Item:
    tokens = frames * height * width
    sizes = {"tokens": tokens, "elements": tokens * channels, "frames": frames, "height": height, "width": width}
    return Item(task="main", draw=draw, module="diffusion", position=position, sizes=sizes)


def clip(draw: int, words: int, shape: tuple[int, int]) -> tuple[list[Item], list[tuple[int, int]]]:
    """A text and the picture it describes."""
    return [text(words, draw=draw), latents(*shape, draw=draw)], [(0, 1)]


def document(draw: int, images: Sequence[tuple[int, int]], words: int) -> tuple[list[Item], list[tuple[int, int]]]:
    """A text with images in it, and the links between them."""
    items = [image(i, *shape, draw=draw) for i, shape in enumerate(images)]
    features = sum(item.sizes["features"] for item in items)
    items.append(text(features + words, supervised=max(words - 1, 0), draw=draw))
    return items, [(i, len(images)) for i in range(len(images))]


def batch(*documents: tuple[list[Item], list[tuple[int, int]]]) -> tuple[list[Item], list[tuple[int, int]]]:
    items: list[Item] = []
    links: list[tuple[int, int]] = []
    for own, own_links in documents:
        links += [(a + len(items), b + len(items)) for a, b in own_links]
        items += own
    return items, links


def loader(
    items: Sequence[Item], links: Sequence[tuple[int, int]], vision: VitConfig = VISION, vocab: int = IMAGE
) -> Callable[[Sequence[Item], Sequence[str]], Mapping[str, Tensor]]:
    """Contents by item: random pixels; texts that begin with the placeholders of their images, then words."""
    placeholders = {item.name: 0 for item in items}
    for source, destination in links:
        placeholders[items[destination].name] += items[source].sizes.get("features", 0)
    contents: dict[str, dict[str, Tensor]] = {}
    for item in items:
        generator = torch.Generator().manual_seed(seed_of(item.name))
        tokens, count = item.sizes["tokens"], placeholders[item.name]
        if item.module == "vision":
            pixels = torch.rand(tokens, vision.patch_values, generator=generator, dtype=torch.float64)
            contents[item.name] = {"pixels": pixels}
        elif item.module == "language":
            words = torch.randint(0, vocab, (tokens - count,), generator=generator)
            row = torch.cat([torch.full((count,), IMAGE), words])
            labels = torch.full((tokens,), -100)
            first = tokens - 1 - item.sizes["supervised"]
            labels[first : tokens - 1] = row[first + 1 :]
            spans = torch.full((tokens,), -1)
            spans[first : tokens - 1] = torch.arange(item.sizes["supervised"]) // 2
            contents[item.name] = {"tokens": row, "labels": labels, "spans": spans}

        elif item.module == "diffusion":
            channels = item.sizes["elements"] // tokens
            values = torch.randn(tokens, channels, generator=generator, dtype=torch.float64)
            contents[item.name] = {"latents": values}

    def load(wanted: Sequence[Item], names: Sequence[str]) -> dict[str, Tensor]:
        return {name: torch.cat([contents[item.name][name] for item in wanted]) for name in names}

    return load
