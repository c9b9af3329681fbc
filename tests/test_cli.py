"""The command as a user meets it: help at once, mistakes in one line with exit code 2, a run from start to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeweaver import cli

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "examples" / "digits.toml")
SMALL = [
    f"--set={setting}"
    for setting in (
        "run.steps=2",
        "run.evaluate_every=1",
        "model.vision.layers=2",
        "model.vision.hidden=16",
        "model.vision.output=16",
        "model.language.layers=2",
        "model.language.hidden=16",
        "tasks.main.tokens_per_microbatch=256",
        "tasks.main.microbatches=2",
        "tasks.main.data.max_tokens=256",
        "tasks.main.data.held_out_records=4",
        "optimizer.warmup_steps=0",
    )
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeweaver", *arguments]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One calibration for all of these tests, kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments: str, cwd: Path = ROOT, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def test_help_names_the_commands_and_needs_no_torch() -> None:
    script = (
        "import sys, pipeweaver.cli\n"
        "try: pipeweaver.cli.app(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("plan", "train", "calibrate"):
        assert name in done.stdout


def mistake(*arguments: str) -> str:
    """What is told of a mistake: one line on stderr, after nothing on stdout, and exit code 2."""
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").rstrip()


@pytest.mark.parametrize("name", ["plan", "train", "calibrate"])
def test_mistakes_are_one_line_and_exit_code_2(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[run]\nstepz = 1\n[model.a]\ntype = 'language'\n")
    assert mistake(name, str(path)) == f"{path}:2: run.stepz = 1: unknown key; did you mean steps?"
    expected = "--set run.steps=0: run.steps = 0: expected a whole number >= 1"
    assert mistake(name, DIGITS, "--set", "run.steps=0") == expected
    disagreeing = ["model.language.vocab=258", "model.language.placeholders={vision=3}"]
    expected = f"{DIGITS}: model.language.vocab = 258: the data has 259 tokens; set it to that or more"
    assert mistake(name, DIGITS, *(f"--set={setting}" for setting in disagreeing)) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tasks.text.modules=['speech']", "tasks.text.modules = [\"speech\"]: there is no module speech; [model] defines vision"),
        ("model.flows=['vision.features -> language', 'language.hidden -> vision']", "the flows between vision, language form a cycle"),
        ("tasks.text.tokens_per_microbatch=0", "tasks.text.tokens_per_microbatch = 0: expected a whole number >= 1"),
        ("tasks.chat.weight=2", "tasks.chat.data: missing; a task needs data of its own, [tasks.chat.data]"),
        ("run.task_sets=[{tasks=['chat'], steps=300}]", "there is no task chat; there are caption, text, paint, match"),
        ("workers.replicas=2", "workers.replicas = 2: the loss of match is joint, it needs a task's whole batch in one place"),
        ("task.microbatches=2", "task: tasks have names: write [tasks.main] and [tasks.main.data], or another name"),
    ],
)  # fmt: skip
def test_mistakes_in_tasks_are_one_line_and_exit_code_2(override: str, expected: str) -> None:
    job = str(ROOT / "examples" / "multitask.toml")
    assert expected in mistake("train", job, "--set=workers.pin=false", "--set", override)


def test_a_file_that_is_not_there_is_told_without_torch() -> None:
    script = (
        "import sys, pipeweaver.cli\n"
        "try: pipeweaver.cli.app(['plan', 'nowhere.toml'])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_mistake_ends_the_process_with_exit_code_2() -> None:
    done = run("train", "nowhere.toml")
    assert done.returncode == 2
    assert done.stderr == "error: nowhere.toml: cannot be read: No such file or directory\n"


def test_far_too_many_workers_are_not_started() -> None:
    done = CliRunner().invoke(cli.app, ["calibrate", DIGITS, *SMALL, "--set=workers.replicas=100000"])
    assert done.exit_code == 2
    assert "[workers] asks for 200000 worker processes, and this machine has" in done.stderr


def test_unknown_commands_and_options() -> None:
    assert run("trian", DIGITS).returncode == 2
    done = run("train", DIGITS, "--stes", "3")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run("train", DIGITS, *SMALL, f"--set=run.output={output}")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert len((output / "evaluations.jsonl").read_text().splitlines()) == 2
    assert json.loads((output / "trace.json").read_text())["traceEvents"]
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "step 2/2  loss " in done.stdout
    assert "held-out: 4 samples, loss " in done.stdout
    for name in ("metrics.jsonl", "timeline.png", "trace.json", "plans"):
        assert f"wrote {output / name}" in done.stdout
    # A second run does not mix with the first.
    again = run("train", DIGITS, *SMALL, f"--set=run.output={output}")
    assert again.returncode == 2
    assert f"error: {output} holds an earlier run (metrics.jsonl)" in again.stderr


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("of the run that is going on\n")
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    told = mistake("train", DIGITS, *SMALL, f"--set=run.output={tmp_path / 'out'}", "--overwrite")
    os.close(descriptor)
    assert told.startswith(f"another run is writing to {tmp_path / 'out'}; choose another folder")
    assert (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["plan", "train"])
def test_an_output_folder_that_cannot_be_is_told_first(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = mistake(name, DIGITS, *SMALL, f"--set=run.output={tmp_path / 'file'}")
    assert told == f"the output folder {tmp_path / 'file'} is a file; choose another one with --set run.output=DIR"


@pytest.mark.parametrize("name", ["estimate", "rehearse"])
def test_a_trace_that_cannot_be_written_is_told_first(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = mistake(name, DIGITS, *SMALL, f"--trace={tmp_path / 'file' / 'of' / 'trace.json'}")
    assert told == f"--trace {tmp_path / 'file' / 'of' / 'trace.json'}: {tmp_path / 'file'} is a file"
    told = mistake(name, DIGITS, *SMALL, f"--trace={tmp_path}")
    assert told == f"--trace {tmp_path} is a folder; name a file: --trace {tmp_path / 'trace.json'}"


@pytest.mark.parametrize("name", ["train", "calibrate"])
def test_a_mistake_is_told_by_one_worker_of_a_host(name: str) -> None:
    told = []
    for rank in ("0", "1"):
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run(
            command(name, DIGITS, "--set=run.steps=0"),
            env=environment() | of_torchrun,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2 and done.stdout == ""
        told.append(done.stderr)
    expected = "--set run.steps=0: run.steps = 0: expected a whole number >= 1"
    assert told == [f"error: worker process 0: {expected}\n", ""]


def test_a_cache_that_cannot_be_is_told_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("plan", DIGITS, *SMALL, f"--set=run.output={tmp_path}", f"--set=costs.cache={tmp_path / 'file'}")
    assert done.returncode == 2 and "calibrating" not in done.stdout
    assert f"costs.cache: calibrations cannot be kept in {tmp_path / 'file'}: File exists; choose" in done.stderr
    assert "Traceback" not in done.stderr


def test_plans_to_replay_are_looked_for_first(tmp_path: Path) -> None:
    told = mistake("train", DIGITS, *SMALL, f"--set=run.output={tmp_path / 'out'}", f"--set=run.plans={tmp_path}")
    assert told == f"{DIGITS}: {tmp_path} holds no recorded plans: there is no index.jsonl"
    assert not (tmp_path / "out").exists()


def test_a_plan_is_shown_and_written(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run("plan", DIGITS, *SMALL, f"--set=run.output={output}", "--explain")
    assert done.returncode == 0, done.stderr
    shown = ("peak memory", "items per part", "predicted step time", "no schedule of these stages takes less")
    for words in (*shown, "where the bubble is", "what each lever brings", "still possible by other orders"):
        assert words in done.stdout
    assert sorted(path.name for path in output.iterdir()) == [
        "plan-000000.json",
        "timeline-000000.png",
        "trace-000000.json",
    ]


def test_a_budget_that_no_plan_fits_names_worker_and_missing_bytes(tmp_path: Path) -> None:
    told = mistake("plan", DIGITS, *SMALL, f"--set=run.output={tmp_path}", "--set=workers.memory=1 KB")
    assert re.search(r"worker \d needs [\d,]+ bytes .* [\d,]+ more than the budget of 1,000; ", told)
    assert told.endswith("use more workers, smaller microbatches, or a larger budget (workers.memory)")


def test_ctrl_c_ends_all_workers(tmp_path: Path) -> None:
    arguments = [*SMALL, "--set=run.steps=100000", f"--set=run.output={tmp_path / 'out'}"]
    with subprocess.Popen(
        command("train", DIGITS, *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        while line and not line.startswith("step 1/"):
            line = process.stdout.readline()
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
    assert len(workers) == 2
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its launcher"
        time.sleep(0.05)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
