"""The command line: `pipeweaver plan`, `train` and `calibrate`, each on one TOML file.

Exit codes: 0 done; 1 a run that failed; 2 a mistake of the user, told in one line on stderr; 130 Ctrl-C.
torch is imported by what a command does, not here: `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
def train(config: Config, overrides: Overrides = None) -> None:
    """Train: start the workers on this machine, or be one of them under torchrun."""
    from pipeweaver.runtime import process

    if process.is_worker():
        process.tie_to_parent()
        process.run_worker(lambda: _work(config, overrides))
    with _mistakes():
        job = _load(config, overrides)
        from pipeweaver.runtime.launch import launch

        command = [sys.executable, "-m", "pipeweaver", "train", str(config)]
        command += [argument for override in overrides or () for argument in ("--set", override)]
        code = launch(command, num_workers=job.workers.total, threads=job.workers.threads)
    raise typer.Exit(code)


def _work(config: Path, overrides: list[str] | None) -> None:
    """What each worker does."""
    from pipeweaver.runtime.train import train

    train(_load(config, overrides, warn=False))


@contextmanager
def _mistakes() -> Iterator[None]:
    """What users do wrong, ValueError by the rules of this project, becomes one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("PIPEWEAVER_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _load(config: Path, overrides: list[str] | None, *, warn: bool = True) -> Job:
    """The job; settings of it that have no effect are told on stderr."""
    from pipeweaver.config import load, without_effect

    job = load(config, overrides or ())
    for warning in without_effect(job) if warn else ():
        print(f"warning: {job.path}: {warning}", file=sys.stderr)
    return job
