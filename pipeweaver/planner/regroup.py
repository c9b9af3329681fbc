"""Regroup the samples of a share: into fewer microbatches, or into ones of equal work.

The batch stays the same set, so its gradient does too; only what is processed together changes. Larger microbatches run
more efficiently and fill the pipeline more slowly; equal ones need less memory at their peak. Example, samples of
cost 9, 1, 5, 5 in two microbatches that hold two each:

    as drawn   9 1 | 5 5         merged   9 1 5 5         by cost, samples of cost 9, 8, 2, 1 drawn as 9 8 | 2 1:   9 1 | 8 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numba
import numpy as np

from pipeweaver.data.items import Share

ROOM = 1.1
"""Microbatches as drawn are full: without some more room nothing could change places."""


def merged(share: Share, count: int, *, halve_first: bool = False) -> Share:
    """`count` neighbouring microbatches in one; the last one may be smaller, and the first may come in two halves, so that
    in a pipeline backwards begin sooner."""
    groups = share.microbatches
    halves = {count // 2} if halve_first and count // 2 < len(groups) else set()
    starts = sorted({*halves, *range(0, len(groups), count), len(groups)})
    return msgspec.structs.replace(
        share,
        microbatches=tuple(
            tuple(item for group in groups[first:stop] for item in group) for first, stop in pairwise(starts)
        ),
    )


def evened(share: Share, item_costs: Sequence[int], backbone: str) -> Share:
    """As many microbatches of about equal cost, none with `ROOM` times more rows of the backbone than the largest drawn.

    The costliest samples go first, each to the microbatch with the least cost that has room; the share as it is if
    a sample finds none. `item_costs`: one number per item.
    """
    samples: dict[tuple[str, int], list[int]] = {}
    for group in share.microbatches:
        for i in group:
            samples.setdefault((share.items[i].task, share.items[i].draw), []).append(i)

    def rows(items: Sequence[int]) -> int:
        return sum(share.items[i].sizes["tokens"] for i in items if share.items[i].module == backbone)

    count = len(share.microbatches)
    room = int(ROOM * max((rows(group) for group in share.microbatches), default=0))
    sized = [(sum(item_costs[i] for i in items), rows(items), items) for items in samples.values()]
    sized.sort(key=lambda one: (-one[0], one[2][0]))
    spent, needed = np.array([one[:2] for one in sized], np.int64).reshape(-1, 2).T.copy()
    taken = _least_loaded(spent, needed, count, room)
    if (taken < 0).any():
        return share
    chosen: list[list[list[int]]] = [[] for _ in range(count)]
    for (_, _, items), g in zip(sized, taken.tolist(), strict=True):
        chosen[g].append(items)
    groups = (sorted(of) for of in chosen if of)
    return msgspec.structs.replace(share, microbatches=tuple(tuple(i for items in of for i in items) for of in groups))


@numba.njit(cache=True)
def _least_loaded(spent, needed, count, room):  # type: ignore[no-untyped-def]
    """[samples] the group of each in turn: of those with room the one with the least cost so far; -1 where none has."""
    found = np.full(len(spent), -1, np.int64)
    cost, taken = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in range(len(spent)):
        for g in range(count):
            if taken[g] + needed[i] <= room and (found[i] < 0 or cost[g] < cost[found[i]]):
                found[i] = g
        if found[i] < 0:
            break
        cost[found[i]] += spent[i]
        taken[found[i]] += needed[i]
    return found
