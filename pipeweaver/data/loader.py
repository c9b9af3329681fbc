"""Hands out the batches to come, step by step, as metadata.

    loader = Loader(DigitsDataset(), backbone="language", tokens_per_microbatch=512, microbatches=8, seed=0)
    loader.peek(2)         # the batch two steps ahead, for whoever plans; changes nothing
    batch = next(loader)   # step 0
    cursor = loader.cursor # saved in a checkpoint; loader.restore(cursor) goes on exactly here

Which record a draw is, is a pure function of the seed: every epoch is a permutation of its own. An epoch's
end does not end a batch, except the last one's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeweaver.data.dataset import Dataset
from pipeweaver.data.items import Batch, Sample
from pipeweaver.data.packing import Fitted, Packing, TooLong, fit, pack


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where a loader stands: the next batch is `step`, its first sample is `draw`.

    `seed` and `num_records` say what the position is valid for.
    """

    step: int = 0
    draw: int = 0
    seed: int = 0
    num_records: int | None = None


class Loader:
    """Batches of one task, endlessly or for a number of epochs.

    `tokens_per_microbatch` counts rows of module `backbone`; `max_items` limits the items of a module in
    one microbatch. `too_long` decides at once, in the scan, what becomes of samples that fit into no
    microbatch. Without `shuffle` records come in order. Safe to use from several threads.
    Raises ValueError as `packing.fit` does.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        backbone: str,
        tokens_per_microbatch: int,
        microbatches: int,
        task: str = "main",
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        max_items: Mapping[str, int] | None = None,
        too_long: TooLong = "error",
    ) -> None:
        if epochs is not None and (epochs < 1 or dataset.num_records is None):
            raise ValueError(
                f"epochs is {epochs}; it must be 1 or more"
                if dataset.num_records is not None
                else f"epochs is {epochs}, but the data set is endless; set num_records, or count steps"
            )
        self.packing = Packing(
            backbone=backbone,
            tokens=tokens_per_microbatch,
            microbatches=microbatches,
            max_items=dict(max_items or {}),
        )
        self.task, self.seed, self.shuffle, self.epochs = task, seed, shuffle, epochs
        self.fitted: Fitted = fit(dataset, self.packing, too_long)
        self._lock = threading.RLock()
        self._permutation = lru_cache(maxsize=2)(self._permute)
        self._cursor = Cursor(seed=seed, num_records=self._num_records)
        self._ahead: deque[tuple[Batch, Cursor]] = deque()

    @property
    def cursor(self) -> Cursor:
        """The position behind the last batch that was handed out."""
        return self._cursor

    def restore(self, cursor: Cursor) -> None:
        """Go on from a saved position. Raises ValueError if it belongs to other data or another seed."""
        if (cursor.seed, cursor.num_records) != (self.seed, self._num_records):
            raise ValueError(
                f"the saved position is for seed {cursor.seed} and {_records(cursor.num_records)}, "
                f"this run has seed {self.seed} and {_records(self._num_records)}"
            )
        with self._lock:
            self._cursor = cursor
            self._ahead.clear()

    def peek(self, ahead: int = 0) -> Batch | None:
        """The batch that the next but `ahead` call of `next` returns; None behind the last epoch."""
        assert ahead >= 0, ahead
        with self._lock:
            while len(self._ahead) <= ahead:
                cursor = self._ahead[-1][1] if self._ahead else self._cursor
                batch, behind = self.draw(cursor)
                if batch is None:
                    return None
                self._ahead.append((batch, behind))
            return self._ahead[ahead][0]

    def draw(self, cursor: Cursor) -> tuple[Batch | None, Cursor]:
        """(the batch at a position, the position behind it), as a pure function."""
        samples, microbatches = pack(self._samples(cursor.draw), self.packing)
        if not samples:
            return None, cursor
        behind = msgspec.structs.replace(cursor, step=cursor.step + 1, draw=cursor.draw + len(samples))
        return Batch(step=cursor.step, samples=samples, microbatches=microbatches), behind

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            if self.peek() is None:
                raise StopIteration
            batch, self._cursor = self._ahead.popleft()
            return batch

    @property
    def _num_records(self) -> int | None:
        return None if self.fitted.records is None else len(self.fitted.records)

    def _samples(self, draw: int) -> Iterator[Sample]:
        while (record := self._record(draw)) is not None:
            yield self.fitted.sample(record, task=self.task, draw=draw)
            draw += 1

    def _record(self, draw: int) -> int | None:
        records = self.fitted.records
        if records is None:
            return draw
        epoch, position = divmod(draw, len(records))
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return int(records[self._permutation(epoch)[position] if self.shuffle else position])

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        assert self.fitted.records is not None
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.fitted.records))


def _records(count: int | None) -> str:
    return "endless data" if count is None else f"{count} samples"
