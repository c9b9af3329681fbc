"""The data section of a config file, and the data set that it describes.

    [tasks.main.data]
    type = "jsonl"
    train = "train.jsonl"
    held_out = "held-out.jsonl"
    tokenizer = "tokenizer.json"

Paths are relative to the config file's folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeweaver.data import digits, jsonl
from pipeweaver.data.dataset import Dataset
from pipeweaver.data.digits import DigitsDataset, Kind, Split
from pipeweaver.data.jsonl import JsonLinesDataset
from pipeweaver.data.tokens import ByteTokenizer, FileTokenizer, Tokenizer
from pipeweaver.own_code import call_own


class DigitsData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="digits"):
    """The built-in documents, see `digits.DigitsDataset`. `num_records` None never ends;
    `held_out_records` documents of held-out images are for evaluation."""

    kind: Kind = "documents"
    num_records: int | None = None
    held_out_records: int = 256
    max_tokens: int = 512
    max_images: int = 16
    pixels: tuple[int, ...] = (24, 32, 40)
    patch: int = 4
    merge: int = 2
    supervise: Literal["text", "names"] = "text"
    vision: str = "vision"
    language: str = "language"
    diffusion: str = "diffusion"
    text: str = "text"
    match: str = "match"

    def __post_init__(self) -> None:
        settings = msgspec.structs.asdict(self)
        for name in ("held_out_records", "vision", "language", "diffusion", "text", "match"):
            del settings[name]
        digits.check_settings(**settings)
        if self.held_out_records < 1:
            raise ValueError(f"held_out_records = {self.held_out_records}: must be 1 or more")


class JsonLinesData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="jsonl"):
    """Image-text JSON lines, see `jsonl.JsonLinesDataset`. `tokenizer` is "bytes" or a tokenizer.json;
    `bos`, `eos` and `image` name special tokens of the latter."""

    train: str
    held_out: str | None = None
    images: str | None = None
    tokenizer: str = "bytes"
    bos: str | None = None
    eos: str | None = None
    image: str = "<image>"
    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 1024 * 1024
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    turn_start: str = "{role}: "
    turn_end: str = "\n"
    cache: str | None = ".pipeweaver"
    vision: str = "vision"
    language: str = "language"

    def __post_init__(self) -> None:
        names = ("patch", "merge", "min_pixels", "max_pixels", "mean", "std")
        jsonl.check_settings(**{name: getattr(self, name) for name in names})
        if self.tokenizer == "bytes":
            for name, value in (("bos", self.bos), ("eos", self.eos)):
                if value is not None:
                    raise ValueError(f"{name} = {value}: names a token of a tokenizer file; bytes have their own")


class CustomData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    """A data set of the user's: `build` is "package.module:function", called as
    function(split=..., seed=..., folder=..., **options) and returning a `dataset.Dataset`."""

    build: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.build):
            raise ValueError(f'build = {self.build}: expected "package.module:function"')


DataConfig = DigitsData | JsonLinesData | CustomData

DATA: dict[str, type[DataConfig]] = {"digits": DigitsData, "jsonl": JsonLinesData, "custom": CustomData}
"""By the value of `type`."""


def build_dataset(config: DataConfig, split: Split, *, seed: int = 0, folder: str | Path = ".") -> Dataset:
    """The data set of a split. Equal arguments give equal data, on every worker.

    Raises ValueError for what cannot be: a split that the config does not have, missing files, bad
    samples, or a custom function that is not there or returns no data set.
    """
    folder = Path(folder)
    match config:
        case DigitsData():
            settings = msgspec.structs.asdict(config)
            held_out_records = settings.pop("held_out_records")
            if split == "held-out":
                settings["num_records"] = held_out_records
            return DigitsDataset(split=split, seed=seed, **settings)
        case JsonLinesData():
            return _json_lines(config, split, folder)
        case CustomData():
            return _custom(config, split, seed, folder)


def _json_lines(config: JsonLinesData, split: Split, folder: Path) -> JsonLinesDataset:
    path = config.train if split == "train" else config.held_out
    if path is None:
        raise ValueError("the data has no held-out samples: set held_out to a file of its own, or do not evaluate")
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = FileTokenizer(folder / config.tokenizer, image=config.image, bos=config.bos, eos=config.eos)
    settings = msgspec.structs.asdict(config)
    for name in ("train", "held_out", "tokenizer", "bos", "eos", "image"):
        del settings[name]
    settings["images"] = None if config.images is None else folder / config.images
    return JsonLinesDataset(folder / path, tokenizer=tokenizer, **settings)


def _custom(config: CustomData, split: Split, seed: int, folder: Path) -> Dataset:
    dataset: Dataset = call_own(config.build, split=split, seed=seed, folder=folder, **config.options)
    needed = ("num_records", "vocabulary", "placeholders", "widths", "describe", "sample", "load")
    missing = [attribute for attribute in needed if not hasattr(dataset, attribute)]
    if missing:
        raise ValueError(
            f'build = "{config.build}" returned {type(dataset).__name__}, which has no {", ".join(missing)}'
        )
    return dataset
