"""Scheduling instances from a file, for the planner's search: `python -m benchmarks.search --held FILE`.

The file is JSON, one list of instances (docs/planning.md describes it too). Times are ns, memory bytes, all integers:

    [{"name": "two microbatches on one worker",
      "workers": 1,
      "limits": [7],
      "stages": [{"worker": 0, "duration": 10, "bytes": [[5, 1]]},
                 {"worker": 0, "duration": 20, "after": [0]},
                 {"worker": 0, "duration": 10, "bytes": [[5, 3]]},
                 {"worker": 0, "duration": 20, "after": [[2, 4]]}]}]

`after`: numbers of the stages (counted from 0) that must be done before, or pairs of a number and a lag that has to pass
in between. `bytes`: memory that the stage takes on its worker when it starts, as pairs of an amount and the number
of the stage at whose end it is free again: one on the same worker that comes after (within limits it waits for the first,
named in `after` or not), or the stage itself for what it needs only while it runs. `limits`: bytes that the stages on
each worker may hold together; null or left out for none. A worker runs one stage at a time, without interruption; all
stages are to be done as early as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from pipeweaver.planner.problem import Ints, Problem, groups_of, make_problem

Natural = Annotated[int, Meta(ge=0)]
MOST_WORKERS = 10_000
MOST = 10**15
"""All times together, and all bytes; far from where 64 bits end."""
MOST_WORK = 3_000_000
"""For an order within the limits: stages that are looked at, and bytes that sets of them take; a few seconds."""


class HeldStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Natural
    duration: Natural
    after: tuple[int | tuple[int, int], ...] = ()
    bytes: tuple[tuple[int, int], ...] = ()

    @property
    def lags(self) -> tuple[tuple[int, int], ...]:
        """(stage, lag) of all that must be done before."""
        return tuple((one, 0) if isinstance(one, int) else one for one in self.after)


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance. Raises ValueError, naming the stage, if it makes no sense."""

    workers: Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
    stages: tuple[HeldStage, ...]
    name: str = ""
    limits: tuple[Natural, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.stages)
        if self.limits is not None and len(self.limits) != self.workers:
            raise ValueError(f"{len(self.limits)} limits for {self.workers} workers")
        for number, stage in enumerate(self.stages):
            if stage.worker >= self.workers:
                raise ValueError(f"stage {number} is on worker {stage.worker} of {self.workers}")
            for other, _ in (*stage.lags, *((last, 0) for _, last in stage.bytes)):
                if not 0 <= other < count:
                    raise ValueError(f"stage {number} names stage {other} of {count}")
            if any(number < 0 for pair in (*stage.lags, *stage.bytes) for number in pair):
                raise ValueError(f"stage {number} has a negative number in after or bytes")
            for _, last in stage.bytes:
                if self.stages[last].worker != stage.worker:
                    raise ValueError(f"bytes of stage {number} are freed by stage {last}, which is on another worker")
        for what, total in (
            ("durations and lags", sum(s.duration + sum(lag for _, lag in s.lags) for s in self.stages)),
            ("bytes", sum(amount for s in self.stages for amount, _ in s.bytes)),
        ):
            if total > MOST:
                raise ValueError(f"{what} add up to {total:,}, more than {MOST:,}; use larger units")
        if topological_order(self) is None:
            raise ValueError("stages wait for each other in a circle")


def load_held(path: Path) -> tuple[Held, ...]:
    """The instances of a file. Raises ValueError, naming the file, if it does not have the documented format."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Held, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a file of instances: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def topological_order(held: Held) -> list[int] | None:
    """All stages, each after what it waits for and what frees before it; None if there is a circle.

    Of several that could be next, one that frees memory comes before one that takes some, deeper ones first.
    """
    count = len(held.stages)
    followers: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for number, stage in enumerate(held.stages):
        for other, _ in stage.lags:
            followers[other].append(number)
            waiting[number] += 1
        for _, last in stage.bytes:
            if last != number:
                followers[number].append(last)
                waiting[last] += 1
    frees = {last for number, stage in enumerate(held.stages) for _, last in stage.bytes if last != number}
    ready = [(number not in frees, 0, number) for number in range(count) if not waiting[number]]
    heapify(ready)
    order: list[int] = []
    depth = [0] * count
    while ready:
        _, _, following = heappop(ready)
        order.append(following)
        for other in followers[following]:
            waiting[other] -= 1
            depth[other] = max(depth[other], depth[following] + 1)
            if not waiting[other]:
                heappush(ready, (other not in frees, -depth[other], other))
    return order if len(order) == count else None


def roomy_order(held: Held, order: Sequence[int], group: Sequence[int]) -> list[int] | None:
    """An order within the limits, group after group; None if there is none, or none was found with `MOST_WORK`.

    Each group begins with nothing held. `order` is taken where it fits, or the stages as they are numbered; else a group is
    searched depth first in `order`. A set of done stages that led nowhere is not looked at again, and a stage after which
    no more is held than before comes at once, since it forbids nothing.
    """
    members: dict[int, list[int]] = {}
    for number in order:
        members.setdefault(group[number], []).append(number)
    found: list[int] = []
    left = MOST_WORK
    for stages in members.values():
        part = next((known for known in (stages, sorted(stages)) if _keeps_to_limits(held, known)), None)
        if part is None:
            part, used = _within_limits(held, stages, left)
            left -= used
        if part is None:
            return None
        found += part
    return found


def held_problem(held: Held) -> tuple[Problem, Ints | None]:
    """(problem, limits) of an instance. Stages that depend on each other, or free each other's memory, are a group."""
    count = len(held.stages)
    lags = [(other, number, lag) for number, stage in enumerate(held.stages) for other, lag in stage.lags]
    frees_later = [(number, last) for number, stage in enumerate(held.stages) for _, last in stage.bytes]
    group = groups_of(count, [*((a, b) for a, b, _ in lags), *frees_later])
    if held.limits is not None:  # what frees comes after what takes, said or not
        said = {(a, b) for a, b, _ in lags}
        lags += [(a, b, 0) for a, b in dict.fromkeys(frees_later) if a != b and (a, b) not in said]
    takes, frees, passing = (np.zeros(count, np.int64) for _ in range(3))
    for number, stage in enumerate(held.stages):
        for amount, last in stage.bytes:
            if last == number:
                passing[number] += amount
            else:
                takes[number] += amount
                frees[last] += amount
    order = topological_order(held)
    assert order is not None, "checked when it was made"
    if held.limits is not None:
        order = roomy_order(held, order, group) or order
    urgency = np.zeros(count, np.int64)
    urgency[order] = np.arange(count)
    source, target, lag = np.array(lags, np.int64).reshape(-1, 3).T.copy()
    has_followers = np.bincount(source, minlength=count) > 0
    gives = (takes == 0) & (frees > 0)
    problem = make_problem(
        num_workers=held.workers,
        worker=np.array([stage.worker for stage in held.stages], np.int64),
        duration_ns=np.array([stage.duration for stage in held.stages], np.int64),
        source=source,
        target=target,
        lag_ns=lag,
        group=np.array(group, np.int64),
        num_groups=1 + max(group, default=-1),
        gives=gives.astype(np.int64),
        late=(gives & ~has_followers).astype(np.int64),
        takes=takes,
        frees=frees,
        passing=passing,
        urgency=urgency,
    )
    if held.limits is None:
        return problem, None
    return problem, np.array([min(limit, MOST) for limit in held.limits], np.int64)  # no stages hold more than MOST


def _keeps_to_limits(held: Held, stages: Sequence[int]) -> bool:
    """Whether a group's stages can run in this order, each after what it waits for."""
    assert held.limits is not None
    room, frees = list(held.limits), dict.fromkeys(stages, 0)
    place = {number: i for i, number in enumerate(stages)}
    for number in stages:
        stage = held.stages[number]
        before, behind = (other for other, _ in stage.lags), (last for _, last in stage.bytes)
        if any(place[o] > place[number] for o in before) or any(place[o] < place[number] for o in behind):
            return False
        room[stage.worker] -= sum(amount for amount, _ in stage.bytes)
        if room[stage.worker] < 0:
            return False
        for amount, last in stage.bytes:
            frees[last] += amount
        room[stage.worker] += frees[number]
    return True


def _within_limits(held: Held, stages: Sequence[int], most_work: int) -> tuple[list[int] | None, int]:
    """(an order of a group's stages within the limits or None, work that it took)."""
    assert held.limits is not None
    place = {number: i for i, number in enumerate(stages)}
    needs, takes, frees, most = [0] * len(stages), [0] * len(stages), [0] * len(stages), [0] * len(stages)
    followers: list[list[int]] = [[] for _ in stages]
    for i, number in enumerate(stages):
        stage = held.stages[number]
        waits_for = [(place[other], i) for other, _ in stage.lags]
        for amount, last in stage.bytes:
            most[i] += amount
            if last != number:
                takes[i] += amount
                frees[place[last]] += amount
                waits_for.append((i, place[last]))
        for before, after in waits_for:
            needs[after] |= 1 << before
            followers[before].append(after)
    worker = [held.stages[number].worker for number in stages]
    room = list(held.limits)
    done, order, work = 0, list[int](), 0
    ready = {i for i, needed in enumerate(needs) if not needed}
    seen = set[int]()

    def choices() -> list[int]:
        """What may come next, the last one first."""
        fitting = sorted((i for i in ready if most[i] <= room[worker[i]]), reverse=True)
        free = next((i for i in reversed(fitting) if takes[i] <= frees[i]), None)
        return fitting if free is None else [free]

    tried = [choices()]  # what is still to be tried after so many stages
    while len(order) < len(stages):
        if work > most_work:
            return None, work
        if tried[-1]:
            i = tried[-1].pop()
            if done | 1 << i in seen:
                continue
            done |= 1 << i
            seen.add(done)
            order.append(i)
            room[worker[i]] += frees[i] - takes[i]
            ready.remove(i)
            ready |= {j for j in followers[i] if needs[j] & done == needs[j]}
            work += len(ready) + len(stages) // 8
            tried.append(choices())
            continue
        tried.pop()
        if not order:
            return None, work
        i = order.pop()
        done ^= 1 << i
        room[worker[i]] -= frees[i] - takes[i]
        ready -= set(followers[i])
        ready.add(i)
    return [stages[i] for i in order], work
