"""Executed plans on disk, written by the first rank and replayed bit for bit.

    plans/index.jsonl       {"number": 12, "file": "000012.json.gz", "data": "train", "step": 11, "fingerprints": [...]}
    plans/000012.json.gz    the plans of all replicas: seed, rounds, costs, prediction and all

Replayed plans are proven again before use, since files can be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pipeweaver.data.items import Item, Sample, Share
from pipeweaver.model.graph import ModelGraph
from pipeweaver.planner.assign import count_normalisers
from pipeweaver.runtime.ahead import Order
from pipeweaver.runtime.exchange import Data
from pipeweaver.runtime.process import writing
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
        with writing(self._folder):
            self._write(number, order, file)

    def close(self) -> None:
        self._index.close()

    def _write(self, number: int, order: Order, file: str) -> None:
        save_plans(order.records, self._folder / file)
        entry = Entry(
            number=number,
            file=file,
            data=order.data,
            step=order.step,
            is_last=order.is_last,
            fingerprints=tuple(plan.fingerprint for plan in order.records),
        )
        # The line comes after the file that it speaks of: a run that is killed leaves no line without one.
        self._index.write(msgspec.json.encode(entry) + b"\n")
        self._index.flush()


def read_index(folder: Path) -> list[Entry]:
    """The recorded orders in sequence. Raises ValueError if there are none or a line is not an entry."""
    path = folder / "index.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no recorded plans: there is no {path.name}")
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"{path} is empty: no order was executed")
    steps = [entry.step for entry in entries if entry.data == "train"]
    for expected, step in enumerate(steps):
        if step != expected:
            raise ValueError(f"{path} goes on with step {step} where step {expected} should be: it was changed")
    return entries


def load_recorded(folder: Path, entry: Entry) -> tuple[Plan, ...]:
    """The plans of an entry. Raises ValueError, naming the file, if they are not those that were executed."""
    plans = load_plans(folder / entry.file)
    try:
        found = tuple(plan.fingerprint for plan in plans)
    except OverflowError as error:  # a number that no plan has
        raise ValueError(f"{folder / entry.file}: not a plan file: {error}") from None
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
    sample: Callable[[Data, int, str, int], Sample],
    task_set_at: Callable[[int], int],
    num_replicas: int,
    num_workers: int,
    dtype: str,
    budget_bytes: int | None,
) -> Generator[Order]:
    """The orders again, each verified. `sample(data, record, task, draw)` is what the job's data has there,
    `task_set_at` the number of the task set that a step belongs to: a new one is when chunks may change places.

    Raises ValueError, naming the file, if one does not fit the job.
    """
    placement, current = None, 0
    for entry in entries:
        path = folder / entry.file
        plans = load_recorded(folder, entry)
        if not plans or (len(plans), plans[0].placement.workers) != (num_replicas, num_workers):
            workers = plans[0].placement.workers if plans else 0
            raise ValueError(
                f"{path} was recorded with {len(plans)} replicas of {workers} workers; this job has {num_replicas} of "
                f"{num_workers}"
            )
        is_training = entry.data == "train"
        if any(plan.forward_only == is_training or (is_training and plan.step != entry.step) for plan in plans):
            what = f"step {entry.step}" if is_training else "an evaluation"
            raise ValueError(f"{path} is not a plan of {what}, as the index of {folder} says")
        task_set = task_set_at(entry.step if entry.data == "train" else entry.step - 1)
        if placement is None or task_set != current:
            placement, current = plans[0].placement, task_set
        if plans[0].placement != placement:
            raise ValueError(f"{path} has its chunks on other workers than {entries[0].file}: it is of another run")
        try:
            shares = shares_of(plans, graph, partial(sample, entry.data))
            proven = verify(plans, graph, shares, dtype=dtype, budget_bytes=budget_bytes)
        except ValueError as error:
            raise ValueError(f"{path} is no plan for this job: {error}") from None
        yield Order(plans=proven, step=entry.step, data=entry.data, is_last=entry.is_last)


def shares_of(plans: Sequence[Plan], graph: ModelGraph, sample: Callable[[int, str, int], Sample]) -> list[Share]:
    """What the replicas share out: the samples that the plans, or heads of flat ones, name, as `sample(record, task, draw)`
    has them.

    Raises ValueError if items or links of the plans are not those of the samples.
    """
    samples: list[Sample] = []
    for plan in plans:
        mine: dict[str, Sample] = {}
        for name, record in plan.records.items():
            task, _, draw = name.rpartition("/")
            mine[name] = sample(record, task, int(draw))
        samples += mine.values()
        items: list[Item] = []
        links: list[tuple[int, int]] = []
        for one in mine.values():
            links += [(len(items) + a, len(items) + b) for a, b in one.links]
            items += one.items
        # As samples are shared out. Names are looked at where items come otherwise: making them takes longer than this.
        if plan.items != tuple(items) or plan.links != tuple(links):
            _check_names(plan, mine)
    normalisers = count_normalisers(graph, samples)
    return [
        Share(
            step=plan.step,
            replica=plan.replica,
            num_replicas=len(plans),
            items=plan.items,
            links=plan.links,
            microbatches=(),
            records=plan.records,
            normalisers=normalisers,
        )
        for plan in plans
    ]


def _check_names(plan: Plan, samples: Mapping[str, Sample]) -> None:
    """Items and links of the plan are those of its samples, by name, in whatever order; raises ValueError if not."""
    items = {item.name: item for one in samples.values() for item in one.items}
    links = {name: [(one.items[a].name, one.items[b].name) for a, b in one.links] for name, one in samples.items()}
    for item in plan.items:
        if items.get(item.name) != item:
            raise ValueError(
                f"it has item {item.name} of sizes {item.sizes}, and the job's data "
                + (f"{items[item.name].sizes} there" if item.name in items else "no such item")
                + "; are data, seed or token budget others than they were?"
            )
    if len(plan.items) != len(items):
        raise ValueError(f"it has {len(plan.items)} items, the job's data {len(items)} for the same samples")
    # Their order is that of the rows that they bring.
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in links}
    for a, b in plan.links:
        source, destination = plan.items[a], plan.items[b]
        found[f"{source.task}/{source.draw}"].append((source.name, destination.name))
    if found != links:
        raise ValueError("its items are linked otherwise than in the job's data")
