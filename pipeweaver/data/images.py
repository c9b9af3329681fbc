"""Images as rows of patches, and the size at which an image is taken in.

Patches are numbered row by row over the image; inside a patch values are flattened (channel, y, x).

    image [1, 24, 32], patch 4  ->  6 x 8 = 48 rows of 16 values
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def to_patches(image: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
    """[channels, height, width] to [height/patch * width/patch, channels*patch*patch]."""
    channels, height, width = image.shape
    assert height % patch == 0 and width % patch == 0, (image.shape, patch)
    grid = image.reshape(channels, height // patch, patch, width // patch, patch)
    rows = grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch)
    return np.ascontiguousarray(rows)


def from_patches(rows: NDArray[np.float32], patch: int, height: int, width: int) -> NDArray[np.float32]:
    """The inverse of `to_patches`; `height` and `width` in patches."""
    channels = rows.shape[1] // (patch * patch)
    grid = rows.reshape(height, width, channels, patch, patch).transpose(2, 0, 3, 1, 4)
    return np.ascontiguousarray(grid.reshape(channels, height * patch, width * patch))


def image_sizes(height: int, width: int, merge: int) -> dict[str, int]:
    """Sizes of a vision item of `height` x `width` patches, of which merge x merge make one feature row."""
    return {
        "tokens": height * width,
        "features": (height // merge) * (width // merge),
        "height": height,
        "width": width,
    }


def fitted_size(height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The (height, width) at which an image is taken in: its own, rounded to multiples, its shape about kept.

    At most `max_pixels` in all, whatever the shape; at least `min_pixels` unless that passes the maximum.
    Needs max_pixels >= multiple^2, so that at least one patch group fits.
    """
    assert max_pixels >= multiple * multiple, (max_pixels, multiple)
    most, least = max_pixels // multiple**2, math.ceil(min_pixels / multiple**2)
    rows, columns = max(1, round(height / multiple)), max(1, round(width / multiple))
    if rows * columns < least:
        scale = math.sqrt(min_pixels / (height * width)) / multiple
        rows, columns = math.ceil(height * scale), math.ceil(width * scale)
    if rows * columns > most:
        scale = math.sqrt(most / (height * width))
        rows = min(most, max(1, math.floor(height * scale)))
        columns = min(most, max(1, math.floor(width * scale)))
    return rows * multiple, columns * multiple
