"""Start the workers of one machine as processes, and end them all when one ends badly.

    launch([sys.executable, "-m", "pipeweaver", "train", "digits.toml"], num_workers=2)

runs the command twice, with the environment that torchrun would set (RANK, WORLD_SIZE, MASTER_ADDR …), so
that a worker does not know which of the two started it. The rendezvous store lives here, on a port that the
system picks when the store opens it: nobody can take the port in between.

What may happen, and what follows:

    a worker fails or is killed    the others get `grace_s` to say what they saw, then they are ended; exit code 1
    a worker freezes               the others' watchdogs fail them, then as above: SIGKILL ends a stopped process too
    Ctrl-C                         reaches this process only (workers have process groups of their own); exit code 130
    this process is killed         the system ends the workers (`tie_to_parent`)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from pipeweaver.runtime.process import PARENT
from pipeweaver.runtime.watchdog import EXIT_CODE

POLL_S = 0.05
TERMINATE_S = 3.0
"""From SIGTERM to SIGKILL: time to close files, not to wait for a peer that may never answer."""


def launch(command: Sequence[str], *, num_workers: int, threads: int = 1, grace_s: float = 5.0) -> int:
    """Run `command` once per worker on this machine and wait for all of them.

    `threads` is what each worker may compute with. Returns 0 if all workers ended well, 130 after Ctrl-C,
    143 after SIGTERM; otherwise the exit code of the worker that failed first (1 if a signal ended it, which
    is then said on stderr), or that of a watchdog if it ended one of them. When it returns, no worker is left.
    """
    # Bound to every interface of the machine by torch, but only this machine is told where it is.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    workers: list[subprocess.Popen[bytes]] = []
    with _stop_signals() as stopped:
        try:
            for rank in range(num_workers):
                environment = os.environ | _environment(rank, num_workers, threads, store.port)
                workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0))
            failed = _wait(workers, stopped)
            if failed is not None and not stopped:
                _wait_all(workers, stopped, grace_s)
                # Who lost a peer to a watchdog may be gone before it.
                hung = [rank for rank, worker in enumerate(workers) if worker.poll() == EXIT_CODE]
                failed = hung[0] if hung and workers[failed].returncode == 1 else failed
        finally:
            _end(workers, stopped)
    if stopped:
        print(f"stopped by {signal.Signals(stopped[0]).name}", file=sys.stderr)
        return 128 + stopped[0]
    if failed is None:
        return 0
    code = workers[failed].returncode
    if code < 0:
        print(
            f"error: worker process {failed} of {num_workers} (pid {workers[failed].pid}) was ended by "
            f"{signal.Signals(-code).name}; the others were stopped",
            file=sys.stderr,
        )
        return 1
    if code == 130:
        print(
            f"error: worker process {failed} of {num_workers} (pid {workers[failed].pid}) was told to stop; "
            "the others were stopped",
            file=sys.stderr,
        )
        return 1
    return code


def _environment(rank: int, num_workers: int, threads: int, port: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is ours, as it is torchrun's there: every worker is a client of it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
        PARENT: str(os.getpid()),
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All workers are on this machine, whose name need not resolve.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the list that is handed out, instead of raising at any point."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: Sequence[subprocess.Popen[bytes]], stopped: Sequence[int]) -> int | None:
    """Wait until all ended well (None), one ended badly (its rank), or a stop signal came (None)."""
    while not stopped:
        codes = [worker.poll() for worker in workers]
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if bad:
            # Among several that ended within one poll, a signal is the cause and an exit code the consequence.
            return min(bad, key=lambda rank: (codes[rank] or 0) > 0)
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_S)
    return None


def _wait_all(workers: Sequence[subprocess.Popen[bytes]], stopped: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not stopped and time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)


def _end(workers: Sequence[subprocess.Popen[bytes]], stopped: Sequence[int]) -> None:
    """SIGTERM to those still there, soon SIGKILL, at once after a second stop signal; returns when all are gone."""
    _signal(workers, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_S
    while len(stopped) < 2 and time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)
    _signal(workers, signal.SIGKILL)
    for worker in workers:
        worker.wait()


def _signal(workers: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)
