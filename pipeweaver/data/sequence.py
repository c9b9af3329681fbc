"""Token sequences with their labels, made of pieces that are learned or only read.

The label of a row is the next token of the same sequence, or -100 where that token is not learned;
so no label ever points across a boundary, and no placeholder is ever a label.

    pieces   bos(-)  image image(-)  t w o(+, span 0)
    tokens   256     258   258       t  w  o
    labels   -100    -100  t         w  o  -100
    spans    -1      -1    0         0  0  -1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of a row that carries no loss."""


class Piece(NamedTuple):
    """Consecutive tokens that are all learned or all only read; `span` numbers an answer, -1 is none."""

    tokens: Sequence[int]
    learned: bool
    span: int = -1


class TokenSequence(NamedTuple):
    """`tokens`, `labels` and `spans`, each int64 of shape [tokens]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    spans: NDArray[np.int64]

    @property
    def supervised(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))


def build_sequence(pieces: Iterable[Piece]) -> TokenSequence:
    pieces = list(pieces)
    lengths = [len(piece.tokens) for piece in pieces]
    tokens = np.array([token for piece in pieces for token in piece.tokens], dtype=np.int64)
    learned = np.repeat([piece.learned for piece in pieces], lengths)
    span = np.repeat(np.array([piece.span for piece in pieces], dtype=np.int64), lengths)
    labels = np.full(len(tokens), IGNORED, dtype=np.int64)
    spans = np.full(len(tokens), -1, dtype=np.int64)
    labels[:-1] = np.where(learned[1:], tokens[1:], IGNORED)
    spans[:-1] = span[1:]
    return TokenSequence(tokens, labels, spans)


def cut_sequence(sequence: TokenSequence, length: int) -> TokenSequence:
    """The first `length` rows. The last of them predicts nothing any more, and an answer that lost a row is none."""
    tokens, labels, spans = (array[:length].copy() for array in sequence)
    if length < len(sequence.tokens):
        lost = np.unique(sequence.spans[length - 1 :])
        spans[np.isin(spans, lost)] = -1
        labels[-1] = IGNORED
    return TokenSequence(tokens, labels, spans)
