"""What a data set is: samples known from metadata, and content loaded item by item.

The loader asks for samples, long before any pixel is decoded; a worker asks for the tensors of the
items in its part, and for nothing else. Example, the part of a vision chunk:

    sample = dataset.sample(3, task="main", draw=7)         # items with sizes, and their links
    load_part({"main": dataset}, sample.items[:2], {"main/7": 3}, ("pixels",))
        ->  {"pixels": float32 [36 + 100, 16]}              # rows of main/7/vision/0, then of /1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeweaver.data.items import Item, Sample
from pipeweaver.data.sequence import TokenSequence, cut_sequence

SEQUENCE_NAMES = ("tokens", "labels", "spans")


class Dataset(Protocol):
    """Samples by record number; the same record always yields the same sample and content.

    Names of tensors, each with one row per token of its item:

    - "tokens" int64 [tokens]; "labels" int64 [tokens], already shifted: the next token of the same
      sequence, or -100; "spans" int64 [tokens]: number of the answer, within the item, that the row
      predicts a token of, or -1;
    - "pixels" and "latents" float32 [tokens, channels*patch*patch], see `images.py`.

    A token sequence holds one placeholder per feature row of the items linked to it, in their order.
    """

    @property
    def num_records(self) -> int | None:
        """Number of records, or None for an endless data set (which then is an `EndlessDataset`)."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def placeholders(self) -> Mapping[str, int]:
        """Module whose features go into a token sequence -> the token id that keeps their place."""
        ...

    @property
    def widths(self) -> Mapping[str, int]:
        """Name of a tensor with columns ("pixels") -> their number."""
        ...

    def describe(self, record: int) -> str:
        """Where a record is from, for messages: a file and line."""
        ...

    def sample(self, record: int, *, task: str = "main", draw: int = 0) -> Sample:
        """Items with their sizes, and links, from metadata alone. Cheap: called for every draw."""
        ...

    def load(self, record: int, item: Item, names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
        """Content of one item of the record, identified by its module and position."""
        ...


class Bound(NamedTuple):
    """The most rows of a module in one sample, and the most items."""

    tokens: int
    items: int


class EndlessDataset(Dataset, Protocol):
    """A data set without an end cannot be scanned, so it says how large its samples can get."""

    def bound(self, module: str) -> Bound: ...


def load_part(
    datasets: Mapping[str, Dataset], items: Sequence[Item], records: Mapping[str, int], names: Sequence[str]
) -> dict[str, Tensor]:
    """Content of `items`, packed in order: one tensor per name, the rows of all items one below the other.

    `datasets` by task; `records` maps "task/draw" to the record. Raises ValueError, naming the sample,
    where content does not have the rows that the metadata announced.
    """
    assert items, "a part without items has nothing to load"
    loaded = [_load_item(datasets[item.task], item, records[f"{item.task}/{item.draw}"], names) for item in items]
    return {name: torch.from_numpy(np.concatenate([one[name] for one in loaded])) for name in names}


def _load_item(dataset: Dataset, item: Item, record: int, names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    cut = item.sizes.get("whole")
    text = [name for name in names if name in SEQUENCE_NAMES]
    # Cutting labels takes the spans too, and the placeholders are counted in the tokens.
    wanted = [*names, *(n for n in SEQUENCE_NAMES if cut is not None and text and n not in names)]
    found = dict(dataset.load(record, item, wanted))
    where = f"{dataset.describe(record)}, item {item.name}"
    for name in wanted:
        if name not in found:
            raise ValueError(f"{where}: the data set loads no {name!r} for module {item.module}")
        expected = item.sizes["tokens"] if cut is None else cut
        if len(found[name]) != expected:
            raise ValueError(f"{where}: {name} has {len(found[name])} rows, its metadata announced {expected}")
    if "tokens" in found:
        _check_placeholders(dataset, item, record, found["tokens"])
    if cut is not None and text:
        sequence = cut_sequence(TokenSequence(*(found[name] for name in SEQUENCE_NAMES)), item.sizes["tokens"])
        found.update(zip(SEQUENCE_NAMES, sequence, strict=True))
    return found


def _check_placeholders(dataset: Dataset, item: Item, record: int, tokens: NDArray[Any]) -> None:
    sample = dataset.sample(record, task=item.task, draw=item.draw)
    (target,) = (i for i, one in enumerate(sample.items) if one.name == item.name)
    for module, placeholder in dataset.placeholders.items():
        features = sum(
            sample.items[source].sizes["features"]
            for source, destination in sample.links
            if destination == target and sample.items[source].module == module
        )
        count = int(np.count_nonzero(tokens == placeholder))
        if count != features:
            raise ValueError(
                f"{dataset.describe(record)}, item {item.name}: {count} placeholders of {module} in the tokens, "
                f"but {features} feature rows are linked to them"
            )
