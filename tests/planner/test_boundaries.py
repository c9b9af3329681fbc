"""Boundaries between chunks: moved ones leave workers more even than whole blocks could be, and no chunk too large."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeweaver.planner.boundaries import LARGER, period_of, refined


def laid_out(workers: int, blocks: int, rounds: int, period: int = 2):
    """Chunks of so many blocks each, worker by worker."""
    return [
        (number * blocks * period, (number + 1) * blocks * period, number % workers)
        for number in range(workers * rounds)
    ]


def loads_of(chunks, costs, waits):
    loads = np.array(waits, np.float64)
    for name, ranges in chunks.items():
        for start, stop, worker in ranges:
            loads[:, worker] += costs[name][:, start:stop].sum(axis=1)
    return loads


def test_a_head_is_made_up_for_in_halves_of_blocks() -> None:
    # Two chunks of two blocks on each of two workers; the head takes as long as an attention and an MLP (1 + 4).
    costs = np.array([[1.0, 4.0] * 8])
    costs[:, -1] += 5.0
    chunks = {"language": laid_out(2, 2, 2)}
    waits = np.zeros((1, 2))
    assert loads_of(chunks, {"language": costs}, waits).tolist() == [[20.0, 25.0]]
    score, found = refined(chunks, {"language": costs}, waits, {})
    loads = loads_of(found, {"language": costs}, waits)
    assert loads.max() <= 23.0, "22 and 23 are as near as whole layers come"
    assert score == pytest.approx(((loads / loads.mean()) ** 64).mean() ** (1 / 64))


def test_first_chunks_that_are_kept_do_not_grow() -> None:
    # One block, then seven, on each of two workers; the head takes as long as an attention and an MLP.
    costs = np.array([[1.0, 4.0] * 16])
    costs[:, -1] += 5.0
    chunks = {"language": [(0, 2, 0), (2, 10, 1), (10, 24, 0), (24, 32, 1)]}
    waits = np.zeros((1, 2))
    assert loads_of(chunks, {"language": costs}, waits).tolist() == [[40.0, 45.0]]
    for kept, busiest in ((0, 43.0), (1, 44.0), (2, 44.0)):
        score, found = refined(chunks, {"language": costs}, waits, {"language": kept})
        for number in range(kept):
            (start, stop, _), (first, last, _) = found["language"][number], chunks["language"][number]
            assert costs[0, start:stop].sum() <= costs[0, first:last].sum()
        assert loads_of(found, {"language": costs}, waits).max() == busiest and score < 45 / 42.5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_every_layer_stays_in_one_chunk(workers, blocks, rounds, samples, seed) -> None:
    random = np.random.default_rng(seed)
    chunks = {"a": laid_out(workers, blocks, rounds), "b": laid_out(workers, blocks + 1, 1)}
    costs, plain = {}, {}
    for name, ranges in chunks.items():
        kinds = random.integers(1, 100, (samples, 2)).astype(np.float64)
        plain[name] = np.tile(kinds, (1, ranges[-1][1] // 2))
        costs[name] = plain[name].copy()
        costs[name][:, -1] += random.integers(0, 300)
    waits = random.integers(0, 50, (samples, workers)).astype(np.float64)
    before = {name: list(ranges) for name, ranges in chunks.items()}
    score, found = refined(chunks, costs, waits, {})
    assert chunks == before
    for name, ranges in found.items():
        assert [worker for *_, worker in ranges] == [worker for *_, worker in chunks[name]]
        assert ranges[0][0] == 0 and ranges[-1][1] == costs[name].shape[1]
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert all(start < stop for start, stop, _ in ranges)
        if costs[name].shape[1] > 4:  # of fewer layers it cannot be told what repeats
            largest = max(plain[name][:, start:stop].sum() for start, stop, _ in chunks[name])
            assert all(plain[name][:, a:b].sum() <= LARGER * largest * (1 + 1e-9) for a, b, _ in ranges)

    def uneven(of):
        loads = loads_of(of, costs, waits)
        return float((((loads / loads.mean(axis=1, keepdims=True)) ** 64).mean(axis=1) ** (1 / 64)).mean())

    assert score == pytest.approx(uneven(found))
    assert score <= uneven(chunks) * (1 + 1e-9)
    assert refined(chunks, costs, waits, {}) == (score, found), "always the same"


@pytest.mark.parametrize(
    ("costs", "period"),
    [
        ([1, 1, 1, 1], 1),
        ([1, 4, 1, 4, 1, 9], 2),
        ([7, 4, 1, 4, 1, 9], 2),
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3, 4, 5, 6], 1),
    ],
)
def test_a_block_is_what_repeats(costs, period) -> None:
    assert period_of(np.array([costs], np.float64)) == period
