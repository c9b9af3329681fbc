"""Batches of several tasks: in each step one batch of every task, put together.

    batches = TaskBatches({"caption": Loader(...), "text": Loader(...)})
    batches.peek(1).samples     # of both tasks, two steps ahead
    next(batches)               # step 0

Every task has a loader of its own, with a position of its own in its data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from pipeweaver.data.items import Batch
from pipeweaver.data.loader import Cursor, Loader


class TaskBatches:
    """From `step` on one batch of each task, until a task has no more. Safe to use from several threads."""

    def __init__(self, loaders: Mapping[str, Loader], step: int = 0) -> None:
        assert loaders, "no task, no batch"
        self.loaders = dict(loaders)
        self._step = step
        self._lock = threading.RLock()

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Each task's position behind the last batch that was handed out."""
        return {task: loader.cursor for task, loader in self.loaders.items()}

    def peek(self, ahead: int = 0) -> Batch | None:
        """The batch that the next but `ahead` call of `next` returns; None where a task has no more."""
        with self._lock:
            found = [loader.peek(ahead) for loader in self.loaders.values()]
            batches = [batch for batch in found if batch is not None]
            return joined(batches, self._step + ahead) if len(batches) == len(found) else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            batch = self.peek()
            if batch is None:
                raise StopIteration
            for loader in self.loaders.values():
                next(loader)
            self._step += 1
            return batch


def joined(batches: Sequence[Batch], step: int) -> Batch:
    """One batch of the samples of several, microbatches as they are, task by task."""
    microbatches: list[tuple[int, ...]] = []
    first = 0
    for batch in batches:
        microbatches += [tuple(first + i for i in microbatch) for microbatch in batch.microbatches]
        first += len(batch.samples)
    return Batch(
        step=step,
        samples=tuple(sample for batch in batches for sample in batch.samples),
        microbatches=tuple(microbatches),
    )
