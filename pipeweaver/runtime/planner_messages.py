"""What the first worker and its planner processes say to each other: typed, in MessagePack, over a pair of sockets.

    first worker                                 planner process
    Begin(setup=..., seconds=1.0)           ->
                                            <-   Ready()
    Wanted(number=7, batch=..., ...)        ->
                                            <-   Planned(number=7, plans=...)                  at once
                                            <-   Planned(number=7, plans=...)                  better
    Taken(number=7)                         ->                                                 no more of it

A message is its length in four bytes, little-endian, and so many bytes of MessagePack. Nothing is unpickled: what is
no message, or too long to be one, raises ValueError.
"""

from __future__ import annotations

import socket

import msgspec

from pipeweaver.data.items import Batch
from pipeweaver.schedule.ir import Placement

MOST_BYTES = 1 << 30
"""Of one message. The plans of one replica with 64 microbatches on 16 workers have some ten million."""
_LENGTH_BYTES = 4
_RECEIVED_BYTES = 1 << 20


class JobSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner process makes its model, policy and costs from.

    The job is read again from its file; `fingerprint` says that it is still the same one.
    """

    path: str
    overrides: tuple[str, ...]
    fingerprint: str
    policy: str
    placement: Placement
    budget_bytes: int | None
    costs: bytes


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message. `setup` is for whoever makes the `Planning` of it, a `JobSetup` in training.

    `rounds` of search are made for every batch, whatever time they take; None: as many as there is time for, `seconds`
    of processor time at most. `beside_training`: the workers run already, and the process is to be in nobody's way.
    """

    setup: msgspec.Raw
    rounds: int | None = None
    seconds: float = 1.0
    beside_training: bool = False


class Wanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plan this batch for replicas [first, stop), with the costs' `factors` by module."""

    number: int
    batch: Batch
    first: int
    stop: int
    forward_only: bool = False
    factors: dict[str, float] = {}


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is known of `number` is good enough, or comes too late: no more of it."""

    number: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process has its model and its costs."""


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The best plans so far; the last ones if `finished`.

    `plans` are those of the replicas as `wire.pack` makes them, unpacked only when they are used; empty if those sent
    before are still the best.
    """

    number: int
    finished: bool
    plans: bytes


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is no plan, for this reason."""

    number: int
    error: str


ToPlanner = Begin | Wanted | Taken
FromPlanner = Ready | Planned | Refused


def encode(message: ToPlanner | FromPlanner) -> bytes:
    """The message with its length before it."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


class Inbox:
    """Messages put together from what a socket receives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def receive(self, end: socket.socket) -> list[bytes]:
        """Receive once; the contents of the messages that are complete now. Raises EOFError at the end of the stream,
        ValueError if a message says that it is longer than any is."""
        received = end.recv(_RECEIVED_BYTES)
        if not received:
            raise EOFError
        self._bytes += received
        found = []
        while len(self._bytes) >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if length > MOST_BYTES:
                raise ValueError(f"a message of {length:,} bytes")
            if len(self._bytes) < _LENGTH_BYTES + length:
                break
            found.append(bytes(self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + length]))
            del self._bytes[: _LENGTH_BYTES + length]
        return found
