"""What a layer sees of the part it runs on, beside the tensors: items, lengths, loaded data, randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeweaver.data.items import Item


@dataclass(kw_only=True)
class PartView:
    """The part that a chunk runs on, handed to every layer's forward.

    `items` in packed order; `links[i]` are the source items whose rows flow into items[i], in order;
    `loaded` holds what layers asked the data set for, packed like all tensors (or a list per item where
    shapes differ). `metrics` collects what layers report, as name -> (total, count).
    """

    items: Sequence[Item]
    links: Sequence[Sequence[Item]]
    loaded: dict[str, Tensor]
    step: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)

    def sizes(self, name: str = "tokens") -> list[int]:
        """One size per item: lengths of the packed sequences for "tokens"."""
        return [item.sizes[name] for item in self.items]

    def linked_sizes(self, module: str, name: str = "tokens") -> list[int]:
        """Per item, rows that flow in from its linked items of `module`: lengths of a packed condition."""
        return [sum(source.sizes[name] for source in sources if source.module == module) for sources in self.links]

    def generator(self, item: Item, name: str) -> torch.Generator:
        """A CPU generator that depends on seed, step, item and name alone: never on worker, part or order."""
        key = f"{self.seed}/{self.step}/{item.name}/{name}".encode()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)
        return generator

    def normal(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Standard normal draws, one block of `shapes[i]` per item, stacked along the first dimension."""
        blocks = [
            torch.randn(shape, generator=self.generator(item, name), dtype=torch.float64)
            for item, shape in zip(self.items, shapes, strict=True)
        ]
        return torch.cat(blocks).to(self.device, self.dtype)

    def uniform(self, name: str) -> Tensor:
        """One draw from [0, 1) per item, shape [items]."""
        draws = [torch.rand((), generator=self.generator(item, name), dtype=torch.float64) for item in self.items]
        return torch.stack(draws).to(self.device, self.dtype)

    def report(self, name: str, total: float, count: int) -> None:
        """Add to a metric that is averaged over the step: total / count over all parts and replicas."""
        before_total, before_count = self.metrics.get(name, (0.0, 0))
        self.metrics[name] = (before_total + total, before_count + count)
