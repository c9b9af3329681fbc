"""Small model graphs of many kinds with random layers, and batches of many kinds for them.

Layers are cheap, but each item's rows depend on all of its rows, so that mixed-up rows or items show.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeweaver.data.items import Batch, Item, Sample
from pipeweaver.model.graph import Flow, LayerSpec, LossSpec, ModelGraph, Module, TensorSpec
from pipeweaver.model.part import seed_of

WIDTH = 4
VOCABULARY = 11
X = TensorSpec(name="x", width=WIDTH)


class Mix(nn.Module):
    """A residual layer: every row sees the mean of its item's rows."""

    def __init__(self, adds: str | None = None, sends: str | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.mean = nn.Linear(WIDTH, WIDTH, bias=False)
        self.adds, self.sends = adds, sends

    def forward(self, state, part):
        x = state["x"]
        means = torch.cat([rows.mean(0, keepdim=True).expand_as(rows) for rows in x.split(part.sizes())])
        x = x + torch.tanh(self.own(x) + self.mean(means))
        if self.adds:
            x = x + state[self.adds]
        return {"x": x} | ({self.sends: torch.sin(x)} if self.sends else {})


class Pixels(nn.Module):
    """The `before` of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)

    def forward(self, state, part):
        return {"x": self.embed(part.loaded["pixels"])}


class Features(nn.Module):
    """The `after` of an encoder: the first rows of each item, as many as it has features."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, 3) if extra else None

    def forward(self, state, part):
        rows = state["x"].split(part.sizes())
        kept = torch.cat([x[:n] for x, n in zip(rows, part.sizes("features"), strict=True)])
        out = {"features": self.project(kept)}
        if self.extra is not None:
            out["extra"] = self.extra(kept)
        return out


class Early(nn.Module):
    """A layer in the middle of an encoder that also sends its features."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.features = Mix(adds="residual"), Features()

    def forward(self, state, part):
        state = self.mix(state, part)
        return state | self.features(state, part)


class Tokens(nn.Module):
    """The `before` of a language model: placeholders (token 0) take the features in order."""

    def __init__(self, reads: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.reads = reads
        self.widen = nn.Linear(3, WIDTH) if "extra" in reads else None

    def forward(self, state, part):
        tokens = part.loaded["tokens"]
        x = self.weight[tokens]
        for number, name in enumerate(self.reads):
            rows = state[name] if name != "extra" else self.widen(state[name])
            # The second encoder has placeholders of its own; an extra tensor goes where the features go.
            places = (tokens == (1 if name == "audio" else 0)).nonzero()[:, 0]
            assert len(places) == len(rows), f"{len(places)} placeholders for {len(rows)} rows of {name}"
            x = x.index_add(0, places, rows * (number + 1))
        return {"x": x}


class TokenLoss(nn.Module):
    def __init__(self, sends: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.sends = sends

    def forward(self, state, part):
        labels = part.loaded["labels"]
        loss = nn.functional.cross_entropy(state["x"] @ self.weight.T, labels, ignore_index=-100, reduction="sum")
        part.report("tokens", float(len(labels)), 1)
        return {"loss": loss} | ({"hidden": torch.cos(state["x"])} if self.sends else {})


class Noise(nn.Module):
    """The `before` of a diffusion model: noise and time belong to the item; the condition is a mean of linked rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)

    def forward(self, state, part):
        latents, sizes = part.loaded["latents"], part.sizes()
        time = torch.cat([t.expand(n, 1) for t, n in zip(part.uniform("time")[:, None], sizes, strict=True)])
        x = self.embed((1 - time) * latents + time * part.normal("noise", 2))
        linked = state["condition"].split(part.linked_sizes("language"))
        means = [rows.mean(0) if len(rows) else rows.new_zeros(WIDTH) for rows in linked]
        return {"x": x + torch.cat([self.condition(m).expand(n, -1) for m, n in zip(means, sizes, strict=True)])}


class NoiseLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 2)

    def forward(self, state, part):
        target = part.normal("noise", 2) - part.loaded["latents"]
        return {"loss": (self.project(state["x"]) - target).square().sum()}


def encoder(name="vision", layers=2, *, extra=False, trainable=True) -> Module:
    features = TensorSpec(name="features", rows="features", width=WIDTH)
    sends = (features, TensorSpec(name="extra", rows="features", width=3)) if extra else (features,)
    return Module(
        name=name,
        before=LayerSpec(kind=f"{name}.before", build=Pixels, loads=("pixels",), carries=(X,), trainable=trainable),
        layers=_blocks(name, layers, trainable),
        after=LayerSpec(kind=f"{name}.after", build=lambda: Features(extra), sends=sends, trainable=trainable),
    )


def early_encoder(layers=3) -> Module:
    """Features leave the layer before the last, as LLaVA takes them: no loss comes after the last one, which has no
    backward, though it takes in what others get a gradient for."""
    blocks = list(_blocks("vision", max(3, layers), True))
    features = TensorSpec(name="features", rows="features", width=WIDTH)
    skipped = TensorSpec(name="skipped", width=WIDTH)
    blocks[-3] = LayerSpec(kind="vision.sender", build=lambda: Mix(sends="skipped"), carries=(X,), sends=(skipped,))
    blocks[-2] = LayerSpec(kind="vision.early", build=Early, reads=("residual",), carries=(X,), sends=(features,))
    blocks[-1] = LayerSpec(kind="vision.reader", build=lambda: Mix(adds="residual"), reads=("residual",), carries=(X,))
    before = LayerSpec(kind="vision.before", build=Pixels, loads=("pixels",), carries=(X,))
    return Module(name="vision", before=before, layers=tuple(blocks))


def language(layers=3, *, reads=(), tied=False, sends=False, skip=False, detached=False) -> Module:
    blocks = list(_blocks("language", layers, True))
    if skip:
        skipped = TensorSpec(name="skipped", width=WIDTH)
        blocks[0] = LayerSpec(
            kind="language.sender", build=lambda: Mix(sends="skipped"), carries=(X,), sends=(skipped,)
        )
        blocks[-1] = LayerSpec(
            kind="language.reader", build=lambda: Mix(adds="residual"), reads=("residual",), carries=(X,)
        )
    hidden = (TensorSpec(name="hidden", width=WIDTH, grad=not detached),) if sends else ()
    return Module(
        name="language",
        before=LayerSpec(
            kind="language.before",
            build=lambda: Tokens(tuple(reads)),
            loads=("tokens",),
            reads=tuple(reads),
            carries=(X,),
        ),
        layers=tuple(blocks),
        after=LayerSpec(kind="language.after", build=lambda: TokenLoss(sends), loads=("labels",), sends=hidden),
        tied={"after.weight": "before.weight"} if tied else {},
        loss=LossSpec(units="supervised", weight=0.7 if sends else 1.0),
    )


def diffusion(layers=2) -> Module:
    return Module(
        name="diffusion",
        before=LayerSpec(kind="diffusion.before", build=Noise, loads=("latents",), reads=("condition",), carries=(X,)),
        layers=_blocks("diffusion", layers, True),
        after=LayerSpec(kind="diffusion.after", build=NoiseLoss, loads=("latents",)),
        loss=LossSpec(units="elements", weight=1.3),
    )


def graph_of(kind: str, layers: int = 3) -> ModelGraph:
    """A model graph by the name of its kind, see `GRAPHS`."""
    features = Flow(source="vision", tensor="features", destination="language", name="vision")
    hidden = Flow(source="language", tensor="hidden", destination="diffusion", name="condition")
    match kind:
        case "one module":
            return ModelGraph(modules=(language(layers + 1),))
        case "encoder":
            return ModelGraph(modules=(encoder(layers=layers), language(layers, reads=("vision",))), flows=(features,))
        case "two encoders":
            sound = Flow(source="audio", tensor="features", destination="language", name="audio")
            modules = (encoder(layers=layers), encoder("audio", layers), language(layers, reads=("vision", "audio")))
            return ModelGraph(modules=modules, flows=(features, sound))
        case "diffusion":
            return ModelGraph(modules=(language(layers, sends=True), diffusion(layers)), flows=(hidden,))
        case "detached":
            modules = (language(layers, sends=True, detached=True), diffusion(layers))
            return ModelGraph(modules=modules, flows=(hidden,))
        case "encoder and diffusion":
            modules = (encoder(layers=layers), language(layers, reads=("vision",), sends=True), diffusion(layers))
            return ModelGraph(modules=modules, flows=(features, hidden))
        case "frozen encoder":
            modules = (encoder(layers=layers, trainable=False), language(layers, reads=("vision",)))
            return ModelGraph(modules=modules, flows=(features,))
        case "two tensors":
            extra = Flow(source="vision", tensor="extra", destination="language", name="extra")
            modules = (encoder(layers=layers, extra=True), language(layers, reads=("vision", "extra")))
            return ModelGraph(modules=modules, flows=(features, extra))
        case "skip":
            residual = Flow(source="language", tensor="skipped", destination="language", name="residual")
            return ModelGraph(modules=(language(max(4, layers), skip=True),), flows=(residual,))
        case "early features":
            residual = Flow(source="vision", tensor="skipped", destination="vision", name="residual")
            modules = (early_encoder(layers), language(layers, reads=("vision",)))
            return ModelGraph(modules=modules, flows=(features, residual))
        case "tied":
            modules = (encoder(layers=layers), language(layers, reads=("vision",), tied=True))
            return ModelGraph(modules=modules, flows=(features,))
    raise AssertionError(kind)


GRAPHS = (
    "one module",
    "encoder",
    "two encoders",
    "diffusion",
    "detached",
    "encoder and diffusion",
    "frozen encoder",
    "two tensors",
    "skip",
    "early features",
    "tied",
)

BATCHES = ("no images", "images in one", "one microbatch", "few microbatches", "uneven", "mixed")


def batch_of(kind: str, graph: ModelGraph, workers: int, seed: int, step: int = 0) -> Batch:
    """A batch of documents by the name of its kind: `BATCHES`."""
    draw = random.Random(seed)
    num_microbatches = {"one microbatch": 1, "few microbatches": max(1, workers - 1)}.get(kind, draw.randint(3, 5))
    chosen = draw.randrange(num_microbatches)
    samples: list[Sample] = []
    microbatches = []
    for number in range(num_microbatches):
        members = []
        for position in range(draw.randint(1, 2)):
            images = {"no images": 0, "images in one": 3 if number == chosen else 0}.get(kind, draw.randint(0, 3))
            supervised = None
            if kind == "uneven":
                supervised = 500 if number == chosen and position == 0 else 1
            members.append(len(samples))
            samples.append(_document(graph, draw, step * 1000 + len(samples), images, supervised))
        microbatches.append(tuple(members))
    return Batch(step=step, samples=tuple(samples), microbatches=tuple(microbatches))


def load(items: Sequence[Item], records: Mapping[str, int], names: Sequence[str]) -> dict[str, Tensor]:
    """Content that follows from the item's name: what a data set would supply."""
    return {name: torch.cat([_content(item, name) for item in items]) for name in names}


def _blocks(name: str, layers: int, trainable: bool) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(kind=f"{name}.block", build=Mix, carries=(X,), trainable=trainable) for _ in range(layers))


def _document(graph: ModelGraph, draw: random.Random, number: int, images: int, supervised: int | None) -> Sample:
    items: list[Item] = []
    sources = []
    placeholders = {}
    for name in ("vision", "audio"):
        count = images if name == "vision" else draw.randint(0, 2) * (images > 0)
        if name in graph.by_name:
            for position in range(count):
                rows = draw.randint(2, 6)
                features = draw.randint(1, rows)
                sizes = {"tokens": rows, "features": features}
                sources.append(len(items))
                items.append(Item(task="main", draw=number, module=name, position=position, sizes=sizes))
                placeholders[name] = placeholders.get(name, 0) + features
    text = draw.randint(1, 6) if supervised is None else supervised
    sizes = {
        "tokens": sum(placeholders.values()) + text,
        "supervised": text if supervised is not None else draw.randint(0, text),
        "vision": placeholders.get("vision", 0),
        "audio": placeholders.get("audio", 0),
    }
    language_at = len(items)
    items.append(Item(task="main", draw=number, module="language", position=0, sizes=sizes))
    links = [(source, language_at) for source in sources]
    if "diffusion" in graph.by_name:
        for position in range(draw.randint(0, 2)):
            rows = draw.randint(1, 4)
            sizes = {"tokens": rows, "elements": 2 * rows}
            links.append((language_at, len(items)))
            items.append(Item(task="main", draw=number, module="diffusion", position=position, sizes=sizes))
    return Sample(task="main", draw=number, record=number, items=tuple(items), links=tuple(links))


def _content(item: Item, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(item.name, name))
    rows = item.sizes["tokens"]
    match name:
        case "pixels":
            return torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        case "latents":
            return torch.randn(rows, 2, generator=generator, dtype=torch.float64)
        case "tokens":
            vision, audio = item.sizes["vision"], item.sizes["audio"]
            tokens = torch.randint(2, VOCABULARY, (rows,), generator=generator)
            tokens[:vision] = 0
            tokens[vision : vision + audio] = 1
            return tokens[torch.randperm(rows, generator=generator)]
        case "labels":
            labels = torch.full((rows,), -100)
            count = item.sizes["supervised"]
            labels[rows - count :] = torch.randint(0, VOCABULARY, (count,), generator=generator)
            return labels
    raise AssertionError(name)
