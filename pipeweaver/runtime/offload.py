"""What layers save for their backward: moved to host memory, and brought back ahead of use.

    saved = SavedTensors(device)
    with saved.of("language.layers.3", stay=parameters):
        y = layer(x)                    what autograd saves goes through `saved`
    saved.seal(stay=[x, y])
    copies = Copies(device)
    copies.begin_out(saved)             beside compute, on a stream of its own; at once on a CPU
    copies.settle(saved); saved.free_leaving()
    copies.begin_back(saved)
    copies.settle(saved); saved.free_host()
    y.backward(gradient)                lets go of each tensor as it is used

Storages travel whole and once, however many saved tensors are views of them. What others hold anyway (parameters,
inputs and outputs of the chunk) stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class SavedTensors:
    """Saved tensors of the offloaded layers of one stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied: torch.cuda.Event | None = None
        self._stay: set[int] = set()
        self._saved: list[weakref.ref[_Saved]] = []
        self._storages: list[_Storage] = []
        self._on_host: list[Tensor] = []

    def of(self, layer: str, stay: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        """What is saved inside leaves, but for storages of `stay`. `layer` is for errors."""
        self._stay |= {_key(tensor) for tensor in stay}

        def pack(tensor: Tensor) -> _Saved:
            # Detached: autograd must not find its own graph in what it saves, a cycle that is never freed.
            saved = _Saved(layer, tensor.detach())
            self._saved.append(weakref.ref(saved))
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, _Saved.tensor)

    def seal(self, stay: Iterable[Tensor] = ()) -> None:
        """The forward is over: all that was saved, but for storages of `stay`, is ready to leave.

        Raises ValueError, naming the layer, if something has changed since it was saved.
        """
        self._stay |= {_key(tensor) for tensor in stay}
        storages: dict[int, _Storage] = {}
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.can_leave(self.device) and saved.key() not in self._stay:
                saved.leave(storages)
        self._saved.clear()
        self._storages = list(storages.values())

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return sum(storage.num_bytes for storage in self._storages)

    def out(self) -> list[tuple[Tensor, Tensor]]:
        """(source, target) of copies to the host, whose memory is allocated here."""
        is_cuda = self.device.type == "cuda"
        self._on_host = [
            torch.empty(storage.num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for storage in self._storages
        ]
        return list(zip([storage.bytes() for storage in self._storages], self._on_host, strict=True))

    def back(self) -> list[tuple[Tensor, Tensor]]:
        """(source, target) of copies back, into memory that the graph alone holds: the backward lets go of it."""
        for storage in self._storages:
            storage.on_device = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self.device)
        pairs = list(zip(self._on_host, [storage.bytes() for storage in self._storages], strict=True))
        self._storages.clear()
        return pairs

    def free_leaving(self) -> None:
        """Nothing is left on the device."""
        for storage in self._storages:
            storage.on_device = None

    def free_host(self) -> None:
        """Nothing is left on the host."""
        self._on_host.clear()


class Copies:
    """The ways to the host and back, one stream each, whose copies run beside compute. A CPU copies at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._back = torch.cuda.Stream(device) if is_cuda else None

    def begin_out(self, saved: SavedTensors) -> None:
        saved.copied = _copy(saved.out(), self._out)

    def begin_back(self, saved: SavedTensors) -> None:
        saved.copied = _copy(saved.back(), self._back)

    def settle(self, saved: SavedTensors) -> None:
        """What is computed from here on finds the latest copy done."""
        if saved.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(saved.copied)


class _Storage:
    """A storage that travels, as a flat tensor of bytes while it is on the device."""

    def __init__(self, tensor: Tensor) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.on_device: Tensor | None = flat.set_(tensor.untyped_storage())
        self.num_bytes = self.on_device.numel()

    def bytes(self) -> Tensor:
        assert self.on_device is not None, "what was saved is on the host"
        return self.on_device


class _Saved:
    """A saved tensor, which autograd holds: itself, or a view of a storage that travels."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self.layer = layer
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride()) if _is_plain(tensor) else None
        self._storage: _Storage | None = None

    def key(self) -> int:
        assert self._tensor is not None
        return _key(self._tensor)

    def can_leave(self, device: torch.device) -> bool:
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise ValueError(
                f"layer {self.layer} changes a tensor of shape {list(self._tensor.shape)} in place that its backward "
                "needs as it was; work on a copy, or out of place"
            )
        return self._view is not None and self._tensor.device == device and self._tensor.untyped_storage().nbytes() > 0

    def leave(self, storages: dict[int, _Storage]) -> None:
        assert self._tensor is not None
        key = self.key()
        if key not in storages:
            storages[key] = _Storage(self._tensor)
        self._storage, self._tensor = storages[key], None

    def tensor(self) -> Tensor:
        if self._storage is None:
            assert self._tensor is not None
            return self._tensor
        assert self._view is not None
        flat = self._storage.bytes()
        return torch.empty(0, dtype=self._dtype, device=flat.device).set_(flat.untyped_storage(), *self._view)


def _is_plain(tensor: Tensor) -> bool:
    """Whether dtype, offset, shape and strides are all that makes the tensor of its storage."""
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _copy(pairs: list[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        for source, target in pairs:
            target.copy_(source)
        return None
    # What is copied was made, and what is copied into was allocated, on the stream that computes.
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event
