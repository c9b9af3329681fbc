"""What one worker measured in a calibration: plain records that travel to the first rank."""

from __future__ import annotations

import msgspec

from pipeweaver.profile.fit import Sizes
from pipeweaver.schedule.ir import Strategy


class StrategyProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A layer under a memory strategy; one entry per part size. `extra_ns` is what forward and backward take longer
    than when all is kept, `saved_bytes` as in `LayerProfile`."""

    extra_ns: tuple[int, ...]
    saved_bytes: tuple[int, ...]


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one variant; one entry per part size, of one layer.

    `saved_bytes` leaves out what the layers of a chunk share, `shared_bytes`. `carried_bytes` are new
    tensors handed to the next layer, `input_gradient_bytes` what its backward hands back. Workspace is
    what is needed beyond all of these while the layer runs. `input_ns` and `weight_ns` are the halves of a split
    backward, what its forward takes longer counted with the first; `weight_bytes` are held from the one to the other.
    `strategies` are those that this layer can follow, "keep" aside.
    """

    module: str
    sizes: tuple[Sizes, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    input_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]
    load_ns: tuple[int, ...]
    loaded_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    shared_bytes: tuple[int, ...]
    carried_bytes: tuple[int, ...]
    input_gradient_bytes: tuple[int, ...]
    forward_workspace_bytes: tuple[int, ...]
    backward_workspace_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    weight_workspace_bytes: tuple[int, ...]
    strategies: dict[Strategy, StrategyProfile]
    optimizer_ns: int
    rounds: int


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage costs beside its layers."""

    forward_ns: int
    backward_ns: int
    input_ns: int
    weight_ns: int


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a transfer between workers `ends` (sender, receiver), of a reduction over `ends` members, or of a
    copy to host memory, without `ends`."""

    ends: tuple[int, ...]
    num_bytes: int
    duration_ns: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker measured. `layers` by variant name; sizes are the same on all workers.

    `core_share` is the share of its cores that the worker had while it measured layers. `host` is empty where a
    device has no memory of its own.
    """

    layers: dict[str, LayerProfile]
    stage: StageProfile
    core_share: float = 1.0
    transfers: tuple[LinkSample, ...] = ()
    reductions: tuple[LinkSample, ...] = ()
    host: tuple[LinkSample, ...] = ()
