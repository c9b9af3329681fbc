"""Move rows between packed tensors: what an edge's tensor is made of, and what is made of edges' tensors.

Example: two images of 2 and 3 rows become one text's input "vision"; the second one arrives over an edge of
its own, so its tensor starts at row 0:

    combine([(a, (Rows(0, 0, 2),)), (b, (Rows(0, 2, 3),))], num_rows=5, ...)  ->  [a0 a1 b0 b1 b2]

The common case, one tensor whose rows are all wanted in order, costs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeweaver.schedule.ir import Rows

Piece = tuple[Tensor, Sequence[Rows]]
"""A tensor, and where which of its rows go."""


def take(tensor: Tensor, rows: Sequence[Rows]) -> Tensor:
    """The source rows of an edge in travelling order, contiguous; `tensor` itself if that is what they are."""
    runs = merge(rows)
    if len(runs) == 1:
        return _narrow(tensor, runs[0]).contiguous()
    return torch.cat([_narrow(tensor, run) for run in runs]) if runs else tensor.new_empty((0, *tensor.shape[1:]))


def backwards(rows: Sequence[Rows]) -> list[Rows]:
    """The same rows from destination to source, still in the order of travel."""
    return [Rows(run.destination, run.source, run.length) for run in rows]


def arriving(rows: Sequence[Rows]) -> list[Rows]:
    """The rows of an edge as they lie in the tensor that travelled: sources count from 0 without gaps."""
    start = 0
    packed = []
    for run in rows:
        packed.append(Rows(start, run.destination, run.length))
        start += run.length
    return packed


def combine(pieces: Sequence[Piece], num_rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [num_rows, width] with the rows of all pieces in their places.

    Rows that several pieces reach are summed in the order of the pieces, rows that none reaches are zero.
    The result may share memory with a piece: do not write to it.
    """
    runs = [(tensor, run) for tensor, rows in pieces for run in merge(rows)]
    if len(runs) == 1 and runs[0][1].length == num_rows:
        return _narrow(*runs[0])
    runs_in_order = sorted(runs, key=lambda entry: entry[1].destination)
    if runs and _tile([run for _, run in runs_in_order], num_rows):
        return torch.cat([_narrow(tensor, run) for tensor, run in runs_in_order])
    total = torch.zeros((num_rows, width), dtype=dtype, device=device)
    for tensor, run in runs:
        total.narrow(0, run.destination, run.length).add_(_narrow(tensor, run))
    return total


def merge(rows: Sequence[Rows]) -> list[Rows]:
    """The same rows in as few runs as possible; empty runs vanish. Rows keep their order of travel."""
    merged: list[Rows] = []
    for run in rows:
        if not run.length:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source + last.length == run.source
            and last.destination + last.length == run.destination
        ):
            merged[-1] = Rows(last.source, last.destination, last.length + run.length)
        else:
            merged.append(run)
    return merged


def _narrow(tensor: Tensor, run: Rows) -> Tensor:
    if run.source == 0 and run.length == len(tensor):
        return tensor
    return tensor.narrow(0, run.source, run.length)


def _tile(runs: Sequence[Rows], num_rows: int) -> bool:
    """Whether runs, sorted by destination, cover every row exactly once."""
    reached = 0
    for run in runs:
        if run.destination != reached:
            return False
        reached += run.length
    return reached == num_rows
