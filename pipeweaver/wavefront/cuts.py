"""Cut the items of a task into runs for n workers, even in cost.

Runs are consecutive, so that what travels between two cuts is a few slices of rows. Example:

    costs 4 1 1 2 on 2 workers  ->  4 | 1 1 2        5 equal items on 3  ->  2 | 2 | 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def even_cuts(costs: Sequence[int], runs: int) -> tuple[int, ...]:
    """The runs + 1 positions of cuts, 0 and len(costs) included, with the smallest largest run.

    Runs are empty only where there are fewer items than runs: then one item each, the last runs empty.
    """
    count = len(costs)
    if count <= runs:
        return (*range(count + 1), *(count for _ in range(runs - count)))
    if min(costs) == max(costs):
        return tuple(-(-count * run // runs) for run in range(runs + 1))
    sums = [0, *accumulate(costs)]
    low, high = max(max(costs), -(-sums[-1] // runs)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(sums, runs, middle)) <= runs + 1:
            high = middle
        else:
            low = middle + 1
    cuts = _greedy(sums, runs, low)
    # With runs to spare, cut the longest ones: more workers have something to do.
    while len(cuts) < runs + 1:
        longest = max(range(len(cuts) - 1), key=lambda i: (cuts[i + 1] - cuts[i], -i))
        cuts.insert(longest + 1, (cuts[longest] + cuts[longest + 1]) // 2)
    return tuple(cuts)


def largest_run(costs: Sequence[int], cuts: Sequence[int]) -> int:
    """Number of the run that costs most."""
    sums = [0, *accumulate(costs)]
    return max(range(len(cuts) - 1), key=lambda i: sums[cuts[i + 1]] - sums[cuts[i]])


def _greedy(sums: Sequence[int], runs: int, limit: int) -> list[int]:
    """Cuts of runs as long as the limit allows; gives up after more than `runs` of them."""
    cuts = [0]
    while cuts[-1] < len(sums) - 1 and len(cuts) <= runs + 1:
        cuts.append(bisect_right(sums, sums[cuts[-1]] + limit) - 1)
    return cuts
