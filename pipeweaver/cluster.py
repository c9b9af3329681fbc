"""Workers of a run: how many, what each may use, and which cores of this machine it is pinned to.

A worker holds model parts and runs one compute action at a time. `pipeline` workers make up one replica:

    Workers(pipeline=2, replicas=2, threads=1, memory="4 GiB")    4 workers of one core and 4 GiB each
"""

from __future__ import annotations

import os
import re
from typing import Annotated

import msgspec
from msgspec import Meta

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Workers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pipeline` workers per replica; `threads` of each on CPU; `pin`: one worker, its own cores.

    `memory` is what one worker may hold at any time ("4 GiB"); without it there is no limit on CPU, and
    the device's memory is the limit on a GPU.
    """

    pipeline: Annotated[int, Meta(ge=1)] = 1
    replicas: Annotated[int, Meta(ge=1)] = 1
    threads: Annotated[int, Meta(ge=1)] = 1
    pin: bool = True
    memory: str | int | float | None = None  # a number without a unit is refused in words of its own

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_bytes(str(self.memory))

    @property
    def total(self) -> int:
        return self.pipeline * self.replicas

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(str(self.memory))


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "4 GiB" or "500 MB". Raises ValueError if it is none, or not above zero."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f'memory "{text}" is not a size; write a number and a unit, such as "4 GiB" or "500 MB"')
    size = int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise ValueError(f'memory "{text}" is zero; leave the key out for no limit')
    return size


def format_bytes(num_bytes: int) -> str:
    """A size for people, in binary units: "3.4 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def available_cores() -> tuple[int, ...]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_of(worker: int, workers: int, threads: int, cores: tuple[int, ...]) -> tuple[int, ...]:
    """Cores for one of `workers` workers on this machine, disjoint from the others'; () where they do not suffice.

    Pinning more workers than there are cores would only stack them on the same ones, so none is pinned then.
    """
    if workers * threads > len(cores):
        return ()
    return cores[worker * threads : (worker + 1) * threads]
