"""Files that a run leaves in its folder.

    metrics.jsonl       one line per step; evaluations.jsonl one per evaluation
    plans/              every executed plan (written by the runtime)
    trace.json          predicted and measured timeline of the last step, for ui.perfetto.dev
    timeline.png        the same as a picture
    step-200/           trace and timeline of other steps, every `run.trace_every`
    tensorboard/        if asked for

`pipeweaver plan` leaves plan-000000.json, timeline-000000.png and trace-000000.json, of the step it planned.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from pipeweaver.config import Job
from pipeweaver.report.metrics import MetricsWriter
from pipeweaver.report.picture import write_picture
from pipeweaver.report.trace import write_trace
from pipeweaver.runtime.evaluate import Evaluation
from pipeweaver.runtime.process import writing
from pipeweaver.runtime.train import StepReport
from pipeweaver.schedule.files import save_plans
from pipeweaver.schedule.ir import Plan

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def output_paths(job: Job) -> list[Path]:
    """What may be there after the run, in the order in which it is worth a look."""
    names = ["metrics.jsonl", "evaluations.jsonl", "timeline.png", "trace.json", "plans", "tensorboard"]
    return [job.output / name for name in names]


def make_folder(folder: Path) -> None:
    """Raises ValueError if it cannot be made or nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be made: {error.strerror}"
        if isinstance(error, FileExistsError):
            reason = "is a file"
        raise ValueError(f"the output folder {folder} {reason}; {_ANOTHER}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"the output folder {folder} is not writable; {_ANOTHER}")


_ANOTHER = "choose another one with --set run.output=DIR"


def write_plans(folder: Path, plans: Sequence[Plan]) -> list[Path]:
    """Plans of one step as a file, a trace and a picture of what is predicted; returns their paths."""
    step = plans[0].step
    plan, picture, trace = (
        folder / name for name in (f"plan-{step:06d}.json", f"timeline-{step:06d}.png", f"trace-{step:06d}.json")
    )
    with writing(folder):
        save_plans(plans, plan)
        write_trace(trace, plans)
        write_picture(picture, plans)
    return [plan, picture, trace]


def clear(job: Job, *, overwrite: bool) -> None:
    """Make sure that the folder holds nothing of an earlier run: two runs must not mix in one file.

    Makes it if it is not there, and keeps it for this process. Raises ValueError if it cannot be written, another
    run is writing there, or it holds a run that may not be overwritten.
    """
    make_folder(job.output)
    _claim(job.output)
    if (job.output / "metrics.jsonl").exists() and not overwrite:
        raise ValueError(
            f"{job.output} holds an earlier run (metrics.jsonl); choose another folder with --set run.output=DIR, "
            "or replace it with --overwrite"
        )
    for path in [path for path in [*output_paths(job), *job.output.glob("step-*")] if path.exists()]:
        # Plans that this run replays from its own folder are its input.
        if job.run.plans and Path(job.run.plans).resolve() == path.resolve():
            continue
        with writing(job.output):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _claim(folder: Path) -> None:
    """Lock the folder as long as this process lives; nothing is left behind."""
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)  # kept open on purpose
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another run is writing to {folder}; choose another folder with --set run.output=DIR, or wait for its end"
        ) from None
    except OSError:
        os.close(descriptor)  # some network file systems have no locks


class Output:
    """Writes the files. An observer of `train`, and a context: files of the last step are written at its end,
    so that drawing them does not disturb what is measured."""

    def __init__(self, job: Job) -> None:
        self._folder = job.output
        self._trace_every = job.run.trace_every
        self._tensorboard = job.run.tensorboard
        self._metrics: MetricsWriter | None = None
        self._last: StepReport | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._folder):
            if self._metrics is not None:
                self._metrics.close()
            if self._last is not None:
                _draw(self._folder, self._last)

    def __call__(self, report: StepReport | Evaluation) -> None:
        with writing(self._folder):
            self._write(report)

    def _write(self, report: StepReport | Evaluation) -> None:
        if isinstance(report, Evaluation):
            with (self._folder / "evaluations.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(report) + b"\n")
            return
        if self._metrics is None:  # a run that never starts leaves nothing
            self._metrics = MetricsWriter(self._folder, tensorboard=self._tensorboard)
        self._metrics.write(report.metrics)
        self._last = report
        if self._trace_every and (report.metrics.step + 1) % self._trace_every == 0:
            _draw(self._folder / f"step-{report.metrics.step + 1}", report)


def _draw(folder: Path, report: StepReport) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder / "trace.json", report.plans, report.measurements)
    write_picture(folder / "timeline.png", report.plans, report.measurements)
