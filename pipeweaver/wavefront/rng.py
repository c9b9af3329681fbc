"""Random numbers for compiled loops: the same sequence everywhere, whatever numpy or numba do with theirs.

Xorshift (Marsaglia 2003) on one unsigned word that the caller holds: `random = seeded(7)`, then `below(random, 6)`.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def seeded(seed):  # type: ignore[no-untyped-def]
    """A generator for a seed of at least zero."""
    random = np.array([np.uint64(seed) * np.uint64(2654435761) + np.uint64(88172645463325252)])
    for _ in range(8):
        _next(random)
    return random


@numba.njit(cache=True)
def below(random, limit):  # type: ignore[no-untyped-def]
    """A whole number from 0 to limit - 1."""
    return np.int64(_next(random) >> np.uint64(11)) % limit


@numba.njit(cache=True)
def uniform(random):  # type: ignore[no-untyped-def]
    """A real number from [0, 1)."""
    return np.float64(_next(random) >> np.uint64(11)) / 9007199254740992.0


@numba.njit(cache=True)
def _next(random):  # type: ignore[no-untyped-def]
    word = random[0]
    word ^= word << np.uint64(13)
    word ^= word >> np.uint64(7)
    word ^= word << np.uint64(17)
    random[0] = word
    return word
