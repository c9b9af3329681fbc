"""Even out the replicas' work by exchanging samples between them: the step takes as long as its slowest replica.

Whole microbatches go to replicas first (`assign.py`); what they differ by then is often a few samples' worth. Two replicas
with two microbatches each, a sample per number, its cost the number:

    replica 0: [9 4] [5 2]  20        the 4 for the 2:  replica 0: [9 2] [5 2]  18
    replica 1: [8 2] [5 1]  16                          replica 1: [8 4] [5 1]  18

The batch stays the same set, so the gradient does too. A microbatch never takes more rows or more items of any module than
the largest one drawn for its task, so that token budgets and limits hold, whatever they are. The longest replica gets
shorter with every exchange, so the result is never less even than the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeweaver.costs import Costs
from pipeweaver.data.items import Batch, linked
from pipeweaver.data.table import ItemTable

EVEN = 1.001
"""Replicas are even enough where the largest has so many times the mean's work."""
MOST_PARTNERS = 4
"""The replica with most work looks for an exchange with so many of those that have least."""
MOST_SAMPLES = 512
"""So many samples of a replica are looked at in an exchange, evenly spread in cost."""

Groups = list[list[list[int]]]
"""For every replica its microbatches, as positions in `batch.samples`."""


def sample_costs(batch: Batch, costs: Costs | None) -> list[int]:
    """Work of each sample, nanoseconds: forward and backward of its items over their modules; tokens without `costs`.

    Items of about the same size (a sixteenth of an octave) are asked for once, and count in proportion to their tokens.
    """
    if costs is None:
        return [sum(item.sizes["tokens"] for item in sample.items) for sample in batch.samples]
    per_token: dict[tuple[str, int, int], float] = {}
    found = []
    for sample in batch.samples:
        total = 0.0
        for item, sources in zip(sample.items, linked(sample.items, sample.links), strict=True):
            tokens = item.sizes["tokens"]
            key = (item.module, _octaves(tokens), _octaves(sum(source.sizes["tokens"] for source in sources)))
            if key not in per_token:
                per_token[key] = costs.useful_ns(item.module, ItemTable.of_part([item], [sources]), [0]) / tokens
            total += per_token[key] * tokens
        found.append(round(total))
    return found


def exchanged(batch: Batch, groups: Groups, cost: Sequence[int]) -> Groups:
    """The groups with samples exchanged until the replicas are even, or nothing helps. As many microbatches as before."""
    replicas = len(groups)
    state = _State(batch, groups, cost)
    for _ in range(2 * replicas + len(batch.samples) // 8):
        order = np.argsort(state.load, kind="stable")
        longest = int(order[-1])
        if state.load[longest] * replicas <= EVEN * state.load.sum():
            break
        if not any(state.exchange(longest, int(partner)) for partner in order[: min(MOST_PARTNERS, replicas - 1)]):
            break
    return state.groups()


class _State:
    """Who has what: `bin` and `load` are kept up to date with every exchange."""

    def __init__(self, batch: Batch, groups: Groups, cost: Sequence[int]) -> None:
        self.cost = np.array(cost, np.int64)
        self.sizes = _sizes(batch)
        self.bin = np.zeros(len(cost), np.int64)
        self.replica = np.array([r for r, bins in enumerate(groups) for _ in bins], np.int64)
        for number, members in enumerate(members for bins in groups for members in bins):
            self.bin[members] = number
        num_bins = len(self.replica)
        self.used = np.zeros((num_bins, self.sizes.shape[1]), np.int64)
        np.add.at(self.used, self.bin, self.sizes)
        self.count = np.bincount(self.bin, minlength=num_bins)
        tasks = {name: number for number, name in enumerate(dict.fromkeys(s.task for s in batch.samples))}
        self.task = np.array([tasks[sample.task] for sample in batch.samples], np.int64)
        self.bin_task = np.zeros(num_bins, np.int64)
        self.bin_task[self.bin] = self.task
        self.limit = np.zeros((len(tasks), self.sizes.shape[1]), np.int64)
        np.maximum.at(self.limit, self.bin_task, self.used)
        self.load = np.zeros(len(groups), np.int64)
        np.add.at(self.load, self.replica[self.bin], self.cost)

    def exchange(self, longer: int, shorter: int) -> bool:
        """The exchange that makes two replicas most even: one sample for another, or for nothing. False if there is none."""
        gap = int(self.load[longer] - self.load[shorter])
        given = self._looked_at(longer)
        taken = self._looked_at(shorter)
        bins = np.flatnonzero(self.replica == shorter)
        # A sample may go for nothing: to every microbatch of the other replica, an empty sample comes back.
        nothing = np.full(len(bins), -1)
        back = np.concatenate([taken, nothing])
        to = np.concatenate([self.bin[taken], bins])
        back_cost = np.concatenate([self.cost[taken], np.zeros(len(bins), np.int64)])
        back_sizes = np.concatenate([self.sizes[taken], np.zeros((len(bins), self.sizes.shape[1]), np.int64)])

        moved = self.cost[given][:, None] - back_cost[None, :]
        fits = (moved > 0) & (moved < gap) & (self.task[given][:, None] == self.bin_task[to][None, :])
        # The last sample of a microbatch is not given away for nothing.
        fits &= (self.count[self.bin[given]] > 1)[:, None] | (back >= 0)[None, :]
        room_there = self.limit[self.bin_task[to]] - self.used[to] + back_sizes
        room_here = self.limit[self.task[given]] - self.used[self.bin[given]] + self.sizes[given]
        for k in range(self.sizes.shape[1]):
            fits &= self.sizes[given, k][:, None] <= room_there[:, k][None, :]
            fits &= back_sizes[:, k][None, :] <= room_here[:, k][:, None]
        if not fits.any():
            return False
        off = np.where(fits, np.abs(2 * moved - gap), np.iinfo(np.int64).max)
        i, j = divmod(int(off.argmin()), len(back))
        self._move(int(given[i]), int(to[j]))
        if back[j] >= 0:
            self._move(int(back[j]), int(self._from))
        return True

    def groups(self) -> Groups:
        found: Groups = [[] for _ in self.load]
        members: list[list[int]] = [[] for _ in self.replica]
        for sample, number in enumerate(self.bin.tolist()):
            members[number].append(sample)
        for number, replica in enumerate(self.replica.tolist()):
            found[replica].append(members[number])
        return found

    def _looked_at(self, replica: int) -> NDArray[np.int64]:
        mine = np.flatnonzero(self.replica[self.bin] == replica)
        if len(mine) <= MOST_SAMPLES:
            return mine
        by_cost = mine[np.argsort(self.cost[mine], kind="stable")]
        return by_cost[np.linspace(0, len(mine) - 1, MOST_SAMPLES).astype(np.int64)]

    def _move(self, sample: int, to: int) -> None:
        self._from = int(self.bin[sample])
        for number, sign in ((self._from, -1), (to, 1)):
            self.used[number] += sign * self.sizes[sample]
            self.count[number] += sign
            self.load[self.replica[number]] += sign * self.cost[sample]
        self.bin[sample] = to


def _sizes(batch: Batch) -> NDArray[np.int64]:
    """[samples, 2 * modules]: rows and items of every module in each sample."""
    modules = {name: k for k, name in enumerate(dict.fromkeys(i.module for s in batch.samples for i in s.items))}
    sizes = np.zeros((len(batch.samples), 2 * len(modules)), np.int64)
    for number, sample in enumerate(batch.samples):
        for item in sample.items:
            sizes[number, 2 * modules[item.module]] += item.sizes["tokens"]
            sizes[number, 2 * modules[item.module] + 1] += 1
    return sizes


def _octaves(tokens: int) -> int:
    return round(16 * math.log2(tokens + 1))
