"""Executed plans on disk, written by the first rank and replayed bit for bit.

    plans/index.jsonl       {"number": 12, "file": "000012.json.gz", "data": "train", "step": 11, "fingerprints": [...]}
    plans/000012.json.gz    the plans of all replicas: seed, rounds, costs, prediction and all

Replayed plans are proven again before use, since files can be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pipeweaver.data.items import Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime.ahead import Order
from pipeweaver.runtime.exchange import Data
from pipeweaver.schedule.files import load_plans, save_plans
from pipeweaver.schedule.ir import Plan
from pipeweaver.schedule.verify import verify


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the index: an order, and the fingerprints of its plans, replica by replica."""

    number: int
    file: str
    data: Data
    step: int
    is_last: bool
    fingerprints: tuple[str, ...]


class Recorder:
    """Writes orders to `folder`, in place of what an earlier run recorded there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json.gz"):
            path.unlink()
        self._folder = folder
        self._index = (folder / "index.jsonl").open("wb")

    def write(self, number: int, order: Order) -> None:
        """An order that was executed."""
        file = f"{number:06d}.json.gz"
        save_plans(order.plans, self._folder / file)
        entry = Entry(
            number=number,
            file=file,
            data=order.data,
            step=order.step,
            is_last=order.is_last,
            fingerprints=tuple(plan.fingerprint for plan in order.plans),
        )
        # The line comes after the file that it speaks of: a run that is killed leaves no line without one.
        self._index.write(msgspec.json.encode(entry) + b"\n")
        self._index.flush()

    def close(self) -> None:
        self._index.close()


def read_index(folder: Path) -> list[Entry]:
    """The recorded orders in sequence. Raises ValueError if there are none or a line is not an entry."""
    path = folder / "index.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no recorded plans: there is no {path.name}")
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"{path} is empty: no order was executed")
    return entries


def load_recorded(folder: Path, entry: Entry) -> tuple[Plan, ...]:
    """The plans of an entry. Raises ValueError, naming the file, if they are not those that were executed."""
    plans = load_plans(folder / entry.file)
    found = tuple(plan.fingerprint for plan in plans)
    if found != entry.fingerprints:
        raise ValueError(
            f"{folder / entry.file}: fingerprints {', '.join(found)}, but {', '.join(entry.fingerprints)} were "
            "executed; the file was changed, or comes from another version"
        )
    return plans


def replay(
    folder: Path,
    entries: Sequence[Entry],
    graph: ModelGraph,
    *,
    num_replicas: int,
    num_workers: int,
    dtype: str,
    budget_bytes: int | None,
) -> Iterator[Order]:
    """The orders again, each verified. Raises ValueError, naming the file, if one does not fit the job."""
    for entry in entries:
        plans = load_recorded(folder, entry)
        if (len(plans), plans[0].placement.workers) != (num_replicas, num_workers):
            raise ValueError(
                f"{folder / entry.file} was recorded with {len(plans)} replicas of {plans[0].placement.workers} "
                f"workers; this job has {num_replicas} of {num_workers}"
            )
        # What the replicas share out is what was shared out then.
        shares = [
            Share(
                step=plan.step,
                replica=plan.replica,
                num_replicas=plan.num_replicas,
                items=plan.items,
                links=plan.links,
                microbatches=(),
                records=plan.records,
                normalisers=plan.normalisers,
            )
            for plan in plans
        ]
        verify(plans, graph, shares, dtype=dtype, budget_bytes=budget_bytes)
        yield Order(plans=plans, step=entry.step, data=entry.data, is_last=entry.is_last)
