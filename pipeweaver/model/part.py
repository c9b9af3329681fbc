"""What a layer sees of the part it runs on, beside the tensors: items, lengths, loaded data, randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import noop_context_fn

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, TensorSpec

Made = TypeVar("Made")


@dataclass(kw_only=True)
class PartView:
    """The part that a chunk runs on, handed to every layer's forward.

    `items` in packed order; `links[i]` are the source items whose rows flow into items[i], in order;
    `loaded` holds what layers asked the data set for, packed like all tensors (or a list per item where
    shapes differ). `recompute_attention` is the memory strategy of the layer that runs now; `recompute_contexts` makes
    the contexts, for the first time and for the second, that what is recomputed runs in (torch's `context_fn`).
    """

    items: Sequence[Item]
    links: Sequence[Sequence[Item]]
    loaded: dict[str, Any]
    step: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    recompute_attention: bool = False
    recompute_contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn
    _reported: dict[str, tuple[float | Tensor, int | Tensor]] = field(default_factory=dict, repr=False)
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def sizes(self, name: str = "tokens") -> list[int]:
        """One size per item: lengths of the packed sequences for "tokens"."""
        return [item.sizes[name] for item in self.items]

    def linked_sizes(self, module: str, name: str = "tokens") -> list[int]:
        """Per item, rows that flow in from its linked items of `module`: lengths of a packed condition."""
        return [sum(source.sizes[name] for source in sources if source.module == module) for sources in self.links]

    def generator(self, item: Item, name: str) -> torch.Generator:
        """A CPU generator that depends on seed, step, item and name alone: never on worker, part or order."""
        generator = torch.Generator()
        generator.manual_seed(seed_of(self.seed, self.step, item.name, name))
        return generator

    def normal(self, name: str, *shape: int, rows: str = "tokens") -> Tensor:
        """Standard normal draws, one block [item's `rows`, *shape] per item, stacked along the first dimension."""
        blocks = [
            torch.randn((item.sizes[rows], *shape), generator=self.generator(item, name), dtype=torch.float32)
            for item in self.items
        ]
        return torch.cat([torch.empty((0, *shape)), *blocks]).to(self.device, self.dtype)

    def uniform(self, name: str) -> Tensor:
        """One draw from [0, 1) per item, shape [items], in single precision at least."""
        draws = [torch.rand(1, generator=self.generator(item, name), dtype=torch.float64) for item in self.items]
        precise = torch.promote_types(self.dtype, torch.float32)
        return torch.cat([torch.empty(0, dtype=torch.float64), *draws]).to(self.device, precise)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made at the first call with this key: for tensors that all layers of a chunk
        need of a part (rotary angles), and that depend on nothing but the part."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def made(self) -> list[Tensor]:
        """All tensors that `once` has made."""
        return [leaf for leaf in tree_leaves(list(self._made.values())) if isinstance(leaf, Tensor)]

    def report(self, name: str, total: float | Tensor, count: int | Tensor) -> None:
        """Report a metric that is averaged over the step: total / count over all parts and replicas.

        A second report of the same name replaces the first, so that a recomputed layer does not count twice.
        Tensors are read only when `metrics` is: reporting does not wait for the device.
        """
        self._reported[name] = (total, count)

    @property
    def metrics(self) -> dict[str, tuple[float, int]]:
        """What layers reported, as name -> (total, count)."""
        return {name: (float(total), int(count)) for name, (total, count) in self._reported.items()}


def seed_of(*key: object) -> int:
    """A seed, below 2**63, that depends on all parts of the key."""
    text = "/".join(str(part) for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def check_outputs(layer: str, spec: LayerSpec, outputs: dict[str, Tensor], part: PartView, *, loss: bool) -> None:
    """Raise ValueError unless a layer returned the tensors that its spec promises, with their rows and widths.

    `loss`: whether it has to return the scalar "loss" too (the last layer of a module with a loss).
    """
    promised = {tensor.name: tensor for tensor in (*spec.carries, *spec.sends)}
    expected = {*promised, "loss"} if loss else set(promised)
    if set(outputs) != expected:
        raise ValueError(f"layer {layer} returned {_listed(outputs)}; its spec promises {_listed(expected)}")
    if loss and outputs["loss"].dim() != 0:
        raise ValueError(f"layer {layer} returned a loss of shape {list(outputs['loss'].shape)}; it must be one number")
    for name, tensor in promised.items():
        shape = [sum(part.sizes(tensor.rows)), tensor.width]
        if list(outputs[name].shape) != shape:
            raise ValueError(f"layer {layer} returned {name} of shape {list(outputs[name].shape)}, promised {shape}")
        dtype = part.dtype if tensor.dtype == "model" else getattr(torch, tensor.dtype)
        if outputs[name].dtype != dtype:
            raise ValueError(f"layer {layer} returned {name} as {outputs[name].dtype}, promised {dtype}")


def handed_on(spec: TensorSpec, outputs: dict[str, Tensor]) -> Tensor:
    """A tensor as the next reader gets it: without history if its spec says that no gradient flows back, be the
    reader in the same chunk or in another."""
    return outputs[spec.name] if spec.grad else outputs[spec.name].detach()


def _listed(names: Sequence[str] | set[str] | dict[str, Tensor]) -> str:
    return ", ".join(sorted(names)) or "nothing"
