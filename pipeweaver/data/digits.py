"""Built-in data: documents of text and images of real handwritten digits, endless and varied.

Each image is followed by its digit's name, so that reading it is learned and can be measured. A document:

    bos "Notes from the post office. " <image 6x6> "three " <image 10x10> "seven " eos

Its sample has two vision items (36 and 100 patches; 9 and 25 features, hence 9 and 25 placeholders) and
one language item. Loss is on all text, names included, or on the names only. Each name is an answer span.
The images are scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits" test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.dataset import Bound
from pipeweaver.data.images import image_sizes, to_patches
from pipeweaver.data.items import Item, Sample
from pipeweaver.data.sequence import Piece, TokenSequence, build_sequence
from pipeweaver.data.tokens import ByteTokenizer

Split = Literal["train", "held-out"]
Kind = Literal["documents", "text", "text-to-image", "pairs"]

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONED = ("text-to-image", "pairs")
"""Kinds whose records are one image and a caption of it."""
HELD_OUT_SHARE = 0.2
"""Of the images; which ones is fixed, whatever the seed."""
TEXT_ONLY_SHARE = 0.25
MEAN_IMAGES = 4.5
_SENTENCES = (
    "Notes from the post office. ",
    "A clerk wrote these by hand. ",
    "Each was scanned once. ",
    "The ink was still wet. ",
    "Read them from left to right. ",
    "Nobody remembers the order. ",
    "The sheet had no lines. ",
    "Some are larger than others. ",
)


class _Picture(NamedTuple):
    image: int
    pixels: int


_Document = tuple[str | _Picture, ...]


class _Record(NamedTuple):
    document: _Document
    sequence: TokenSequence


class DigitsDataset:
    """Records drawn as a pure function of (seed, split, record).

    `kind` "documents": a quarter are text only, the others have a number of images that is geometric
    from 1 with mean 4.5, at most `max_images`, at a size drawn from `pixels` each. "text": text only.
    "text-to-image": a caption, linked to a diffusion item that holds the image ("latents"). "pairs": an image and
    a caption, for a tower each, both linked to a `match` item; pairs of one digit and size are of one class.
    No document is longer than `max_tokens`: what does not fit is not drawn. `supervise` "names" puts the
    loss on the digits' names only. Image values are scaled to [-1, 1]. Raises ValueError for impossible
    settings.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        seed: int = 0,
        num_records: int | None = None,
        kind: Kind = "documents",
        max_tokens: int = 512,
        max_images: int = 16,
        pixels: Sequence[int] = (24, 32, 40),
        patch: int = 4,
        merge: int = 2,
        supervise: Literal["text", "names"] = "text",
        vision: str = "vision",
        language: str = "language",
        diffusion: str = "diffusion",
        text: str = "text",
        match: str = "match",
    ) -> None:
        self.split, self.seed, self.kind, self.num_records = split, seed, kind, num_records
        self.max_tokens, self.max_images, self.pixels = max_tokens, max_images, tuple(pixels)
        self.patch, self.merge, self.supervise = patch, merge, supervise
        self.vision, self.diffusion, self.match = vision, diffusion, match
        self.language = text if kind == "pairs" else language
        self._tokenizer = ByteTokenizer()
        if split not in ("train", "held-out"):
            raise ValueError(f"there is no split {split!r}; there are train and held-out")
        if seed < 0:
            raise ValueError(f"seed = {seed}: must be 0 or more")
        check_settings(
            kind=kind,
            num_records=num_records,
            max_tokens=max_tokens,
            max_images=max_images,
            pixels=pixels,
            patch=patch,
            merge=merge,
            supervise=supervise,
        )
        self._images = _split(split)
        self._record = lru_cache(maxsize=1024)(self._build)

    @property
    def vocabulary(self) -> int:
        return self._tokenizer.vocabulary

    @property
    def placeholders(self) -> dict[str, int]:
        return {self.vision: self._tokenizer.image} if self.kind == "documents" else {}

    @property
    def widths(self) -> dict[str, int]:
        names = {"documents": "pixels", "text": "", "text-to-image": "latents", "pairs": "pixels"}
        return {names[self.kind]: self.patch**2} if names[self.kind] else {}

    def bound(self, module: str) -> Bound:
        largest = max(self.pixels)
        if module == self.language:
            return Bound(self.max_tokens, 1)
        if module == self.vision and self.kind == "documents":
            return Bound(self.max_images * (largest // self.patch) ** 2, self.max_images)
        if module == (self.diffusion if self.kind == "text-to-image" else self.vision) and self.kind in CAPTIONED:
            return Bound((largest // self.patch) ** 2, 1)
        if module == self.match and self.kind == "pairs":
            return Bound(1, 1)
        return Bound(0, 0)

    def describe(self, record: int) -> str:
        return f"record {record} of the {self.split} digits"

    def sample(self, record: int, *, task: str = "main", draw: int = 0) -> Sample:
        document, sequence = self._record(record)
        items = [
            Item(task=task, draw=draw, module=self._image_module, position=position, sizes=self._sizes(picture))
            for position, picture in enumerate(_pictures(document))
        ]
        sizes = {"tokens": len(sequence.tokens), "supervised": sequence.supervised}
        text = Item(task=task, draw=draw, module=self.language, position=0, sizes=sizes)
        if self.kind == "text-to-image":
            return Sample(task=task, draw=draw, record=record, items=(text, *items), links=((0, 1),))
        if self.kind == "pairs":
            pair = Item(task=task, draw=draw, module=self.match, position=0, sizes={"tokens": 1, "pairs": 1})
            return Sample(task=task, draw=draw, record=record, items=(*items, text, pair), links=((0, 2), (1, 2)))
        links = tuple((i, len(items)) for i in range(len(items)))
        return Sample(task=task, draw=draw, record=record, items=(*items, text), links=links)

    def load(self, record: int, item: Item, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        document, sequence = self._record(record)
        if item.module == self.language:
            return {name: array for name, array in sequence._asdict().items() if name in names}
        picture = _pictures(document)[item.position]
        if item.module == self.match and self.kind == "pairs":
            number = _digits()[1][picture.image] * len(self.pixels) + self.pixels.index(picture.pixels)
            return {"classes": np.array([number], dtype=np.int64)} if "classes" in names else {}
        image = _resize(_digits()[0][picture.image], picture.pixels)
        name = "latents" if self.kind == "text-to-image" else "pixels"
        return {name: to_patches(image[None], self.patch)} if name in names else {}

    def image_numbers(self, record: int) -> tuple[int, ...]:
        """Which of scikit-learn's images the record shows, in order."""
        return tuple(picture.image for picture in _pictures(self._record(record).document))

    @property
    def _image_module(self) -> str:
        return self.diffusion if self.kind == "text-to-image" else self.vision

    def _sizes(self, picture: _Picture) -> dict[str, int]:
        side = picture.pixels // self.patch
        if self.kind == "text-to-image":
            return {"tokens": side * side, "elements": picture.pixels**2, "height": side, "width": side}
        return image_sizes(side, side, self.merge)

    def _build(self, record: int) -> _Record:
        document = self._draw(record)
        sequence = self._sequence(document)
        for array in sequence:
            array.flags.writeable = False  # it is kept and handed out again
        return _Record(document, sequence)

    def _draw(self, record: int) -> _Document:
        assert record >= 0 and (self.num_records is None or record < self.num_records), record
        random = np.random.default_rng([self.seed, ("train", "held-out").index(self.split), record])
        if self.kind in CAPTIONED:
            (picture,) = self._draw_pictures(random, 1)
            return (f"A {_size_word(picture.pixels)} {self._name(picture)}.", picture)
        pictures: list[_Picture] = []
        if self.kind == "documents" and random.random() >= TEXT_ONLY_SHARE:
            count = min(int(random.geometric(1 / MEAN_IMAGES)), self.max_images)
            pictures = self._draw_pictures(random, count)
        room = self.max_tokens - 2 - np.cumsum([0, *map(self._rows, pictures)])
        kept = pictures[: np.count_nonzero(room >= 0) - 1]
        left = int(room[len(kept)])
        before = _draw_text(random, int(random.integers(1, 2 if kept else 7)), left)
        after = _draw_text(random, int(random.integers(0, 2)), left - len(before)) if kept else ""
        return (before, *kept, after)

    def _draw_pictures(self, random: np.random.Generator, count: int) -> list[_Picture]:
        images = self._images[random.integers(0, len(self._images), count)].tolist()
        sizes = random.integers(0, len(self.pixels), count).tolist()
        return [_Picture(image, self.pixels[size]) for image, size in zip(images, sizes, strict=True)]

    def _rows(self, picture: _Picture) -> int:
        """Tokens that a picture takes in a document: its placeholders, its name, a space."""
        return (picture.pixels // self.patch // self.merge) ** 2 + len(self._name(picture)) + 1

    def _name(self, picture: _Picture) -> str:
        return NAMES[_digits()[1][picture.image]]

    def _sequence(self, document: _Document) -> TokenSequence:
        tokenizer, text_learned = self._tokenizer, self.supervise == "text"
        pieces = [Piece([tokenizer.bos], False)]
        span = 0
        for part in document:
            if isinstance(part, str):
                pieces.append(Piece(tokenizer.encode(part), text_learned))
            elif self.kind == "documents":
                features = (part.pixels // self.patch // self.merge) ** 2
                pieces.append(Piece([tokenizer.image] * features, False))
                pieces.append(Piece(tokenizer.encode(self._name(part)), True, span))
                pieces.append(Piece(tokenizer.encode(" "), text_learned))
                span += 1
        pieces.append(Piece([tokenizer.eos], text_learned))
        return build_sequence(pieces)


def check_settings(
    *,
    kind: Kind,
    num_records: int | None,
    max_tokens: int,
    max_images: int,
    pixels: Sequence[int],
    patch: int,
    merge: int,
    supervise: str,
) -> None:
    """Raise ValueError, "key = value: what would be right", if these settings allow no data."""
    for name, value in (("patch", patch), ("merge", merge), ("max_images", max_images), ("num_records", num_records)):
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: must be 1 or more")
    side = patch * merge
    if not pixels:
        raise ValueError("pixels = []: at least one size is needed")
    if any(one < side or one % side for one in pixels):
        raise ValueError(f"pixels = {list(pixels)}: each must be a multiple of patch * merge = {side}")
    if supervise == "names" and kind != "documents":
        raise ValueError(f'supervise = "names": leaves {kind} without any loss; "text" is right')
    longest_name, longest_text = max(map(len, NAMES)), max(map(len, _SENTENCES))
    needed = {
        "documents": 2 + max(longest_text, longest_name + 1 + (max(pixels) // side) ** 2),
        "text": 2 + longest_text,
        **dict.fromkeys(CAPTIONED, 2 + len("A  .") + max(len(_size_word(one)) for one in pixels) + longest_name),
    }[kind]
    if max_tokens < needed:
        raise ValueError(f"max_tokens = {max_tokens}: must be at least {needed}, what one record can need")


def _pictures(document: _Document) -> list[_Picture]:
    return [part for part in document if isinstance(part, _Picture)]


def _size_word(pixels: int) -> str:
    return {24: "small", 32: "plain", 40: "large"}.get(pixels, str(pixels))


def _draw_text(random: np.random.Generator, count: int, room: int) -> str:
    """Up to `count` sentences, as far as they fit into `room` bytes."""
    text = ""
    for index in random.integers(0, len(_SENTENCES), count):
        if len(text) + len(_SENTENCES[index]) <= room:
            text += _SENTENCES[index]
    return text


@cache
def _digits() -> tuple[NDArray[np.float32], tuple[int, ...]]:
    """(images [1797, 8, 8] in [-1, 1], digits)."""
    from sklearn.datasets import load_digits  # a second of import that runs on other data need not pay

    found = load_digits()
    images = (found.images / 8.0 - 1.0).astype(np.float32)
    return images, tuple(int(digit) for digit in found.target)


@cache
def _split(split: Split) -> NDArray[np.int64]:
    count = len(_digits()[1])
    order = np.random.default_rng(0).permutation(count)
    held_out = round(count * HELD_OUT_SHARE)
    return np.sort(order[:held_out] if split == "held-out" else order[held_out:])


def _resize(image: NDArray[np.float32], pixels: int) -> NDArray[np.float32]:
    """Linear interpolation between the centres of the pixels, the border repeated."""
    weights = _interpolation(len(image), pixels)
    return np.asarray(weights @ image @ weights.T, dtype=np.float32)


@cache
def _interpolation(size: int, pixels: int) -> NDArray[np.float32]:
    """[pixels, size]: row i holds the weights of the source pixels in target pixel i."""
    centres = np.clip((np.arange(pixels) + 0.5) * size / pixels - 0.5, 0, size - 1)
    distance = np.abs(centres[:, None] - np.arange(size)[None, :])
    return np.maximum(0.0, 1.0 - distance).astype(np.float32)
