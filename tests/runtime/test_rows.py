"""Rows between packed tensors, against a row-by-row reckoning."""

from __future__ import annotations

import random

import pytest
import torch

from pipeweaver.runtime.rows import arriving, backwards, combine, merge, take
from pipeweaver.schedule.ir import Rows


def some_rows(draw: random.Random, source_rows: int, destination_rows: int) -> list[Rows]:
    """Runs that reach each destination row at most once, in random order of travel."""
    runs, row = [], 0
    while row < destination_rows:
        length = draw.randint(0, min(3, destination_rows - row, source_rows))
        if draw.random() < 0.8:
            runs.append(Rows(draw.randint(0, source_rows - length), row, length))
        row += max(1, length)
    draw.shuffle(runs)
    return runs


@pytest.mark.parametrize("seed", range(30))
def test_rows_travel_where_they_belong_and_back(seed):
    draw = random.Random(seed)
    sources = [torch.randn(draw.randint(1, 9), 3, dtype=torch.float64) for _ in range(draw.randint(0, 3))]
    edges = [(source, some_rows(draw, len(source), 7)) for source in sources]
    expected = torch.zeros(7, 3, dtype=torch.float64)
    for source, rows in edges:
        for run in rows:
            for k in range(run.length):
                expected[run.destination + k] += source[run.source + k]
    make = {"dtype": torch.float64, "device": torch.device("cpu")}
    # Handed over in place, and by way of a tensor that travelled.
    assert torch.equal(combine(edges, 7, 3, **make), expected)
    travelled = [(take(source, rows), arriving(rows)) for source, rows in edges]
    assert torch.equal(combine(travelled, 7, 3, **make), expected)

    # The way back is the transpose: <A x, y> = <x, A' y>.
    y = torch.randn(7, 3, dtype=torch.float64)
    forth = sum(float((combine([edge], 7, 3, **make) * y).sum()) for edge in edges)
    back = 0.0
    for source, rows in edges:
        gradient = combine([(take(y, backwards(rows)), arriving(backwards(rows)))], len(source), 3, **make)
        back += float((source * gradient).sum())
    assert back == pytest.approx(forth, abs=1e-12)


def test_a_whole_tensor_is_not_copied():
    x = torch.randn(6, 2)
    rows = [Rows(0, 0, 2), Rows(2, 2, 0), Rows(2, 2, 4)]
    assert take(x, rows).data_ptr() == x.data_ptr()
    whole = combine([(x, rows)], 6, 2, dtype=x.dtype, device=x.device)
    assert whole.data_ptr() == x.data_ptr()
    # Neighbouring rows of a larger tensor neither.
    some = combine([(x, [Rows(2, 0, 3)])], 3, 2, dtype=x.dtype, device=x.device)
    assert some.data_ptr() == x[2:].data_ptr() and torch.equal(some, x[2:5])


def test_no_rows_at_all():
    x = torch.randn(3, 2, dtype=torch.float64)
    assert take(x, []).shape == (0, 2)
    nothing = combine([], 0, 5, dtype=torch.float16, device=x.device)
    assert nothing.shape == (0, 5) and nothing.dtype == torch.float16
    assert torch.equal(combine([], 2, 5, dtype=x.dtype, device=x.device), torch.zeros(2, 5, dtype=x.dtype))


def test_runs_are_merged_only_where_both_ends_continue():
    assert merge([Rows(0, 4, 2), Rows(2, 6, 1), Rows(3, 8, 1), Rows(3, 9, 1)]) == [
        Rows(0, 4, 3),
        Rows(3, 8, 1),
        Rows(3, 9, 1),
    ]
