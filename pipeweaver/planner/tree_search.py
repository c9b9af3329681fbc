"""Monte Carlo tree search over orders of n things, as PipeWeaver searches its segments (pipeweaver.md, section 3.1).

A node at depth d fixes the first d places; it keeps the best score seen below it. A round goes down the tree by

    s^a + b sqrt(log N_parent / N)        s: best known makespan / best makespan below, N: visits

to a node with children that were never tried, adds one of them, plays out some random completions of its prefix, and
backs up the best of them, not the mean. Example, three things, one round at the root and one below:

    root -> (1) play out 1 0 2, 1 2 0      -> (1 2) play out 1 2 0

Left open by the paper, and chosen here by measurement (docs/log.md): a, b, and which untried child comes first: where
the best completion below goes on, so that the tree grows along what is good; an untried child counts as visited once,
with the mean score of its siblings, so that good branches grow deep before bad ones are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeweaver.schedule.connect import Ints

SHARPNESS = 50.0
"""a: makespans of good and bad orders differ by a few per cent."""
EXPLORATION = 0.2
"""b."""
PLAY_OUTS = 10


@dataclass
class _Node:
    """A prefix. `best` is the order with the least makespan `best_ns` below."""

    thing: int
    parent: _Node | None
    left: list[int]
    """Things that no child begins with yet."""
    best_ns: int = 0
    best: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    visits: int = 0
    children: list[_Node] = field(default_factory=list)
    is_done: bool = False
    """Every order below has been tried."""


class TreeSearch:
    """Anytime and repeatable: after a number of rounds the best order is always the same.

    `score(order)` is the makespan of an order [n] of 0..n-1, ns. `first` is the order that it begins with.
    """

    def __init__(
        self,
        score: Callable[[Ints], int],
        first: Ints,
        *,
        seed: int,
        play_outs: int = PLAY_OUTS,
        sharpness: float = SHARPNESS,
        exploration: float = EXPLORATION,
    ) -> None:
        self._score, self._play_outs = score, play_outs
        self._sharpness, self._exploration = sharpness, exploration
        self._random = np.random.default_rng(seed)
        self.best, self.best_ns = first, score(first)
        self.evaluations = 1
        self._root = _Node(thing=-1, parent=None, left=first.tolist(), best_ns=self.best_ns, best=first, visits=1)
        self._root.is_done = len(first) <= 1

    def run(self, rounds: int) -> None:
        """So many rounds more; fewer if every order has been tried by then."""
        for _ in range(rounds):
            if self._root.is_done:
                return
            self._play_out(self._expanded(self._selected()))

    def _selected(self) -> _Node:
        """Down the tree, as long as a child is worth more than one that was never tried."""
        node = self._root
        while node.children:
            log = math.log(node.visits)

            def worth(best_ns: float, visits: int, log: float = log) -> float:
                return (max(1, self.best_ns) / max(1, best_ns)) ** self._sharpness + self._exploration * math.sqrt(
                    log / visits
                )

            open_ones = [child for child in node.children if not child.is_done]
            best = max(open_ones, key=lambda child: worth(child.best_ns, child.visits), default=None)
            mean_ns = sum(child.best_ns for child in node.children) / len(node.children)
            if best is None or (node.left and worth(mean_ns, 1) >= worth(best.best_ns, best.visits)):
                break
            node = best
        return node

    def _expanded(self, node: _Node) -> _Node:
        """A new child."""
        depth = sum(1 for _ in _upwards(node)) - 1
        continued = int(node.best[depth])
        thing = continued if continued in node.left else node.left[int(self._random.integers(len(node.left)))]
        node.left.remove(thing)
        used = {one.thing for one in _upwards(node)} | {thing}
        rest = [other for other in self._root.best.tolist() if other not in used]
        child = _Node(thing=thing, parent=node, left=rest)
        if continued == thing:
            child.best, child.best_ns = node.best, node.best_ns
        node.children.append(child)
        return child

    def _play_out(self, node: _Node) -> None:
        """Random completions of a node's prefix; the best of them is made known to all nodes above."""
        prefix = np.array([one.thing for one in _upwards(node)][-2::-1], np.int64)
        rest = np.array(node.left, np.int64)
        for _ in range(self._play_outs if len(rest) > 1 else 1):
            order = np.concatenate([prefix, self._random.permutation(rest)])
            found = self._score(order)
            self.evaluations += 1
            if not len(node.best) or found < node.best_ns:
                node.best, node.best_ns = order, found
        node.is_done = len(rest) <= 1
        for one in _upwards(node):
            one.visits += 1
            one.is_done |= not one.left and bool(one.children) and all(child.is_done for child in one.children)
            if node.best_ns < one.best_ns:
                one.best, one.best_ns = node.best, node.best_ns
        if node.best_ns < self.best_ns:
            self.best, self.best_ns = node.best, node.best_ns


def _upwards(node: _Node) -> Iterator[_Node]:
    at: _Node | None = node
    while at is not None:
        yield at
        at = at.parent
