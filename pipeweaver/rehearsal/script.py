"""What the workers of a rehearsal are told, and what they tell: two kinds of files in one folder.

script          the scenes in their order, the same for all workers
report-RANK     what each worker measured, step by step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pipeweaver.model.graph import ModelGraph
from pipeweaver.rehearsal.stand_in import Tensors, shrunk, tensors_of
from pipeweaver.schedule.ir import Plan, Span


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one placement: steps[s][r] is the plan of replica r. `tensors[c]` are those of chunk c."""

    dtype: str
    tensors: tuple[Tensors, ...]
    steps: tuple[tuple[Plan, ...], ...]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A rehearsal of several scenes by the same workers. `watchdog_s` as in a job."""

    scenes: tuple[Scene, ...]
    watchdog_s: float

    @property
    def steps(self) -> list[tuple[Plan, ...]]:
        """Of all scenes, in the order in which they are run."""
        return [plans for scene in self.scenes for plans in scene.steps]

    @property
    def num_workers(self) -> int:
        return self.steps[0][0].placement.workers

    @property
    def num_replicas(self) -> int:
        return len(self.steps[0])


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one worker, nanoseconds from the step's start.

    `spans[i]` belongs to the worker's i-th action, `moved` to the transfers that it waited for, by number: from when
    both ends had posted and the link was free.
    """

    spans: tuple[Span, ...]
    moved: dict[int, Span]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker measured. `overslept_ns`: by how much its sleeps were too long."""

    steps: tuple[StepTimes, ...]
    overslept_ns: tuple[int, ...]


def scene(graph: ModelGraph, steps: Sequence[Sequence[Plan]], *, dtype: str) -> Scene:
    """Plans as the workers of a rehearsal run them; steps[s][r] is the plan of replica r."""
    return Scene(
        dtype=dtype,
        tensors=tuple(tensors_of(graph, chunk) for chunk in steps[0][0].placement.chunks),
        steps=tuple(tuple(map(shrunk, plans)) for plans in steps),
    )


def write_script(folder: Path, script: Script) -> None:
    (folder / "script").write_bytes(msgspec.msgpack.encode(script))


def read_script(folder: Path) -> Script:
    return msgspec.msgpack.decode((folder / "script").read_bytes(), type=Script)


def write_report(folder: Path, rank: int, report: Report) -> None:
    (folder / f"report-{rank}").write_bytes(msgspec.msgpack.encode(report))


def read_reports(folder: Path, num_ranks: int) -> Iterator[Report]:
    for rank in range(num_ranks):
        yield msgspec.msgpack.decode((folder / f"report-{rank}").read_bytes(), type=Report)
