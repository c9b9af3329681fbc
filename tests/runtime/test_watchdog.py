"""A hang becomes an error in time that says who waits for what; a peer that dies, too."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from pipeweaver.planner.assign import share_out
from pipeweaver.runtime.watchdog import EXIT_CODE, Watchdog, watched
from pipeweaver.schedule.compile import compile_plan
from pipeweaver.schedule.ir import Chunk, Draft, Part, Placement, Stage
from tests.runtime.graphs import batch_of, graph_of
from tests.runtime.processes import run_with_signal
from tests.runtime.threads import flat_costs


class Ended:
    """Stands in for os._exit: remembers the code."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.event = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.event.set()


def test_a_hang_ends_the_process_with_a_message(capfd):
    ended, messages = Ended(), []
    watchdog = Watchdog(0.2, on_hang=messages.append, end=ended)
    with watched(watchdog, "worker 3 waits for nothing"):
        assert ended.event.wait(10)
    assert ended.code == EXIT_CODE != 0
    assert re.search(r"nothing has moved for \d+ s .*: worker 3 waits for nothing", messages[0])
    assert messages[0] in capfd.readouterr().err
    watchdog.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_callback_does_not_save_the_process():
    def fail(message: str) -> None:
        raise OSError("no space left")

    ended = Ended()
    watchdog = Watchdog(0.1, on_hang=fail, end=ended)
    watchdog.start(lambda: "something")
    assert ended.event.wait(10)
    watchdog.close()


STOPS_ITSELF = """
import os, signal, time
from pipeweaver.runtime.watchdog import Watchdog
watchdog = Watchdog(2.0)
watchdog.start(lambda: "stopped")
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.3)  # three looks
watchdog.stop()
"""


def test_a_process_that_was_stopped_and_continued_did_not_hang():
    child = subprocess.Popen([sys.executable, "-c", STOPS_ITSELF])
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(3.0)
    child.send_signal(signal.SIGCONT)
    assert child.wait(30) == 0


def test_what_moves_is_left_alone():
    ended = Ended()
    watchdog = Watchdog(0.5, end=ended)
    for _ in range(20):
        watchdog.start(lambda: "a step among many")
        time.sleep(0.05)
    watchdog.stop()
    time.sleep(0.8)
    # Ten times the prediction is more than the limit.
    watchdog.start(lambda: "a long step", predicted_s=100.0)
    time.sleep(0.8)
    assert not ended.event.is_set()
    watchdog.close()


def one_plan():
    """Language on two workers: the second one computes the loss, and loads labels for it."""
    graph = graph_of("one module")
    (share,) = share_out(graph, batch_of("mixed", graph, 2, seed=0), 1)
    layers = len(graph.by_name["language"].layers)
    chunks = tuple(
        Chunk(task="main", module="language", start=w * 2, stop=(layers, 2)[w == 0], worker=w) for w in range(2)
    )
    parts = tuple(Part(items=microbatch, microbatch=m) for m, microbatch in enumerate(share.microbatches))
    order = tuple(tuple(Stage(w, p, phase) for phase in ("F", "B") for p in range(len(parts))) for w in range(2))
    draft = Draft(placement=Placement(workers=2, chunks=chunks), parts=(parts, parts), order=order)  # type: ignore[arg-type]
    return compile_plan(graph, share, draft, flat_costs(graph), dtype="float64")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_the_other_worker_stops_with_an_error_that_names_action_peer_and_tensor(number, tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    plan = msgspec.msgpack.encode(one_plan())
    processes = [
        context.Process(target=run_with_signal, args=(rank, str(tmp_path), int(number), plan)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        processes[0].join(60)
        assert processes[0].exitcode == (EXIT_CODE if number == signal.SIGSTOP else 1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = (tmp_path / "stderr-0").read_text()
    assert re.search(
        r"error: .*worker 0 of replica 0, step 0: waits for (the gradient of )?x \(\d+x4 float64\) (from|to) worker 1, "
        r"from language\[.*\]@\d to language\[.*\]@\d \(\d[FB]\d -> \d[FB]\d, transfer \d+\)",
        said,
    ), said
