"""Bytes alive at each moment, counted per storage as operators make and drop tensors.

    with LiveBytes() as live:
        state = run_forward(...)
    live.peak, live.now       # highest, and still held by `state`: outputs and what autograd saved

Counts what is made inside the context, on any device and for any allocator; scratch memory that a kernel
takes and gives back by itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts bytes of the storages made in the context: `now` alive, `peak` at most since `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What the call takes in is known to be older than the call, made inside the context or not.
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _key(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def reset_peak(self) -> None:
        self.peak = self.now

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of `tensors` that were made in the context, each once."""
        return sum(self._seen[key][1] for key in {_key(tensor) for tensor in tensors} if key in self._seen)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen[key] = (weakref.ref(storage, lambda _: self._drop(key)), num_bytes)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._seen.pop(key)[1]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
