"""Plans of equal batches are used again: the same sizes, links and microbatches, under the same costs.

A plan depends on a batch's sizes, not on which samples they are of. So the plans of an equal batch serve, with the
items of this one in the place of those:

    plan of step 3, items main/24/vision/0 main/24/language/0 …   ->   step 9, items main/71/vision/0 main/71/language/0 …
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pipeweaver.data.items import Batch, Item
from pipeweaver.runtime.ahead import predicted_ns
from pipeweaver.schedule.flat import FlatPlan

MOST_KEPT = 16
"""Batches whose plans are kept, those used last."""


class _Kept(NamedTuple):
    batch: Batch
    plans: tuple[FlatPlan, ...]
    is_final: bool


class Reuse:
    """Plans by what they depend on. For one run: model, placement, policy and uncorrected costs are always the same."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def key(self, batch: Batch, forward_only: bool, factors: Mapping[str, float]) -> bytes:
        """Equal for batches with equal plans."""
        samples = [
            (sample.task, [(item.module, item.position, item.sizes) for item in sample.items], sample.links)
            for sample in batch.samples
        ]
        content = msgspec.msgpack.encode((samples, batch.microbatches, forward_only, sorted(factors.items())))
        return hashlib.sha256(content).digest()

    def find(self, key: bytes, batch: Batch) -> tuple[tuple[FlatPlan, ...], bool]:
        """(plans for `batch` by those of an equal one, whether a search for better ones has ended); (), False if there
        was none."""
        kept = self._kept.get(key)
        if kept is None:
            return (), False
        self._kept.move_to_end(key)
        return tuple(_renamed(plan, kept.batch, batch) for plan in kept.plans), kept.is_final

    def keep(self, key: bytes, batch: Batch, plans: tuple[FlatPlan, ...], *, is_final: bool) -> None:
        """Plans that `batch` is trained with; the better ones stay."""
        kept = self._kept.get(key)
        if kept is None or predicted_ns(plans) < predicted_ns(kept.plans):
            self._kept[key] = _Kept(batch, plans, is_final)
        elif is_final:
            self._kept[key] = kept._replace(is_final=True)
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)


def _renamed(plan: FlatPlan, old: Batch, new: Batch) -> FlatPlan:
    """The plan of the `old` batch for the items of the `new` one."""
    items: dict[str, Item] = {}
    records: dict[str, tuple[str, int]] = {}
    for before, after in zip(old.samples, new.samples, strict=True):
        items |= {item.name: other for item, other in zip(before.items, after.items, strict=True)}
        records[f"{before.task}/{before.draw}"] = (f"{after.task}/{after.draw}", after.record)
    head = msgspec.structs.replace(
        plan.head,
        step=new.step,
        items=tuple(items[item.name] for item in plan.head.items),
        records=dict(records[name] for name in plan.head.records),
    )
    return replace(plan, head=head)
