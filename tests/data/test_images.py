"""Patches keep their order; sizes keep their limits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeweaver.data.images import fitted_size, from_patches, image_sizes, to_patches


def test_patches_are_row_major_and_flattened_by_channel_then_row():
    image = np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6)
    rows = to_patches(image, 2)
    assert rows.shape == (6, 8)
    assert rows[0].tolist() == [0, 1, 6, 7, 24, 25, 30, 31]
    assert rows[1, 0] == 2 and rows[3, 0] == 12
    assert np.array_equal(from_patches(rows, 2, 2, 3), image)


def test_sizes_of_an_image():
    assert image_sizes(6, 8, 2) == {"tokens": 48, "features": 12, "height": 6, "width": 8}


@given(
    height=st.integers(1, 20_000),
    width=st.integers(1, 20_000),
    multiple=st.sampled_from([8, 28]),
    groups=st.integers(1, 500),
    least=st.integers(1, 500),
)
def test_sizes_are_multiples_within_the_limits(height, width, multiple, groups, least):
    max_pixels, min_pixels = groups * multiple**2 + 5, min(groups, least) * multiple**2
    rows, columns = fitted_size(height, width, multiple=multiple, min_pixels=min_pixels, max_pixels=max_pixels)
    assert rows % multiple == columns % multiple == 0 and rows > 0 and columns > 0
    assert rows * columns <= max_pixels
    # The minimum gives way to the maximum alone.
    if 4 * min_pixels <= max_pixels and max(height, width) <= 2 * min(height, width):
        assert rows * columns >= min_pixels


def test_an_image_of_fitting_size_keeps_it():
    assert fitted_size(56, 84, multiple=28, min_pixels=56 * 56, max_pixels=10**6) == (56, 84)
    assert fitted_size(2000, 1000, multiple=28, min_pixels=0, max_pixels=28 * 28 * 50) == (280, 140)
