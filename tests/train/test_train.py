"""Whole runs of worker processes: however the work is cut and started, the same numbers come out."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from pipeweaver.config import load
from pipeweaver.report.metrics import read_metrics
from pipeweaver.runtime.evaluate import Evaluation
from pipeweaver.runtime.orders import recorded_entries, replayed_orders
from pipeweaver.runtime.prepare import job_datasets, job_graph, job_loaders
from pipeweaver.runtime.recorded import read_index
from tests.train.processes import alive, descendants, environment, wait_for

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).parent / "worker_process.py"
STEPS = 3

JOB = """
[run]
steps = 3
device = "cpu"
evaluate_every = 2
dtype = "float64"

[workers]
pin = false

[policy]
name = "1f1b"

[model]
flows = ["vision.features -> language"]

[model.vision]
type = "vit"
layers = 2
hidden = 16
heads = 2
patch = 4
merge = 2
channels = 1
output = 16

[model.language]
type = "language"
layers = 2
hidden = 16
heads = 2
vocab = 259
placeholders = { vision = 258 }

[optimizer]
lr = 1e-2
warmup_steps = 2

[costs]
correct = false

[tasks.main]
backbone = "language"
tokens_per_microbatch = 512
microbatches = 1

[tasks.main.data]
type = "digits"
held_out_records = 7
"""

LAUNCHER = """
import sys
from pipeweaver.runtime.launch import launch
sys.exit(launch([sys.executable, *sys.argv[3:]], num_workers=int(sys.argv[1]), grace_s=float(sys.argv[2])))
"""


def start(folder, *settings, num_workers, torchrun=False, grace_s=30.0, text=JOB):
    """A run of the job in `folder`, with other settings for some of its keys."""
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(text)
    starter = [sys.executable, "-c", LAUNCHER, str(num_workers), str(grace_s)]
    if torchrun:
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
    return subprocess.Popen(
        [*starter, str(SCRIPT), str(folder), *settings],
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Exit code and stderr."""
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def run(folder, *settings, **how):
    code, err = finish(start(folder, *settings, **how))
    assert code == 0, err
    return folder


def losses(folder):
    """Per step (loss, gradient norm), then the loss of every evaluation."""
    steps = [(step.loss, step.gradient_norm) for step in read_metrics(folder / "metrics.jsonl")]
    assert len(steps) == STEPS
    return steps, [evaluation.loss for evaluation in evaluations(folder)]


def evaluations(folder):
    lines = (folder / "evaluations.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Evaluation) for line in lines]


def parameters(folder):
    found = {}
    for path in sorted(folder.glob("parameters-*.pt")):
        for name, tensor in torch.load(path).items():
            # Replicas hold the same bits.
            assert name not in found or torch.equal(found[name], tensor)
            found[name] = tensor
    return found


def assert_same(one, other, tolerance):
    for a, b in zip(*(losses(folder) for folder in (one, other)), strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=tolerance, atol=tolerance)
    mine, others = parameters(one), parameters(other)
    assert mine.keys() == others.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The whole job in one worker."""
    return run(tmp_path_factory.mktemp("runs") / "single", num_workers=1)


def test_two_workers_train_like_one(single, tmp_path):
    two = run(tmp_path / "two", "workers.pipeline=2", num_workers=2)
    assert_same(single, two, 1e-9)
    assert len(list(two.glob("parameters-*.pt"))) == 2


def test_more_replicas_than_microbatches_under_torchrun(single, tmp_path):
    replicas = run(tmp_path / "replicas", "workers.replicas=2", num_workers=2, torchrun=True)
    assert_same(single, replicas, 1e-9)


def test_every_held_out_sample_counts_once(single):
    assert [(evaluation.step, evaluation.samples) for evaluation in evaluations(single)] == [(2, 7), (3, 7)]
    evaluated = [entry for entry in read_index(single / "out/plans") if entry.data == "held-out"]
    assert len(evaluated) > 2 and [entry.is_last for entry in evaluated].count(True) == 2
    # The same plans serve both evaluations.
    half = len(evaluated) // 2
    assert [e.fingerprints for e in evaluated[:half]] == [e.fingerprints for e in evaluated[half:]]


def test_replayed_plans_give_the_same_bits(single, tmp_path):
    settings = ("workers.pipeline=2", "run.dtype=float32")
    first = run(tmp_path / "first", *settings, num_workers=2)
    again = run(tmp_path / "again", *settings, f"run.plans={first}/out/plans", num_workers=2)
    assert losses(first) == losses(again)
    for a, b in zip(losses(first), losses(single), strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=0)
    before, after = parameters(first), parameters(again)
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    assert [e.fingerprints for e in read_index(first / "out/plans")] == [
        e.fingerprints for e in read_index(again / "out/plans")
    ]


BREAK_POLICY = """
from pipeweaver.policies import POLICIES, Policy

def plan(*arguments, **options):
    if arguments[2].step == 1:
        raise ValueError("worker 1 lacks 3 GiB; recompute more layers")
    return policy.plan(*arguments, **options)

policy = POLICIES["1f1b"]
POLICIES["1f1b"] = Policy(place=policy.place, plan=plan)
"""


def test_an_error_of_the_policy_stops_all_workers(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("break.py", "break_planner.py"):
        (folder / name).write_text(BREAK_POLICY)
    code, err = finish(start(folder, "workers.pipeline=2", num_workers=2))
    assert code == 2
    errors = [line for line in err.splitlines() if "warning: the planner had no plan" not in line]  # a busy machine
    assert errors == ["error: worker process 0: worker 1 lacks 3 GiB; recompute more layers"]
    assert len(read_metrics(folder / "metrics.jsonl")) == 1  # the step before was run and reported


SLOW_PLANNER = """
import time
time.sleep(5)
"""


def test_the_first_step_does_not_count_the_start_of_planning(single, tmp_path):
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "break_planner.py").write_text(SLOW_PLANNER)
    code, err = finish(start(folder, "workers.pipeline=2", num_workers=2))
    assert code == 0 and "warning: the planner" not in err
    assert_same(single, folder, 1e-9)
    first = read_metrics(folder / "metrics.jsonl")[0]
    assert first.waiting_ns < first.step_ns < 5e9


STOP_IN_STEP = """
import os, signal, torch
from pipeweaver.runtime.execution import Execution

perform = Execution.perform

def stop(self, action):
    if self.plan.step == 1 and int(os.environ["RANK"]) == 1 and self.at == len(self.plan.actions[1]) // 2:
        (folder / "stopping").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGNAL)
    return perform(self, action)

Execution.perform = stop
"""


def start_and_stop(folder, name, **how):
    folder.mkdir()
    (folder / "break.py").write_text(STOP_IN_STEP.replace("SIGNAL", name))
    settings = ["workers.pipeline=2", "tasks.main.microbatches=3"]
    if name == "SIGSTOP":
        settings.append("run.watchdog_s=2")
    process = start(folder, *settings, num_workers=2, **how)
    stopped = int(wait_for(lambda: (folder / "stopping").exists() and (folder / "stopping").read_text(), 90))
    pids = sorted({stopped, *descendants(process.pid)})
    assert name == "SIGKILL" or len(pids) == 3  # two workers and a planner process
    return process, pids


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_dies_or_freezes_in_a_step_ends_the_run(tmp_path, name):
    # A frozen worker uses up all the grace; the others of a killed one need little, on a machine with time for them.
    process, pids = start_and_stop(tmp_path / name, name, grace_s=30.0 if name == "SIGKILL" else 1.0)
    code, err = finish(process)
    assert code != 0
    # The other one says where it was and whom it waited for; at most one line per process and no traceback.
    assert "Traceback" not in err
    (told,) = [line for line in err.splitlines() if line.startswith("error:") and "worker 0" in line]
    assert "worker 1" in told
    wait_for(lambda: not any(map(alive, pids)), 1.0)


def test_interrupt_in_a_step_ends_all_workers_at_once(tmp_path):
    # One worker is frozen in the step, the other one waits for it in Gloo.
    process, pids = start_and_stop(tmp_path / "interrupt", "SIGSTOP")
    process.send_signal(signal.SIGINT)
    code, err = finish(process)
    assert code == 130
    assert err.splitlines()[-1] == "stopped by SIGINT" and "Traceback" not in err
    wait_for(lambda: not any(map(alive, pids)), 1.0)


def test_a_planner_killed_in_the_middle_of_a_step_changes_nothing_but_who_plans(single, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "break.py").write_text(KILL_PLANNER)
    code, err = finish(start(folder, "workers.pipeline=2", num_workers=2))
    assert code == 0, err
    (told,) = [line for line in err.splitlines() if "was ended by SIGKILL" in line]
    assert told.startswith("warning: planner process") and "it is started again" in told
    assert_same(single, folder, 1e-9)


KILL_PLANNER = """
import os, signal
from tests.train.processes import descendants
from pipeweaver.runtime.execution import Execution

perform = Execution.perform

def kill(self, action):
    if self.plan.step == 1 and not self.plan.forward_only and os.environ["RANK"] == "0" and self.at == len(self.plan.actions[0]) // 2:
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
    return perform(self, action)

Execution.perform = kill
"""


@pytest.mark.parametrize("killed", ["launcher", "first worker"])
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path, killed):
    process, pids = start_and_stop(tmp_path / "run", "SIGSTOP", grace_s=1.0)
    first = process.pid if killed == "launcher" else min(pids)
    os.kill(first, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: not any(map(alive, pids)), 10.0)


FREEZE_BEFORE_STEPS = """
import os, signal
from pipeweaver.runtime import join
join.LEAST_PATIENCE_S = 4.0  # the test waits for as long
calibrated = train.calibrated_costs

def freeze(*arguments, transport, **options):
    if int(os.environ["RANK"]) == FROZEN:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.barrier()
    return calibrated(*arguments, transport=transport, **options)

train.calibrated_costs = freeze
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_freezes_before_the_first_step_ends_the_run(tmp_path, rank):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "break.py").write_text(FREEZE_BEFORE_STEPS.replace("FROZEN", str(rank)))
    process = start(folder, "workers.pipeline=2", "run.watchdog_s=2", num_workers=2, grace_s=1.0)
    code, err = finish(process)
    assert code != 0 and "Traceback" not in err
    assert f"worker process {rank} of 2 has given no sign of life" in err


DIE_BEFORE_STEPS = FREEZE_BEFORE_STEPS.replace("SIGSTOP", "SIGKILL")


def test_a_worker_that_dies_before_the_first_step_is_told_in_lines(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "break.py").write_text(DIE_BEFORE_STEPS.replace("FROZEN", "1"))
    code, err = finish(start(folder, "workers.pipeline=2", num_workers=2))
    assert code == 1 and "Traceback" not in err
    assert re.search(r"error: worker process 0: lost another worker: \w[^\n]*\n", err)
    assert "worker process 1 of 2" in err and "was ended by SIGKILL" in err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], None),
        (["run.steps=2"], None),
        (
            ["run.seed=1"],
            r"000001.json.gz is no plan for this job: it has item main/0/\w+/0 of sizes .* are data, seed",
        ),
        (
            ["tasks.main.data.held_out_records=2"],
            "is no plan for this job: the job's data has no record 2 of task main",
        ),
        (["model.language.layers=3"], "is no plan for this job: stages"),
        (["run.dtype=float32"], "is no plan for this job: edges"),
        (["workers.pipeline=2"], "was recorded with 1 replicas of 1 workers; this job has 1 of 2"),
    ],
)
def test_plans_are_replayed_for_the_job_they_were_made_for(single, settings, words):
    job = load(single / "job.toml", [f"run.plans={single}/out/plans", *settings])
    loaders = {data: job_loaders(job, of_tasks, data) for data, of_tasks in job_datasets(job).items()}

    def replayed():
        orders, _ = replayed_orders(job, job_graph(job), loaders, None)
        return [(order.data, order.step) for order in orders]

    if words is None:
        steps = [("train", 0), ("train", 1), ("held-out", 2), ("train", 2), ("held-out", 3)]
        assert list(dict.fromkeys(replayed())) == [at for at in steps if at[1] < job.run.steps + (at[0] == "held-out")]
    else:
        with pytest.raises(ValueError, match=words):
            replayed()


def test_fewer_recorded_steps_than_the_job_has_are_told(single):
    job = load(single / "job.toml", [f"run.plans={single}/out/plans", "run.steps=9"])
    with pytest.warns(UserWarning, match=r"holds 3 steps, so the run ends before run.steps = 9"):
        recorded_entries(job, ("train", "held-out"))
