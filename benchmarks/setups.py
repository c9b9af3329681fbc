"""The paper's setups on H800-80GB, with batches drawn as wide as its data sets.

    case = cases()["VLM-L"]
    batch = case.batch(seed=0, microbatches=16)

Shapes are the paper's (images of 728 px: 2704 patches, 169 language tokens; sequences of 8192 tokens, at most 48
images; video at 16 frames/s, at most 16 s and 8 clips per microbatch). It does not say how its data sets were mixed.
Here a microbatch leans towards one of them, as shards of a data set do:

    images   LAION-2B (one image, 16.4 text tokens on average), OBELICS (0.4 to 3115 text tokens per image), ScienceQA
             (questions of some hundred tokens, half of them with an image)
    clips    ShareGPT4Video (long captions), InternVid and MMTrail (short ones)

A clip becomes 256 latent tokens per four frames (256 px, factors 4 and 16); a microbatch takes 49152 of them. Its
heaviest of 100 microbatches then has about 4 times the load of its lightest (the paper: 4.15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator

from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.sizes import setup
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.machine import load_machine

TASK = "main"
PATCHES, FEATURES, SIDE = 2704, 169, 52
SEQUENCE_TOKENS, MOST_IMAGES = 8192, 48
FRAMES_PER_SECOND, MOST_SECONDS, MOST_CLIPS = 16, 16, 8
LATENT_SIDE, FRAMES_PER_LATENT, LATENT_TOKENS = 16, 4, 49_152
WIDTHS = {"pixels": 588, "latents": 64}

Draft = tuple[tuple[tuple[str, dict[str, int]], ...], tuple[tuple[int, int], ...]]
"""What a sample is made of: (module, sizes) of its items, and its links."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setup: model, parallel degrees, and how its microbatches are drawn."""

    name: str
    tensor_parallel: int
    workers: int
    microbatch: Callable[[Generator], list[Draft]]

    @property
    def graph(self) -> ModelGraph:
        return _graph(self.name)

    @property
    def costs(self) -> SemuCosts:
        return _costs(self.name, self.tensor_parallel, self.workers)

    @property
    def budget_bytes(self) -> int:
        """Memory of a worker: of all its devices together."""
        return self.tensor_parallel * load_machine("H800").memory_bytes

    def batch(self, *, seed: int, microbatches: int) -> Batch:
        """A batch; equal arguments, equal batch."""
        random = np.random.default_rng(seed)
        samples: list[Sample] = []
        groups: list[tuple[int, ...]] = []
        for _ in range(microbatches):
            first = len(samples)
            for items, links in self.microbatch(random):
                draw = len(samples)
                samples.append(Sample(task=TASK, draw=draw, record=draw, items=_items(items, draw), links=links))
            groups.append(tuple(range(first, len(samples))))
        return Batch(step=seed, samples=tuple(samples), microbatches=tuple(groups))


def cases() -> dict[str, Case]:
    """The setups that the paper measured, by name; data parallelism is 1."""
    found = [
        Case(name="VLM-S", tensor_parallel=4, workers=4, microbatch=_images_and_text),
        Case(name="VLM-M", tensor_parallel=8, workers=4, microbatch=_images_and_text),
        Case(name="VLM-L", tensor_parallel=8, workers=8, microbatch=_images_and_text),
        Case(name="T2V-S", tensor_parallel=4, workers=4, microbatch=_clips),
        Case(name="T2V-L", tensor_parallel=8, workers=8, microbatch=_clips),
    ]
    return {case.name: case for case in found}


def _images_and_text(random: Generator) -> list[Draft]:
    """Documents until the sequence is full; the last one is cut short."""
    leaning = random.dirichlet([0.05, 0.05, 0.05])
    per_image = math.exp(random.uniform(math.log(0.4), math.log(3115)))
    documents: list[Draft] = []
    tokens, images = 0, 0
    while tokens < SEQUENCE_TOKENS:
        kind = int(random.choice(3, p=leaning))
        count, text = (_laion, _obelics, _science)[kind](random, per_image)
        count = min(count, MOST_IMAGES - images, (SEQUENCE_TOKENS - tokens) // FEATURES)
        text = max(1, min(text, SEQUENCE_TOKENS - tokens - count * FEATURES))
        if count * FEATURES + text > SEQUENCE_TOKENS - tokens:
            count -= 1
        pictures = [("vision", {"tokens": PATCHES, "features": FEATURES, "height": SIDE, "width": SIDE})] * count
        language = ("language", {"tokens": count * FEATURES + text, "supervised": text})
        documents.append(((*pictures, language), tuple((k, count) for k in range(count))))
        tokens += count * FEATURES + text
        images += count
    return documents


def _laion(random: Generator, _: float) -> tuple[int, int]:
    return 1, int(random.geometric(1 / 16.4))


def _obelics(random: Generator, per_image: float) -> tuple[int, int]:
    count = min(16, int(random.geometric(0.4)))
    return count, max(1, round(count * per_image))


def _science(random: Generator, _: float) -> tuple[int, int]:
    return int(random.random() < 0.5), int(random.lognormal(5.3, 0.5))


def _clips(random: Generator) -> list[Draft]:
    """Clips with their captions until either limit is reached; the last one is cut short."""
    leaning = random.dirichlet([0.5, 0.5, 0.5])
    longest = random.uniform(2, MOST_SECONDS)
    samples: list[Draft] = []
    left = LATENT_TOKENS // LATENT_SIDE**2
    while left and len(samples) < MOST_CLIPS:
        mean, spread = ((5.6, 0.5), (2.9, 0.4), (3.4, 0.7))[int(random.choice(3, p=leaning))]
        caption = min(1024, 1 + int(random.lognormal(mean, spread)))
        seconds = random.uniform(1, longest)
        latents = min(left, max(1, round(seconds * FRAMES_PER_SECOND / FRAMES_PER_LATENT)))
        tokens = latents * LATENT_SIDE**2
        sizes = {"tokens": tokens, "frames": latents, "height": LATENT_SIDE, "width": LATENT_SIDE}
        clip = ("diffusion", {**sizes, "elements": tokens * WIDTHS["latents"]})
        samples.append(((("language", {"tokens": caption}), clip), ((0, 1),)))
        left -= latents
    return samples


def _items(items: tuple[tuple[str, dict[str, int]], ...], draw: int) -> tuple[Item, ...]:
    counts: dict[str, int] = {}
    found = []
    for module, sizes in items:
        position = counts.get(module, 0)
        counts[module] = position + 1
        found.append(Item(task=TASK, draw=draw, module=module, position=position, sizes=sizes))
    return tuple(found)


@cache
def _graph(name: str) -> ModelGraph:
    return setup(name, sublayers=True)


@cache
def _costs(name: str, tensor_parallel: int, workers: int) -> SemuCosts:
    return SemuCosts(
        _graph(name), load_machine("H800"), tensor_parallel=tensor_parallel, widths=WIDTHS, workers=workers
    )


def counts(batch: Batch, module: str) -> Iterator[int]:
    """How many items of a module each microbatch has."""
    for group in batch.microbatches:
        yield sum(item.module == module for i in group for item in batch.samples[i].items)
