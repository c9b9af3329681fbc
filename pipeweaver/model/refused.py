"""What layers must not be made of: statistics over a part's items, and torch's global generator.

Which items meet in a part, in which order parts run, and what is computed again for the backward differ from plan to plan;
so would what such a layer computes. A dropout that is drawn anew when its layer is recomputed has a wrong gradient too.

    check_layer("vision.layers.3", layer)        by the kinds of its modules: ValueError for a BatchNorm1d, a Dropout(0.1), ...
    with watched_generator(name, device):        by what it does: ValueError for F.dropout, torch.rand, ...
        layer(state, part)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

global_generator = threading.Lock()
"""Held by who uses torch's global generator: workers in threads share it."""


def check_layer(name: str, layer: nn.Module) -> None:
    """Raises ValueError, naming it, for a batch norm or dropout that is not turned off (p = 0, or `.eval()`)."""
    for path, module in layer.named_modules():
        where = f"{name}{'.' * bool(path)}{path} is a {type(module).__name__}"
        if not module.training:
            continue
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"{where}: its statistics mix the items of a part, which differ from plan to plan; "
                "use LayerNorm, RMSNorm or GroupNorm, or its fixed statistics (.eval())"
            )
        dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(module, _DropoutNd | nn.MultiheadAttention | nn.RNNBase) and dropped > 0:
            raise ValueError(f"{where} with dropout {dropped}: {_GENERATOR}, or set it to 0")


@contextmanager
def watched_generator(name: str, device: torch.device) -> Iterator[None]:
    """Raises ValueError, naming the layer, if torch's global generator has moved."""
    with global_generator:
        before = _states(device)
        yield
        after = _states(device)
    if not all(map(torch.equal, before, after)):
        raise ValueError(f"layer {name}, or the data that was loaded meanwhile, draws at random: {_GENERATOR}")


_GENERATOR = (
    "torch's global generator gives other numbers under another plan, and when a layer is computed again for the "
    "backward; draw from the item (part.generator, part.normal, part.uniform)"
)


def _states(device: torch.device) -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.random.get_rng_state(), *on_device]
