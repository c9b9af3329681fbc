"""What may become of what a unit saves: a few candidates from fastest to leanest, by a knapsack over its layers.

Each layer follows one strategy (keep, recompute, offload…), which holds so many bytes and takes so much time more. A
multiple-choice knapsack finds for every amount of memory the fastest choice; of these, S candidates are kept: the
fastest, the leanest, and the fastest within each of S - 2 limits evenly between them (pipeweaver.md, section 3.3).
Example, two layers that keep 10 bytes or recompute for 3 ns, S = 3:

    fastest 20 bytes, 0 ns      within 10 bytes, 3 ns      leanest 0 bytes, 6 ns

What is copied to the host and back runs beside compute: it is waited for where a copy takes longer than the stage that
it runs beside, and else has a small price, so that what memory has room for stays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numba
import numpy as np

from pipeweaver.costs import LayerStrategies, StageCost, StrategyCost, with_strategies
from pipeweaver.planner.leaning import Strategies
from pipeweaver.schedule.connect import Ints
from pipeweaver.schedule.ir import Strategy

CANDIDATES = 10
"""S."""
MOST_BLOCKS = 16
"""Of more equal layers than this, neighbours follow the same strategy in blocks."""
MOST_STATES = 2_048
"""Partial choices that the knapsack keeps; of more, which takes very many different layers, an even selection by
size."""


COPY_PRICE = 20
"""A copy to or from the host counts as its duration over this many."""


class Candidate(NamedTuple):
    """Strategies of a unit's layers (none: all keep), its cost under them, what copies to and from the host take longer
    than forward and backward, and the latency to choose by: forward, backward, that, and the price of the copies."""

    strategies: Strategies
    cost: StageCost
    stall_ns: int
    latency_ns: int

    @property
    def held_bytes(self) -> int:
        return self.cost.saved_bytes


def candidates(
    cost: StageCost, layers: Sequence[LayerStrategies], allowed: Sequence[Strategy], count: int = CANDIDATES
) -> tuple[Candidate, ...]:
    """At most `count` candidates, from fastest to leanest, each slower and leaner than the one before; one is the
    leanest.

    `layers` as `Costs.strategies` has them; "keep" is always allowed. Without layers there is the one that keeps all.
    """
    choices = _choices(layers, allowed)
    if choices is None:
        return (Candidate((), cost, 0, cost.forward_ns + cost.backward_ns),)
    held, extra_ns, travel_ns = choices.totals.T
    stalls = np.maximum(0, travel_ns - cost.forward_ns) + np.maximum(0, travel_ns - cost.backward_ns - extra_ns)
    price = extra_ns + stalls + 2 * travel_ns // COPY_PRICE
    fastest = np.lexsort((held, price))[0]
    leanest = np.lexsort((price, held))[0]
    spread = int(held[fastest] - held[leanest])
    chosen = [int(fastest)] if count > 1 else []
    for k in range(count - 2, 0, -1):
        within = np.nonzero(held <= held[leanest] + spread * k // (count - 1))[0]
        chosen.append(int(within[np.lexsort((held[within], price[within]))[0]]))
    found: list[Candidate] = []
    for i in dict.fromkeys([*chosen, int(leanest)]):
        strategies = choices.strategies(i)
        latency = cost.forward_ns + cost.backward_ns + int(price[i])
        candidate = Candidate(strategies, with_strategies(cost, strategies, layers), int(stalls[i]), latency)
        if not found or candidate.held_bytes < found[-1].held_bytes:
            found.append(candidate)
    return tuple(found)


class _Choices(NamedTuple):
    """Choices that no other beats in bytes, time and travel: `totals` [N, 3], and how many layers of each group of
    equal ones follow which option, `counts` [N, all options of all groups]."""

    totals: Ints
    counts: Ints
    groups: tuple[tuple[tuple[int, ...], tuple[Strategy, ...]], ...]
    """Positions of the layers, and the options, of each group."""
    num_layers: int

    def strategies(self, number: int) -> Strategies:
        """Of every layer, in order; () if all keep. Of a group the first layers travel longest: they have most time."""
        result: list[Strategy] = ["keep"] * self.num_layers
        at = 0
        for positions, options in self.groups:
            taken = [
                o for o, n in zip(options, self.counts[number, at : at + len(options)], strict=True) for _ in range(n)
            ]
            for position, option in zip(positions, taken, strict=True):
                result[position] = option
            at += len(options)
        return tuple(result) if any(option != "keep" for option in result) else ()


def _choices(layers: Sequence[LayerStrategies], allowed: Sequence[Strategy]) -> _Choices | None:
    """All choices worth considering, by a knapsack over groups of equal layers; None if no layer has an alternative."""
    groups = [(positions, _options(layers[positions[0]], allowed)) for positions in _equal(layers)]
    if all([name for name, _ in options] == ["keep"] for _, options in groups):
        return None
    totals, counts = np.zeros((1, 3), np.int64), np.zeros((1, 0), np.int64)
    listed: list[tuple[tuple[int, ...], tuple[Strategy, ...]]] = []
    for positions, options in groups:
        size = -(-len(positions) // MOST_BLOCKS)
        blocks, rest = divmod(len(positions), size)
        for first, number, each in ((0, blocks, size), (blocks * size, min(rest, 1), rest)):
            if not number:
                continue
            picked = (
                np.array(
                    [
                        np.bincount(taken, minlength=len(options))
                        for taken in combinations_with_replacement(range(len(options)), number)
                    ],
                    np.int64,
                )
                * each
            )
            prices = np.array([(c.saved_bytes, c.extra_ns, c.offload_ns) for _, c in options], np.int64)
            totals = (totals[:, None, :] + (picked @ prices)[None, :, :]).reshape(-1, 3)
            counts = np.concatenate([np.repeat(counts, len(picked), axis=0), np.tile(picked, (len(counts), 1))], axis=1)
            listed.append((positions[first : first + number * each], tuple(name for name, _ in options)))
            order = np.lexsort((totals[:, 2], totals[:, 1], totals[:, 0]))
            kept = order[_undominated(totals[order])]
            if len(kept) > MOST_STATES:
                kept = kept[np.unique(np.linspace(0, len(kept) - 1, MOST_STATES).astype(np.int64))]
            totals, counts = totals[kept], counts[kept]
    return _Choices(totals, counts, tuple(listed), len(layers))


def _equal(layers: Sequence[LayerStrategies]) -> list[tuple[int, ...]]:
    """Positions of layers that cost the same, group by group."""
    found: dict[object, list[int]] = {}
    for position, known in enumerate(layers):
        found.setdefault(tuple(known.items()), []).append(position)
    return [tuple(positions) for positions in found.values()]


def _options(known: LayerStrategies, allowed: Sequence[Strategy]) -> list[tuple[Strategy, StrategyCost]]:
    """The strategies of a layer that none of the others beats in all; those that travel first."""
    options = [(name, cost) for name, cost in known.items() if name == "keep" or name in allowed]
    kept = [
        (name, cost)
        for i, (name, cost) in enumerate(options)
        if not any(
            all(a <= b for a, b in zip(other, cost, strict=True)) and (other != cost or k < i)
            for k, (_, other) in enumerate(options)
        )
    ]
    return sorted(kept, key=lambda option: -option[1].offload_ns)


@numba.njit(cache=True)
def _undominated(totals):  # type: ignore[no-untyped-def]
    """Positions of the rows that no other row beats, of rows sorted by column 0, then 1, then 2."""
    kept, size = np.empty(len(totals), np.int64), 0
    # Pairs (column 1, column 2) that no kept one beats: the stairs that a row must go below.
    stairs, steps = np.empty((len(totals), 2), np.int64), 0
    for i in range(len(totals)):
        beaten = False
        for k in range(steps):
            if stairs[k, 0] <= totals[i, 1] and stairs[k, 1] <= totals[i, 2]:
                beaten = True
                break
        if beaten:
            continue
        kept[size] = i
        size += 1
        left = 0
        for k in range(steps):
            if not (totals[i, 1] <= stairs[k, 0] and totals[i, 2] <= stairs[k, 1]):
                stairs[left] = stairs[k]
                left += 1
        stairs[left] = totals[i, 1:]
        steps = left + 1
    return kept[:size]
