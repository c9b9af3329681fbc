"""From samples to microbatches under a token budget.

Samples come one by one; each goes into the first microbatch that has room for it (first-fit), and the
batch is full when a sample has room in none: that sample opens the next batch. Nothing is lost, nothing
is repeated, and a batch depends on nothing but the order of the samples.

    budget 10, 2 microbatches, samples of 6 5 3 4 2 7 tokens:   [6 3] [5 4]   and 2 opens the next batch

`fit` looks at all samples beforehand, so that one that can never fit is known before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.dataset import SEQUENCE_NAMES, Dataset, EndlessDataset
from pipeweaver.data.items import Sample
from pipeweaver.data.sequence import TokenSequence, cut_sequence

TooLong = Literal["error", "skip", "truncate"]

LOSS_UNITS = ("supervised", "elements", "pairs")
"""Item sizes that count the units of a loss."""


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is `microbatches` of at most `tokens` rows of module `backbone` each, and of at most
    `max_items[module]` items of a module each."""

    backbone: str
    tokens: int
    microbatches: int
    max_items: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {"tokens": self.tokens, "microbatches": self.microbatches}
        limits |= {f"max_items of {module}": most for module, most in self.max_items.items()}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"packing: {name} is {value}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A data set of which every sample fits into a microbatch.

    `records` are those that are used, in order; None is all of an endless data set. `truncate` says that
    samples are cut where needed. `num_unlearned` counts records left out because nothing in them is learned.
    """

    dataset: Dataset
    packing: Packing
    records: NDArray[np.int64] | None
    truncate: bool = False
    num_skipped: int = 0
    num_truncated: int = 0
    num_unlearned: int = 0

    def sample(self, record: int, *, task: str, draw: int) -> Sample:
        sample = self.dataset.sample(record, task=task, draw=draw)
        if self.truncate and excess(sample, self.packing):
            cut = truncated(self.dataset, sample, self.packing)
            if cut is None:  # only endless data, which cannot be scanned
                raise ValueError(f"{self.dataset.describe(record)}: nothing remains after truncation; raise the limits")
            sample = cut
        return sample


def fit(dataset: Dataset, packing: Packing, too_long: TooLong = "error") -> Fitted:
    """Scan all samples and decide what becomes of those that do not fit; warns with counts.

    Raises ValueError: no samples; a sample without an item of the backbone; samples that do not fit (which,
    how long, the budget, ways out); nothing to learn in any sample.
    """
    if dataset.num_records is None:
        return _fit_endless(cast(EndlessDataset, dataset), packing, too_long)
    if dataset.num_records == 0:
        raise ValueError("the data set has no samples")
    kept: list[int] = []
    large: list[tuple[int, str]] = []
    num_truncated = num_unlearned = 0
    for record in range(dataset.num_records):
        sample: Sample | None = dataset.sample(record)
        assert sample is not None
        _check_backbone(dataset, sample, packing)
        reason = excess(sample, packing)
        if reason:
            if too_long != "truncate":
                large.append((record, reason))
                continue
            num_truncated += 1
            sample = truncated(dataset, sample, packing)
        if sample is None or not _learned(sample):
            num_unlearned += 1
            continue
        kept.append(record)
    total = dataset.num_records
    if large and (too_long == "error" or len(large) == total):
        record, reason = large[0]
        raise ValueError(
            f"{dataset.describe(record)} has {reason} ({len(large)} of {total} samples do not fit). Raise the limit (tokens_per_microbatch or max_items)"
            + (', or set too_long = "skip" or "truncate"' if too_long == "error" else "")
        )
    if not kept:
        raise ValueError(f"none of the {total} samples has supervised tokens, so there is nothing to learn from")
    notes = [
        (len(large), f"skipped: too long (the first: {dataset.describe(large[0][0])})" if large else ""),
        (num_truncated, f"truncated to {packing.tokens} {packing.backbone} tokens"),
        (num_unlearned, "left out: no supervised tokens in them"),
    ]
    for count, what in notes:
        if count:
            warnings.warn(f"{count} of {total} samples {what}", stacklevel=2)
    return Fitted(
        dataset=dataset,
        packing=packing,
        records=np.array(kept, dtype=np.int64),
        truncate=too_long == "truncate",
        num_skipped=len(large),
        num_truncated=num_truncated,
        num_unlearned=num_unlearned,
    )


def pack(samples: Iterable[Sample], packing: Packing) -> tuple[tuple[Sample, ...], tuple[tuple[int, ...], ...]]:
    """(the samples of one batch, the microbatches as positions in them); consumes one sample more if there is one.

    Every sample must fit into an empty microbatch. A batch from fewer samples than fit has fewer microbatches.
    """
    taken: list[Sample] = []
    bins = [_Microbatch(packing) for _ in range(packing.microbatches)]
    for sample in samples:
        chosen = next((one for one in bins if one.has_room(sample)), None)
        if chosen is None:
            assert taken, f"sample {sample.record} does not fit into an empty microbatch"
            break
        chosen.add(len(taken), sample)
        taken.append(sample)
    return tuple(taken), tuple(tuple(one.members) for one in bins if one.members)


def excess(sample: Sample, packing: Packing) -> str:
    """What of the sample passes the limits of a microbatch, in words; empty if it fits."""
    tokens = _tokens(sample, packing.backbone)
    if tokens > packing.tokens:
        return f"{tokens} {packing.backbone} tokens, more than the {packing.tokens} of a microbatch"
    for module, most in packing.max_items.items():
        count = _count(sample, module)
        if count > most:
            return f"{count} {module} items, more than the {most} allowed in a microbatch"
    return ""


def truncated(dataset: Dataset, sample: Sample, packing: Packing) -> Sample | None:
    """The sample with its backbone sequence cut so that it fits; None if no row remains.

    An item that flows into the sequence stays whole or goes, with all its placeholders. The cut item
    keeps its former length as size "whole". Raises ValueError if cutting the sequence cannot help.
    """
    where = dataset.describe(sample.record)
    backbones = [i for i, item in enumerate(sample.items) if item.module == packing.backbone]
    if len(backbones) != 1:
        raise ValueError(f"{where}: cannot truncate a sample of {len(backbones)} {packing.backbone} items")
    (target,) = backbones
    item = sample.items[target]
    content = dataset.load(sample.record, item, SEQUENCE_NAMES)
    if any(name not in content for name in SEQUENCE_NAMES):
        raise ValueError(f"{where}: cannot truncate {packing.backbone}: it is no token sequence")
    sequence = TokenSequence(*(content[name] for name in SEQUENCE_NAMES))
    spans = _placeholder_rows(dataset, sample, target, sequence.tokens)

    # 1. The budget, and the first row of the first item beyond the number allowed.
    length = min(packing.tokens, item.sizes["tokens"])
    for module, most in packing.max_items.items():
        starts = sorted(start for source, (start, _) in spans.items() if sample.items[source].module == module)
        if len(starts) > most:
            length = min(length, starts[most])
    # 2. Never inside an item's placeholders.
    for start, stop in sorted(spans.values(), reverse=True):
        if start < length < stop:
            length = start
    if length == 0:
        return None
    # 3. Items whose rows are gone go too, and what flowed only into them.
    gone = {source for source, (start, _) in spans.items() if start >= length}
    while True:
        flows = {source for source, _ in sample.links if source not in gone}
        lost = flows - {source for source, destination in sample.links if destination not in gone}
        if not lost:
            break
        gone |= lost
    cut = cut_sequence(sequence, length)
    sizes = item.sizes | {"tokens": length, "supervised": cut.supervised, "whole": item.sizes["tokens"]}
    items = list(sample.items)
    items[target] = msgspec.structs.replace(item, sizes=sizes)
    kept = [i for i in range(len(items)) if i not in gone]
    place = {old: new for new, old in enumerate(kept)}
    result = msgspec.structs.replace(
        sample,
        items=tuple(items[i] for i in kept),
        links=tuple((place[s], place[d]) for s, d in sample.links if s in place and d in place),
    )
    left = excess(result, packing)
    if left:
        raise ValueError(f"{where}: after truncation it still has {left}")
    return result


class _Microbatch:
    """One bin of a batch that is being filled."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.members: list[int] = []
        self._tokens = 0
        self._items = dict.fromkeys(packing.max_items, 0)

    def has_room(self, sample: Sample) -> bool:
        if self._tokens + _tokens(sample, self.packing.backbone) > self.packing.tokens:
            return False
        limits = self.packing.max_items.items()
        return all(self._items[module] + _count(sample, module) <= most for module, most in limits)

    def add(self, position: int, sample: Sample) -> None:
        self.members.append(position)
        self._tokens += _tokens(sample, self.packing.backbone)
        for module in self._items:
            self._items[module] += _count(sample, module)


def _fit_endless(dataset: EndlessDataset, packing: Packing, too_long: TooLong) -> Fitted:
    """Nothing to scan: the data set's own bounds decide."""
    bound = dataset.bound(packing.backbone)
    if bound.items == 0:
        raise ValueError(f"the data set has no items of module {packing.backbone}, which is to fill the microbatches")
    excesses = []
    if bound.tokens > packing.tokens:
        excesses.append(f"{bound.tokens} {packing.backbone} tokens, more than the {packing.tokens} of a microbatch")
    for module, most in packing.max_items.items():
        if dataset.bound(module).items > most:
            excesses.append(
                f"{dataset.bound(module).items} {module} items, more than the {most} allowed in a microbatch"
            )
    if excesses and too_long != "truncate":
        raise ValueError(
            f"samples of this endless data set can have {' and '.join(excesses)}. Raise the limit (tokens_per_microbatch or max_items), let the data set "
            'draw smaller samples, set num_records so that samples can be scanned, or set too_long = "truncate"'
        )
    return Fitted(dataset=dataset, packing=packing, records=None, truncate=bool(excesses))


def _check_backbone(dataset: Dataset, sample: Sample, packing: Packing) -> None:
    if not any(item.module == packing.backbone for item in sample.items):
        found = sorted({item.module for item in sample.items})
        raise ValueError(
            f"{dataset.describe(sample.record)} has no item of module {packing.backbone}, which is to fill the "
            f"microbatches; it has items of {', '.join(found) or 'no module'}"
        )
    for item in sample.items:
        if item.sizes.get("tokens", 0) < 1:
            raise ValueError(f"{dataset.describe(sample.record)}: item {item.name} has no tokens")


def _placeholder_rows(
    dataset: Dataset, sample: Sample, target: int, tokens: NDArray[np.int64]
) -> dict[int, tuple[int, int]]:
    """For each item that keeps placeholders in the sequence: its first row and the row behind its last."""
    rows: dict[int, tuple[int, int]] = {}
    for module, placeholder in dataset.placeholders.items():
        at = np.flatnonzero(tokens == placeholder)
        used = 0
        for source in _sources(sample, target, module):
            count = sample.items[source].sizes["features"]
            rows[source] = (int(at[used]), int(at[used + count - 1]) + 1)
            used += count
    return rows


def _sources(sample: Sample, target: int, module: str) -> Iterator[int]:
    return (s for s, d in sample.links if d == target and sample.items[s].module == module)


def _tokens(sample: Sample, module: str) -> int:
    return sum(item.sizes["tokens"] for item in sample.items if item.module == module)


def _count(sample: Sample, module: str) -> int:
    return sum(item.module == module for item in sample.items)


def _learned(sample: Sample) -> int:
    return sum(item.sizes.get(unit, 0) for item in sample.items for unit in LOSS_UNITS)
