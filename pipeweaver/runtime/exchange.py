"""Messages between the first rank, which plans and reports, and all workers: typed, in MessagePack, through a store.

The first rank numbers what it orders, and every worker takes the orders of its replica in that sequence:

    order/0/1    RunPlan(the plan of replica 1 for step 0, as flat arrays)
    order/1/1    RunPlan(its forward-only plan on held-out data)
    order/2/1    Finish()

Reports go the other way, `report/NUMBER/REPLICA/WORKER`. The store is a torch.distributed one, hosted by
whoever started the workers, so that it outlives a failing worker. Plans are data: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Literal, Protocol, TypeVar

import msgspec

from pipeweaver.runtime.process import RunError
from pipeweaver.schedule.convert import records
from pipeweaver.schedule.flat import FlatPlan
from pipeweaver.schedule.ir import Placement, Plan
from pipeweaver.schedule.wire import pack, unpack

Data = Literal["train", "held-out"]

MOST_BEAT_S = 1.0
MOST_WAIT = timedelta(days=1)
"""How long torch.distributed lets a call wait. The watchdog knows the plan and speaks long before."""
POLL_S = 0.0002
MOST_POLL_S = 0.005


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...
    def clone(self) -> Store: ...


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the first rank decided once for the run. `job` is a fingerprint of the job it decided it for."""

    job: str
    placement: Placement


class RunPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True, dict=True):
    """Run this plan next, on items of `data`. `packed` is the plan as `wire.pack` makes it."""

    packed: bytes
    checksum: str
    data: Data = "train"

    @cached_property
    def plan(self) -> Plan:
        """The plan as the records that a worker runs: made here, when they are asked for first."""
        (found,) = unpack(self.packed)
        return records(found)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is nothing more to run."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first rank cannot go on: every worker stops with this error and exit code."""

    error: str
    code: int = 1


Message = Setup | RunPlan | Finish | Failure

Report = TypeVar("Report", bound=msgspec.Struct)


class Silence:
    """How long a count of beats, looked at about every `look_s` seconds, has stood still.

    Time in which nobody looked counts little: then it was this process, or the store, that was stopped (Ctrl-Z).
    """

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._looked = time.monotonic()
        self._count = 0
        self._silent_s = 0.0

    def after(self, count: int) -> float:
        """Seconds of silence, now that the count is `count`."""
        now = time.monotonic()
        self._silent_s = 0.0 if count != self._count else self._silent_s + min(now - self._looked, 2 * self._look_s)
        self._count, self._looked = count, now
        return self._silent_s


class FirstRankFailed(RunError):
    """The first rank failed and said why."""


class FirstRankSilent(RunError):
    """The first rank gave no sign of life while something was expected of it."""


class Exchange:
    """One thread's end of the store; other threads of the process take a `clone`.

    `patience_s` is how long the first rank may give no sign of life while it is waited for. How long it plans
    does not matter.
    """

    def __init__(self, store: Store, *, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        # Several beats fit into anyone's patience.
        self._beat_s = min(MOST_BEAT_S, patience_s / 5)

    def clone(self) -> Exchange:
        return Exchange(self._store.clone(), patience_s=self._patience_s)

    def publish(self, number: int, messages: Sequence[Message], *, readers: int) -> None:
        """Order `number`: one message per replica, each to be taken by `readers` workers."""
        for replica, message in enumerate(messages):
            key = _key(number, replica)
            self._store.add(f"{key}/readers", readers)
            self._store.set(key, msgspec.msgpack.encode(message))

    def wait(self, number: int, replica: int, late: Callable[[float], None] | None = None) -> None:
        """Until order `number` can be received, or what is there instead of it. Raises FirstRankSilent."""
        self._wait(_key(number, replica), late)

    def receive(
        self, number: int, replica: int, late: Callable[[float], None] | None = None
    ) -> Setup | RunPlan | Finish:
        """Order `number`, when it is there. `late(seconds)` is called now and then while it is not.

        Raises FirstRankFailed if the first rank says that it failed, FirstRankSilent if it says nothing.
        """
        key = _key(number, replica)
        self._wait(key, late)
        message: Message = msgspec.msgpack.decode(self._store.get(key), type=Message)
        if self._store.add(f"{key}/readers", -1) == 0:  # all have it
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/readers")
        if isinstance(message, Failure):
            words = f"stopped, because the first worker failed: {message.error}"
            raise FirstRankFailed(words, code=message.code, once_per_host=True)
        if isinstance(message, RunPlan):
            # Both ends of every transfer must act on the same plan.
            assert _checksum(message.packed) == message.checksum, f"plan of order {number} changed on its way"
        return message

    def send_report(self, number: int, replica: int, worker: int, report: msgspec.Struct) -> None:
        self._store.set(f"report/{number}/{replica}/{worker}", msgspec.msgpack.encode(report))

    def take_report(self, number: int, replica: int, worker: int, kind: type[Report]) -> Report:
        """A worker's report, when it is there. Waiting takes no time of the processor, and cannot be interrupted."""
        key = f"report/{number}/{replica}/{worker}"
        self._store.wait([key], MOST_WAIT)
        report = msgspec.msgpack.decode(self._store.get(key), type=kind)
        self._store.delete_key(key)
        return report

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """The first rank is inside this for the whole run: a thread says every second that the process lives."""
        mine, ended = self.clone(), threading.Event()

        def beat() -> None:
            while not ended.is_set():
                mine._store.add("beats", 1)
                ended.wait(mine._beat_s)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _wait(self, key: str, late: Callable[[float], None] | None) -> None:
        """Wait for a key as long as the first rank lives, in steps, so that Ctrl-C is not held up."""
        pause, silence = POLL_S, Silence(self._beat_s)
        start = looked = told = time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, MOST_POLL_S)
            now = time.monotonic()
            if now - looked < self._beat_s:
                continue
            looked = now
            if late is not None and now - told > self._patience_s:
                late(now - start)
                told = now
            # Reads the count, whether or not there was a beat yet.
            if silence.after(self._store.add("beats", 0)) > self._patience_s:
                raise FirstRankSilent(
                    f"waited for {key}, but the first worker has given no sign of life for {self._patience_s:g} s: "
                    "it is dead, frozen, or cut off"
                )


def run_plan(plan: FlatPlan, data: Data = "train") -> RunPlan:
    """The message for one replica's plan."""
    packed = pack([plan])
    return RunPlan(packed=packed, checksum=_checksum(packed), data=data)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _key(number: int, replica: int) -> str:
    """Where order `number` stands in the store."""
    return f"order/{number}/{replica}"
