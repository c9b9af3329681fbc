"""Search for a good order: a few greedy schedules from known ranks, then seeded improvement rounds.

The ranks blend two extremes: *critical path*, whatever has the longest way to the end goes first, which fills
the pipeline fastest; and *in order*, microbatch by microbatch, which needs the least memory. Under a memory
limit the number of open microbatches is tried too. A round moves the forwards or the backwards of one microbatch
up or down in rank and keeps what is no worse. Example of ranks with blend 1, microbatches of 10 ns, tails 9 and 7:

    microbatch 0   0 - 9, 0 - 7        microbatch 1   10 - 9, 10 - 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeweaver.planner.instance import Instance, Ints
from pipeweaver.planner.interleave import Schedule, TieBreak, check_limits, interleave, needed_alone, tails

BLENDS = (0.0, 0.3, 1.0, 1_000.0)
"""How much a microbatch's place in the order counts against the critical path, in mean microbatch times."""
OPEN_FACTORS = (1.0, 1.5, 2.0, 3.0)
"""Open microbatches under a memory limit, as multiples of how many fit at their fullest."""
STEP = 0.15
"""Mean size of a move in rank, as a share of the longest tail."""


def search(instance: Instance, *, limits: Sequence[int] | None = None, seed: int = 0, rounds: int = 0) -> Schedule:
    """The best schedule found, by makespan; of equals the first. Same arguments, same schedule.

    `limits` [P]: bytes that each worker may use for stages. Raises MemoryLimitError if a microbatch does not
    fit alone.
    """
    longest = tails(instance)
    starts = [(rank, tie, most) for most in _open_counts(instance, limits) for rank, tie in _starts(instance, longest)]
    schedules = [interleave(instance, rank, tie, limits, most) for rank, tie, most in starts]
    best = min(range(len(starts)), key=lambda i: schedules[i].makespan_ns)
    schedule, (rank, tie, most) = schedules[best], starts[best]
    if instance.num_stages == 0:
        return schedule
    random = np.random.default_rng(seed)
    largest = max(1, int(STEP * int(longest.max())))
    for _ in range(rounds):
        moved = rank.copy()
        microbatch = random.integers(instance.num_microbatches)
        chosen = (instance.microbatch == microbatch) & (instance.backward == random.integers(2))
        moved[chosen] += random.integers(-2 * largest, 2 * largest + 1)
        found = interleave(instance, moved, tie, limits, most)
        if found.makespan_ns <= schedule.makespan_ns:
            schedule, rank = found, moved
    return schedule


def _starts(instance: Instance, longest: Ints) -> Iterator[tuple[Ints, TieBreak]]:
    work = int(instance.duration_ns.sum()) // max(1, instance.num_workers * instance.num_microbatches)
    for blend in BLENDS:
        rank = int(blend * work) * instance.microbatch - longest
        yield rank, "alternate"
        yield rank, "backward" if blend else "rank"


def _open_counts(instance: Instance, limits: Sequence[int] | None) -> list[int | None]:
    if limits is None or instance.num_microbatches == 0:
        return [None]
    check_limits(instance, limits)
    fullest = (needed_alone(instance) - instance.reserve).max(axis=0)
    fitting = (
        min(
            (limit - reserve) // full
            for limit, reserve, full in zip(limits, instance.reserve.tolist(), fullest.tolist(), strict=True)
            if full > 0
        )
        if fullest.any()
        else instance.num_microbatches
    )
    if fitting >= instance.num_microbatches:
        return [None]
    return [*sorted({min(instance.num_microbatches, int(factor * fitting)) for factor in OPEN_FACTORS})]
