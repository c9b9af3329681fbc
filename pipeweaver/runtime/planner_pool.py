"""The planner processes of a run: started, talked to, started again when they fail, ended with the run.

    pool = Pool(2, begin, COMMAND, cores, lock=condition, heard=..., lost=...)
    pool.send(pool.planners[0], encode(Wanted(...)))         never blocks
    pool.close()

A thread starts the processes, writes what is to be sent, and reads what they say. It calls `heard(planner, message)`
and `lost(planner, why)` with the lock held. The system ends the processes with that thread (`tie_to_parent`), whatever
becomes of this one; none ever outlives the run.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from pipeweaver.runtime.planner_messages import Begin, FromPlanner, Inbox, encode
from pipeweaver.runtime.process import PARENT, use_cores

COMMAND = (sys.executable, "-m", "pipeweaver.runtime.planner_process")
MOST_FAILURES = 3
"""So many failures without a plan in between, and a process is not started again."""
END_S = 2.0
"""A process whose end of the socket is closed has so long to end by itself, so that its exit code says why."""


@dataclass(eq=False)
class Planner:
    """A planner process: the one that runs now, in the how manieth life; `failures` since its last plan.

    `is_settled`: it has said something about a plan in this life; `is_late`: nothing since a plan was waited for in vain;
    `owes_since` (on the monotonic clock) it owes an answer and has said nothing. All for whoever hears of it. `pid` is 0
    before its first life.
    """

    process: subprocess.Popen[bytes] | None = None
    end: socket.socket | None = None
    inbox: Inbox = field(default_factory=Inbox)
    outgoing: bytearray = field(default_factory=bytearray)
    lives: int = 0
    failures: int = 0
    is_settled: bool = False
    is_late: bool = False
    owes_since: float | None = None
    pid: int = 0
    can_start: bool = True

    @property
    def is_there(self) -> bool:
        return self.can_start and self.failures < MOST_FAILURES


class Pool:
    """`count` processes, each told `begin` first. `start` starts them; they keep to `cores` if there are any."""

    def __init__(
        self,
        count: int,
        begin: Begin,
        command: Sequence[str],
        cores: Collection[int],
        *,
        lock: threading.Condition,
        heard: Callable[[Planner, FromPlanner], None],
        lost: Callable[[Planner, str], None],
    ) -> None:
        self.planners = [Planner(outgoing=bytearray(encode(begin))) for _ in range(count)]
        self._begin, self._command, self._cores = begin, command, cores
        self._lock, self._tell_heard, self._tell_lost = lock, heard, lost
        self._useless: dict[Planner, str] = {}
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="planner pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, planner: Planner, message: bytes) -> None:
        """With the lock held. A process that is just being started gets it when it is there."""
        planner.outgoing += message
        self._poke()

    def fail(self, planner: Planner, why: str) -> None:
        """End a process that is of no use, and start it again. With the lock held."""
        self._useless.setdefault(planner, why)  # said again before it is gone, it is not about the next one
        self._poke()

    def close(self) -> None:
        """End all processes; none is left when this returns."""
        self._closed = True
        self._poke()
        self._thread.join()

    def _poke(self) -> None:
        with suppress(BlockingIOError):  # it has been poked often enough
            self._wake.send(b"!")

    def _run(self) -> None:
        use_cores(self._cores)  # what a thread starts keeps to the same cores
        for planner in self.planners:
            self._start(planner)
        while not self._closed:
            with self._lock:
                self._select_by_need()
            for key, events in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            with self._lock:
                useless, self._useless = self._useless, {}
            for planner, why in useless.items():
                if planner.end is not None:
                    self._fail(planner, why)
        for planner in self.planners:
            self._end(planner)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _select_by_need(self) -> None:
        for planner in self.planners:
            if planner.end is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if planner.outgoing else 0)
                self._selector.modify(planner.end, events, planner)

    def _write(self, planner: Planner) -> None:
        assert planner.end is not None
        # A process that is gone is noticed by what reads from it.
        with self._lock, suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            del planner.outgoing[: planner.end.send(planner.outgoing)]

    def _read(self, planner: Planner) -> None:
        assert planner.end is not None
        try:
            for content in planner.inbox.receive(planner.end):
                message: FromPlanner = msgspec.msgpack.decode(content, type=FromPlanner)  # type: ignore[arg-type]
                with self._lock:
                    planner.owes_since = None
                    self._tell_heard(planner, message)
        except BlockingIOError:
            return
        except (EOFError, ConnectionResetError):
            self._fail(planner, None)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:  # MessagePack may be nested without end
            self._fail(planner, f"sent what is no message ({error})")

    def _start(self, planner: Planner) -> None:
        mine, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_WORKERS}
        environment |= {PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        try:
            with theirs:
                planner.process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C is for the launcher
                )
        except OSError as error:  # no memory, no process, no file left: another attempt would fare no better
            mine.close()
            with self._lock:
                planner.can_start = False
                self._tell_lost(planner, f"cannot be started ({error.strerror})")
            return
        mine.setblocking(False)
        planner.end, planner.inbox, planner.pid = mine, Inbox(), planner.process.pid
        planner.lives += 1
        self._selector.register(mine, selectors.EVENT_READ, planner)

    def _fail(self, planner: Planner, why: str | None) -> None:
        """`why` is None for a process that has ended by itself."""
        code = self._end(planner, wait_s=END_S if why is None else 0.0)
        if why is None:
            why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        with self._lock:
            planner.outgoing = bytearray(encode(replace(self._begin, beside_training=True)))
            planner.failures += 1
            planner.is_settled = planner.is_late = False
            planner.owes_since = None
            self._tell_lost(planner, why)
        if planner.is_there:
            self._start(planner)

    def _end(self, planner: Planner, wait_s: float = 0.0) -> int:
        """End a process, if it does not end by itself in `wait_s`; its exit code."""
        if planner.process is None or planner.end is None:
            return 0
        self._selector.unregister(planner.end)
        planner.end.close()
        planner.end = None
        try:
            return planner.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            planner.process.kill()
            return planner.process.wait()


_OF_WORKERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A planner process is none of the workers."""
