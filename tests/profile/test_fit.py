"""Interpolation: exact where the form fits, never negative, growing with every size."""

import random
from itertools import combinations

import numpy as np
import pytest

from pipeweaver.profile.fit import Sizes, cover, errors, fit, fit_or_zero


def draw_sizes(draw: random.Random) -> Sizes:
    lengths = [draw.randint(1, 200) for _ in range(draw.randint(1, 12))]
    if draw.random() < 0.4:
        lengths = lengths[:1] * len(lengths)
    linked = [draw.randint(0, 40) for _ in lengths]
    cross = sum(a * b for a, b in zip(lengths, linked, strict=True))
    squares = sum(length**2 for length in lengths)
    mixed = sum(lengths) if len(set(lengths)) > 1 else 0
    return Sizes(1, len(lengths), sum(lengths), squares, mixed, draw.randint(0, sum(lengths)), sum(linked), cross)


def test_a_line_is_found():
    found = fit([Sizes(rows=rows) for rows in (10, 20, 40)], [12, 22, 42])
    assert found.coefficients[0] == 2_000_000 and found.coefficients[2] == 1_000_000
    assert found.at(Sizes(rows=1000)) == 1002


@pytest.mark.parametrize("seed", range(10))
def test_costs_of_the_assumed_form_are_found_exactly(seed):
    draw = random.Random(seed)
    truth = [draw.choice((0, draw.randint(1, 5000))) for _ in Sizes._fields]
    truth[2] += 1
    sizes = [draw_sizes(draw) for _ in range(20)]
    values = [sum(c * s for c, s in zip(truth, size, strict=True)) for size in sizes]
    found = fit(sizes, values)
    for size in [draw_sizes(draw) for _ in range(20)]:
        expected = sum(c * s for c, s in zip(truth, size, strict=True))
        assert found.at(size) == pytest.approx(expected, rel=1e-6)
    assert max(errors(sizes, values)) < 1e-5


@pytest.mark.parametrize("seed", range(10))
def test_more_work_never_costs_less_whatever_was_measured(seed):
    draw = random.Random(seed)
    sizes = [draw_sizes(draw) for _ in range(8)]
    found = fit(sizes, [draw.uniform(1, 1e9) for _ in sizes])
    assert all(c >= 0 for c in found.coefficients)
    small, more = draw_sizes(draw), draw_sizes(draw)
    assert found.at(small) <= found.at(Sizes(*(a + b for a, b in zip(small, more, strict=True)))._replace(one=1))


@pytest.mark.parametrize("seed", range(5))
def test_no_other_non_negative_solution_is_better(seed):
    """The oracle: coordinate descent on the same weighted problem, from many starts."""
    draw = random.Random(seed)
    sizes = [draw_sizes(draw) for _ in range(9)]
    values = [1e6 + 300 * s.rows + 2 * s.squares + draw.uniform(0, 1e6) for s in sizes]
    matrix = np.array(sizes, float) / np.array(values)[:, None]

    def residual(solution):
        return float(((matrix @ solution - 1) ** 2).sum())

    found = residual(np.array(fit(sizes, values).coefficients) / 1e6)
    for count in range(1, 9):
        for columns in combinations(range(8), count):
            solution = np.zeros(8)
            solution[list(columns)] = np.linalg.lstsq(matrix[:, columns], np.ones(9), rcond=None)[0]
            if (solution >= 0).all():
                assert found <= residual(solution) + 1e-9


def test_relative_errors_count_so_small_parts_are_not_forgotten():
    sizes = [Sizes(rows=rows) for rows in (1, 10, 100, 1000)]
    found = fit(sizes, [101, 110, 200, 1300])
    assert found.at(Sizes(rows=1)) == pytest.approx(101, rel=0.15)
    assert found.at(Sizes(rows=1000)) == pytest.approx(1300, rel=0.15)


def test_what_is_never_above_zero_is_zero():
    assert fit_or_zero([Sizes(rows=3), Sizes(rows=9)], [0, 0]).at(Sizes(rows=7)) == 0


def test_a_cover_is_never_below_what_was_measured():
    sizes = [Sizes(rows=rows) for rows in (10, 20, 40, 80)]
    values = [500, 210, 390, 820]
    found = cover(sizes, values)
    assert all(found.at(size) >= value for size, value in zip(sizes, values, strict=True))


def test_an_outlier_shows_in_the_error():
    sizes = [Sizes(rows=rows) for rows in (10, 20, 30, 40, 50)]
    assert max(errors(sizes, [10, 20, 90, 40, 50])) > 0.5
