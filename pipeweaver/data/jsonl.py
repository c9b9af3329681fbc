"""Reader for image-text data on disk: one JSON object per line.

    {"images": ["cat.jpg"], "messages": [{"role": "user", "content": "<image> What is this?"},
                                         {"role": "assistant", "content": "A cat."}]}

"conversations" with "from" and "value" (human, gpt), and one "image" in place of "images", are read alike.
As a token sequence, with loss on what is in brackets:

    bos user: <image placeholders> What is this? eos \\n assistant: [A cat. eos] \\n

The scan parses every line and opens the header of every image; no pixel is decoded. It is kept in a file
named after the content of the JSON lines and all settings. What happens to images after the scan is found
when they are loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeweaver.data.images import fitted_size, image_sizes, to_patches
from pipeweaver.data.items import Item, Sample
from pipeweaver.data.sequence import Piece, TokenSequence, build_sequence
from pipeweaver.data.tokens import ByteTokenizer, Tokenizer

PLACEHOLDER = "<image>"
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_ERRORS_SHOWN = 10


class JsonLinesDataset:
    """Samples of one file; `images` is the folder that image paths start from, by default the file's own.

    An image is resized to multiples of patch * merge pixels, with `min_pixels` to `max_pixels` in all
    (`images.fitted_size`), as stored: orientation tags are not followed. Values are (v / 255 - mean) / std.
    `turn_start` and `turn_end` enclose each turn; special tokens in them count as such, and {role} is
    system, user or assistant. `cache` is the folder for scans, relative to the file's; None keeps none.

    Raises ValueError naming file, line and sample for all that is wrong with a line or an image's header:
    while scanning for the first ten of them together.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        images: str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        patch: int = 14,
        merge: int = 2,
        min_pixels: int = 56 * 56,
        max_pixels: int = 1024 * 1024,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        turn_start: str = "{role}: ",
        turn_end: str = "\n",
        cache: str | Path | None = ".pipeweaver",
        vision: str = "vision",
        language: str = "language",
    ) -> None:
        self.path = Path(path)
        self.images = self.path.parent if images is None else Path(images)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.patch, self.merge, self.min_pixels, self.max_pixels = patch, merge, min_pixels, max_pixels
        self.mean, self.std = tuple(mean), tuple(std)
        self.turn_start, self.turn_end = turn_start, turn_end
        self.vision, self.language = vision, language
        check_settings(
            patch=patch, merge=merge, min_pixels=min_pixels, max_pixels=max_pixels, mean=self.mean, std=self.std
        )
        self._check_turns()
        self._read = lru_cache(maxsize=64)(self._read_uncached)
        self._scan = self._cached_scan(None if cache is None else self.path.parent / cache)

    @property
    def num_records(self) -> int:
        return len(self._scan.offsets)

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def placeholders(self) -> dict[str, int]:
        return {self.vision: self.tokenizer.image}

    @property
    def widths(self) -> dict[str, int]:
        return {"pixels": 3 * self.patch**2}

    def describe(self, record: int) -> str:
        return _where(self.path, int(self._scan.lines[record]), record)

    def sample(self, record: int, *, task: str = "main", draw: int = 0) -> Sample:
        scan = self._scan
        first, last = scan.first_images[record : record + 2]
        items = [
            Item(task=task, draw=draw, module=self.vision, position=i, sizes=image_sizes(height, width, self.merge))
            for i, (height, width) in enumerate(scan.image_patches[first:last].tolist())
        ]
        sizes = {"tokens": int(scan.tokens[record]), "supervised": int(scan.supervised[record])}
        text = Item(task=task, draw=draw, module=self.language, position=0, sizes=sizes)
        links = tuple((i, len(items)) for i in range(len(items)))
        return Sample(task=task, draw=draw, record=record, items=(*items, text), links=links)

    def load(self, record: int, item: Item, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        conversation = self._read(record)
        if item.module == self.language:
            patches = self._patches(record)
            sequence = self._sequence(conversation, patches)
            return {name: array for name, array in sequence._asdict().items() if name in names}
        if "pixels" not in names:
            return {}
        return {
            "pixels": self._pixels(record, conversation.images[item.position], self._patches(record)[item.position])
        }

    def _patches(self, record: int) -> list[tuple[int, int]]:
        """(height, width) in patches of the record's images."""
        first, last = self._scan.first_images[record : record + 2]
        return [(height, width) for height, width in self._scan.image_patches[first:last].tolist()]

    def _pixels(self, record: int, name: str, patches: tuple[int, int]) -> NDArray[np.float32]:
        path, where = self.images / name, self.describe(record)
        with _opened(path, where) as image:
            if self._size(image) != patches:
                raise ValueError(f"{where}: image {path} has another size than when it was scanned; scan again")
            try:
                resized = image.convert("RGB").resize(
                    (patches[1] * self.patch, patches[0] * self.patch), Image.Resampling.BICUBIC
                )
            except Exception as error:  # decoders of hostile files raise whatever comes to them
                raise ValueError(f"{where}: image {path} is corrupt: {error}") from None
        values = (np.asarray(resized, dtype=np.float32) / 255.0 - self.mean) / self.std
        return to_patches(values.astype(np.float32).transpose(2, 0, 1), self.patch)

    def _size(self, image: Image.Image) -> tuple[int, int]:
        """(height, width) in patches at which an image is taken in."""
        height, width = fitted_size(
            image.height,
            image.width,
            multiple=self.patch * self.merge,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        return height // self.patch, width // self.patch

    def _sequence(self, conversation: _Conversation, patches: Sequence[tuple[int, int]]) -> TokenSequence:
        tokenizer = self.tokenizer
        pieces = [Piece([tokenizer.bos], False)] if tokenizer.bos is not None else []
        features = iter([(height // self.merge) * (width // self.merge) for height, width in patches])
        answer = 0
        for role, content in conversation.turns:
            learned = role == "assistant"
            span = answer if learned else -1
            pieces.append(Piece(tokenizer.encode(self.turn_start.replace("{role}", role), special=True), False))
            for index, text in enumerate(content.split(PLACEHOLDER)):
                if index:
                    pieces.append(Piece([tokenizer.image] * next(features), False))
                pieces.append(Piece(tokenizer.encode(text), learned, span))
            pieces.append(Piece([tokenizer.eos], learned, span))
            pieces.append(Piece(tokenizer.encode(self.turn_end, special=True), False))
            answer += learned
        return build_sequence(pieces)

    def _read_uncached(self, record: int) -> _Conversation:
        with self.path.open("rb") as file:
            file.seek(int(self._scan.offsets[record]))
            line = file.readline()
        try:
            return _parse(line, self.describe(record))
        except ValueError as error:
            raise ValueError(f"{error}; the file has changed since it was scanned") from None

    def _scan_file(self) -> _Scan:
        samples: list[tuple[int, int, int, int]] = []
        first_images = [0]
        image_patches: list[tuple[int, int]] = []
        errors: list[str] = []
        num_errors = 0
        for number, offset, line in _lines(self.path):
            where = _where(self.path, number, len(samples) + num_errors)
            try:
                conversation = _parse(line, where)
                patches = [self._header(name, where) for name in conversation.images]
                sequence = self._sequence(conversation, patches)
            except ValueError as error:
                num_errors += 1
                if num_errors <= _ERRORS_SHOWN:
                    errors.append(str(error))
                continue
            samples.append((offset, number, len(sequence.tokens), sequence.supervised))
            image_patches.extend(patches)
            first_images.append(len(image_patches))
        if errors:
            more = [f"and {num_errors - len(errors)} more"] if num_errors > len(errors) else []
            raise ValueError("\n".join(errors + more))
        if not samples:
            raise ValueError(f"{self.path}: no samples in this file")
        offsets, lines, tokens, supervised = np.array(samples, dtype=np.int64).T
        return _Scan(
            offsets=offsets,
            lines=lines,
            tokens=tokens,
            supervised=supervised,
            first_images=np.array(first_images, dtype=np.int64),
            image_patches=np.array(image_patches, dtype=np.int64).reshape(-1, 2),
        )

    def _header(self, name: str, where: str) -> tuple[int, int]:
        # Symbolic links are followed: whoever placed one inside the folder meant it.
        inside = os.path.normpath(self.images / name)
        if os.path.relpath(inside, self.images).split(os.sep)[0] == os.pardir:
            raise ValueError(f"{where}: image {name} is outside the folder {self.images}; set images to a folder above")
        with _opened(self.images / name, where) as image:
            return self._size(image)

    def _cached_scan(self, folder: Path | None) -> _Scan:
        if not self.path.is_file():
            raise ValueError(f"{self.path}: {'not a file' if self.path.exists() else 'there is no such file'}")
        if folder is None:
            return self._scan_file()
        kept = folder / f"{self.path.name}.{self._fingerprint()}.npz"
        if kept.is_file():
            try:
                with np.load(kept) as arrays:
                    return _Scan(**{name: arrays[name] for name in _Scan._fields})
            except Exception as error:  # a damaged archive raises errors of many libraries
                warnings.warn(f"{kept}: cannot read this scan ({error}); scanning again", stacklevel=3)
        scan = self._scan_file()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}.partial")
            with partial.open("wb") as file:
                np.savez(file, **scan._asdict())
            os.replace(partial, kept)  # several processes may scan at once: each file is whole or absent
        except OSError as error:
            warnings.warn(f"{kept}: cannot keep the scan, it will be made again next time ({error})", stacklevel=3)
        return scan

    def _fingerprint(self) -> str:
        settings = (
            1,  # the form of the scan
            self.tokenizer.fingerprint,
            *(self.patch, self.merge, self.min_pixels, self.max_pixels),
            *(self.turn_start, self.turn_end, os.path.abspath(self.images)),
        )
        with self.path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        content.update(repr(settings).encode())
        return content.hexdigest()[:16]

    def _check_turns(self) -> None:
        for name, text in (("turn_start", self.turn_start), ("turn_end", self.turn_end)):
            if self.tokenizer.image in self.tokenizer.encode(text, special=True):
                raise ValueError(f"{name} = {text!r}: must not contain the image token")


def check_settings(
    *, patch: int, merge: int, min_pixels: int, max_pixels: int, mean: Sequence[float], std: Sequence[float]
) -> None:
    """Raise ValueError, "key = value: what would be right", if images cannot be taken in so."""
    for name, value in (("patch", patch), ("merge", merge)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be 1 or more")
    if max_pixels < max((patch * merge) ** 2, min_pixels):
        raise ValueError(
            f"max_pixels = {max_pixels}: must be at least min_pixels = {min_pixels} "
            f"and (patch * merge)^2 = {(patch * merge) ** 2}"
        )
    if len(mean) != 3:
        raise ValueError(f"mean = {list(mean)}: must have three values, for red, green and blue")
    if len(std) != 3 or min(std) <= 0:
        raise ValueError(f"std = {list(std)}: must have three values above 0, for red, green and blue")


class _Conversation(NamedTuple):
    """Image paths, and (role, content) of each turn."""

    images: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]


class _Scan(NamedTuple):
    """Metadata of all samples. Images of sample i are rows first_images[i] to first_images[i + 1] of
    `image_patches`, which holds heights and widths in patches; `offsets` are bytes in the file, `lines` count from 1."""

    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]
    tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    first_images: NDArray[np.int64]
    image_patches: NDArray[np.int64]


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, byte offset, content) of the lines that are not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def _where(path: Path, line: int, record: int) -> str:
    return f"{path}:{line} (sample {record})"


def _opened(path: Path, where: str) -> Image.Image:
    """An image of which only the header has been read."""
    try:
        return Image.open(path)
    except FileNotFoundError:
        raise ValueError(f"{where}: image {path} is missing") from None
    except Exception as error:  # decoders of hostile files raise whatever comes to them
        raise ValueError(f"{where}: image {path} cannot be read: {error}") from None


def _parse(line: bytes, where: str) -> _Conversation:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: an object is expected, this is {type(found).__name__}")
    single = found.get("image")
    images = found.get("images") or ([] if single is None else [single])
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise ValueError(f"{where}: images must be a list of paths")
    turns = tuple(_turns(found, where))
    count = sum(content.count(PLACEHOLDER) for _, content in turns)
    if count != len(images):
        raise ValueError(f"{where}: {count} {PLACEHOLDER} placeholders in the text, but {len(images)} images")
    return _Conversation(tuple(images), turns)


def _turns(found: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    key = "messages" if "messages" in found else "conversations"
    if key not in found:
        raise ValueError(f"{where}: neither messages nor conversations; it has {', '.join(found) or 'no keys'}")
    if not isinstance(found[key], list) or not found[key]:
        raise ValueError(f"{where}: {key} must be a list of turns, and not empty")
    for index, turn in enumerate(found[key]):
        if not isinstance(turn, dict):
            raise ValueError(f"{where}: {key}[{index}] must be an object, this is {type(turn).__name__}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"{where}: {key}[{index}] has role {role!r}; known are {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"{where}: {key}[{index}] has content {content!r:.40}; a string is expected")
        yield _ROLES[role], content
