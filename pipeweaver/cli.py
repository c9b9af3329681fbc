"""The command line: `pipeweaver plan`, `train`, `calibrate`, `estimate` and `rehearse` on one TOML file, and `validate`.

Exit codes: 0 done; 1 a run that failed; 2 a mistake of the user, told in one line on stderr; 75 a hang that the
watchdog ended; 130 Ctrl-C; 143 SIGTERM while workers run.
torch is imported by what a command does, not here: `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from pipeweaver.own_code import look_beside
from pipeweaver.runtime.process import RunError

if TYPE_CHECKING:
    from pipeweaver.config import Job

app = typer.Typer(
    name="pipeweaver",
    help="Train large multimodal models, each batch on a schedule made for it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The job: what to train, on which workers.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: --set run.steps=10. May be repeated."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the files of an earlier run in the output folder.")
]

MOST_PER_CORE = 32
"""Worker processes: some hundred MiB each."""

Machine = Annotated[str, typer.Option("--machine", help="A shipped machine (H800, A100…) or a machine file.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel", min=1, help="Devices per worker.")]


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        try:
            print(f"pipeweaver {version('pipeweaver')}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            print("pipeweaver (not installed)")
        raise typer.Exit


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option("--step", min=0, help="Plan the batch of this step.")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where the bubble is, and what each lever of the policy brings.")
    ] = False,
) -> None:
    """Plan one step and show it: chunks, parts, step time, bubble, memory per worker. Trains nothing."""
    with _mistakes():
        job = _load(config, overrides)
        from pipeweaver.commands import explain_step, ready_step
        from pipeweaver.console import print_explanation, print_plan
        from pipeweaver.output import make_folder, write_plans
        from pipeweaver.runtime.compare import in_words

        _check(job)
        make_folder(job.output)
        ready = ready_step(job, step, lambda: _calibrate_first(job, config, overrides))
        plans = ready.plan()
        print_plan(plans, job.workers.memory_bytes)
        print(ready.planning.costs.coverage)
        for line in in_words(ready.candidates, job.policy.name):
            print(line)
        if explain:
            print_explanation(plans, explain_step(ready, plans))
        for path in write_plans(job.output, plans):
            print(f"wrote {path}")


@app.command()
def estimate(
    config: Config,
    overrides: Overrides = None,
    machine: Machine = "cpu",
    tensor_parallel: TensorParallel = 1,
    step: Annotated[int, typer.Option("--step", min=0, help="Estimate the batch of this step.")] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the step, down to operators, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Step time, MFU and memory of a job on a machine that need not be here. Trains and measures nothing."""
    with _mistakes():
        job = _load(config, overrides)
        _check(job, runs_here=False)
        _check_trace(trace)
        from pipeweaver.report.trace import write_trace
        from pipeweaver.runtime.process import writing
        from pipeweaver.semu.estimate import estimate as estimate_step
        from pipeweaver.semu.estimate import render
        from pipeweaver.semu.operators import insides

        found = estimate_step(job, machine, tensor_parallel=tensor_parallel, step=step)
        print("\n".join(render(found)))
        if trace is not None:
            with writing(trace):
                write_trace(trace, found.plans, insides=insides(found.costs, found.plans))
            print(f"wrote {trace}")


@app.command()
def rehearse(
    config: Config,
    overrides: Overrides = None,
    machine: Machine = "cpu",
    tensor_parallel: TensorParallel = 1,
    step: Annotated[int, typer.Option("--step", min=0, help="Begin with the batch of this step.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Rehearse so many steps.")] = 1,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace of the last step for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run a job's plans with its real workers and transfers on this machine, kernels replaced by waiting.

    Shows that every worker comes to the end, and how far the emulated times are from those of the runtime.
    """
    with _mistakes():
        job = _load(config, overrides)
        _check(job, runs_here=False)
        _check_trace(trace)
        from pipeweaver.rehearsal.job import rehearse_job
        from pipeweaver.rehearsal.report import render
        from pipeweaver.report.trace import write_trace
        from pipeweaver.runtime.process import writing

        found = rehearse_job(job, machine, tensor_parallel=tensor_parallel, steps=range(step, step + steps))
        print("\n".join(render(found)))
        if trace is not None:
            with writing(trace):
                write_trace(trace, found.steps[-1].plans, found.steps[-1].measurements)
            print(f"wrote {trace}")


@app.command()
def validate(
    measured: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Measured step times; docs/semu.md has the columns.")
    ],
    machine: Annotated[str, typer.Option("--machine", help="A shipped machine (A100, B200…) or a machine file.")],
) -> None:
    """Measured runs against the emulator: errors row by row; the last line is one JSON object."""
    with _mistakes():
        from pipeweaver.semu.validate import render
        from pipeweaver.semu.validate import validate as validate_rows

        print("\n".join(render(validate_rows(measured, machine))))


@app.command()
def calibrate(config: Config, overrides: Overrides = None) -> None:
    """Measure the model's layers and the links of this machine anew. The first plan or run does so by itself."""
    from pipeweaver.runtime import process

    if process.is_worker():
        process.tie_to_parent()
        process.run_worker(lambda: _calibrate(config, overrides))
    with _mistakes():
        job = _load(config, overrides)
        _check(job)
        code = _launch(job, "calibrate", config, overrides)
    raise typer.Exit(code)


@app.command()
def train(config: Config, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train: start the workers on this machine, or be one of them under torchrun."""
    from pipeweaver.runtime import process

    if process.is_worker():
        process.tie_to_parent()
        process.run_worker(lambda: _train(config, overrides, overwrite=overwrite))
    with _mistakes():
        job = _load(config, overrides)
        from pipeweaver.output import clear

        _check(job)
        clear(job, overwrite=overwrite)
        code = _launch(job, "train", config, overrides)
    raise typer.Exit(code)


def _train(config: Path, overrides: list[str] | None, *, overwrite: bool) -> None:
    """What one worker of `train` does; the first one shows and writes."""
    from contextlib import ExitStack

    from pipeweaver.runtime import process
    from pipeweaver.runtime.train import Observer, train

    first = os.environ["RANK"] == "0"
    # Whoever started the workers has looked at the job already, unless it was torchrun.
    looked_at = process.PARENT in os.environ
    with ExitStack() as stack:
        with process.told_once_per_host():
            job = _load(config, overrides, warn=first and not looked_at)
            if not looked_at:
                _check(job, say=first)
        observers: list[Observer] = []
        if first:
            from pipeweaver.console import Follow
            from pipeweaver.output import Output, clear, output_paths

            if not looked_at:
                clear(job, overwrite=overwrite)
            # Files are complete before they are named.
            observers.append(stack.enter_context(Follow(job.run.steps, output_paths(job))))
            observers.append(stack.enter_context(Output(job)))
        train(job, observers)


def _calibrate(config: Path, overrides: list[str] | None) -> None:
    """What one worker of `calibrate` does."""
    from pipeweaver.commands import calibrate_as_worker
    from pipeweaver.runtime import process

    with process.told_once_per_host():
        job = _load(config, overrides, warn=False)
    calibrate_as_worker(job)


def _calibrate_first(job: Job, config: Path, overrides: list[str] | None) -> None:
    if code := _launch(job, "calibrate", config, overrides):
        raise typer.Exit(code)


def _launch(job: Job, command: str, config: Path, overrides: list[str] | None, *flags: str) -> int:
    """Run a command once per worker on this machine. Returns the exit code. Raises ValueError if they are far too many."""
    from pipeweaver.cluster import available_cores
    from pipeweaver.runtime.launch import launch

    cores = len(available_cores())
    if job.workers.total > MOST_PER_CORE * cores:
        raise ValueError(
            f"{job.path}: [workers] asks for {job.workers.total} worker processes, and this machine has {cores} cores: more "
            f"than {MOST_PER_CORE} per core are not started; use fewer, or torchrun on more machines"
        )
    arguments = [argument for override in overrides or () for argument in ("--set", override)]
    return launch(
        [sys.executable, "-m", "pipeweaver", command, str(config), *arguments, *flags],
        num_workers=job.workers.total,
        threads=job.workers.threads,
    )


@contextmanager
def _mistakes() -> Iterator[None]:
    """What users do wrong, ValueError by the rules of this project, becomes one line and exit code 2."""
    try:
        yield
    except (ValueError, RunError) as error:
        if os.environ.get("PIPEWEAVER_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ValueError) else error.code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _load(config: Path, overrides: list[str] | None, *, warn: bool = True) -> Job:
    """The job; settings of it that have no effect are told on stderr, as are warnings that come later."""
    from pipeweaver.toml import read

    read(config, overrides or ())  # a file that is not there is told at once: what follows imports torch
    from pipeweaver.config import load, without_effect

    warnings.showwarning = _show_warning
    look_beside(config)
    job = load(config, overrides or ())
    for warning in without_effect(job) if warn else ():
        print(f"warning: {job.path}: {warning}", file=sys.stderr)
    return job


def _check(job: Job, *, runs_here: bool = True, say: bool = True) -> None:
    """Whether the job can run, as `commands.check`; if so, and if that is new here, that kernels will be compiled.

    `say`: whether this process tells what is no mistake; of several workers one does.
    """
    from pipeweaver.commands import check
    from pipeweaver.kernel_cache import is_empty

    with warnings.catch_warnings():
        if not say:
            warnings.simplefilter("ignore")
        check(job, runs_here=runs_here)
    if say and is_empty():
        print("compiling kernels, once for this version of pipeweaver: one to two minutes", file=sys.stderr)


def _check_trace(path: Path | None) -> None:
    """Whether a trace can be written there, before what it shows takes its time. Raises ValueError."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--trace {path} is a folder; name a file: --trace {path / 'trace.json'}")
    known = next(place for place in (path, *path.absolute().parents) if place.exists())
    if known != path and not known.is_dir():
        raise ValueError(f"--trace {path}: {known} is a file")
    if not os.access(known, os.W_OK):
        raise ValueError(f"--trace {path}: {known} is not writable")


_shown: set[str] = set()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What is meant for users in one line, once; warnings of libraries with their place."""
    text = f"warning: {message}"
    if "pipeweaver" not in Path(filename).parts:
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
    if text not in _shown:
        _shown.add(text)
        print(text, file=sys.stderr)
