"""Workers start together and end together, whatever ends the first of them."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.train.processes import alive, environment, wait_for

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
import os, signal, sys, time
from pipeweaver.runtime.process import run_worker, tie_to_parent
tie_to_parent()
rank = int(os.environ["RANK"])
open(f"{sys.argv[1]}/pid{rank}", "w").write(str(os.getpid()))
"""

LAUNCHER = """
import sys
from pipeweaver.runtime.launch import launch
sys.exit(launch([sys.executable, *sys.argv[2:]], num_workers=int(sys.argv[1]), grace_s=0.5))
"""


def start(tmp_path, body, num_workers=2):
    script = tmp_path / "worker.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    command = [sys.executable, "-c", LAUNCHER, str(num_workers), str(script), str(tmp_path)]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def pids(tmp_path, num_workers=2):
    """Process ids, once all workers have written them."""

    def written():
        texts = [path.read_text() for path in sorted(tmp_path.glob("pid*"))]
        return len(texts) == num_workers and all(texts) and [int(text) for text in texts]

    return wait_for(written)


def assert_gone(found, seconds=0.1):
    wait_for(lambda: not any(map(alive, found)), seconds)


def test_environment_is_torchruns(tmp_path):
    body = """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    sys.stdout.write(" ".join(os.environ[name] for name in names) + "\\n")  # one write: lines do not mix
    """
    process = start(tmp_path, body)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["0 0 2 2 127.0.0.1 1", "1 1 2 2 127.0.0.1 1"]


def test_first_failure_ends_the_others(tmp_path):
    body = """
    def work():
        if rank == 1:
            raise ValueError("no such image")
        time.sleep(100)
    run_worker(work)
    """
    process = start(tmp_path, body)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert err.splitlines() == ["error: worker process 1: no such image"]
    assert_gone(pids(tmp_path))


def test_a_bug_shows_its_traceback(tmp_path):
    process = start(tmp_path, "run_worker(lambda: {}[rank])", num_workers=1)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "Traceback" in err and err.splitlines()[-1] == "error: worker process 0: KeyError: 0"


@pytest.mark.parametrize("frozen", [False, True])
def test_killed_worker_is_named_and_nothing_is_left(tmp_path, frozen):
    process = start(tmp_path, "run_worker(lambda: time.sleep(100))")
    first, second = pids(tmp_path)
    if frozen:  # SIGTERM does not end a stopped process
        os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"worker process 1 of 2 (pid {second}) was ended by SIGKILL" in err
    assert_gone([first, second])


def test_interrupt_ends_all_once_and_quietly(tmp_path):
    process = start(tmp_path, "run_worker(lambda: time.sleep(100))")
    found = pids(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.splitlines() == ["stopped by SIGINT"]
    assert_gone(found)


@pytest.mark.parametrize("frozen", [False, True])
def test_killed_launcher_takes_the_workers_along(tmp_path, frozen):
    process = start(tmp_path, "run_worker(lambda: time.sleep(100))")
    found = pids(tmp_path)
    if frozen and sys.platform == "linux":
        os.kill(found[0], signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=20)
    assert_gone(found, 10.0)


def test_worker_that_starts_after_its_launcher_died_ends(tmp_path):
    changed = environment(PIPEWEAVER_PARENT="1", RANK="0")
    script = tmp_path / "worker.py"
    script.write_text(PRELUDE + "time.sleep(100)")
    assert subprocess.run([sys.executable, script, tmp_path], env=changed, timeout=20).returncode == 1


def test_workers_meet_and_compare_their_clocks(tmp_path):
    body = """
    import torch
    import torch.distributed as dist
    from pipeweaver.runtime.offsets import clock_offsets
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert (total.item(), torch.get_num_threads()) == (3, 1)
    offsets = clock_offsets()
    # One machine has one clock: the offset is within its own error.
    assert all(abs(offset.ahead_ns) <= offset.error_ns for offset in offsets), offsets
    assert len(offsets) == (2 if rank == 0 else 0)
    """
    process = start(tmp_path, body)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
