"""What one worker measured in a calibration: plain records that travel to the first rank."""

from __future__ import annotations

import msgspec

from pipeweaver.profile.fit import Sizes


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one variant; one entry per part size, of one layer.

    `saved_bytes` leaves out what the layers of a chunk share, `shared_bytes`. `carried_bytes` are new
    tensors handed to the next layer, `input_gradient_bytes` what its backward hands back. Workspace is
    what is needed beyond all of these while the layer runs.
    """

    module: str
    sizes: tuple[Sizes, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    load_ns: tuple[int, ...]
    loaded_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    shared_bytes: tuple[int, ...]
    carried_bytes: tuple[int, ...]
    input_gradient_bytes: tuple[int, ...]
    forward_workspace_bytes: tuple[int, ...]
    backward_workspace_bytes: tuple[int, ...]
    optimizer_ns: int
    rounds: int


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage costs beside its layers."""

    forward_ns: int
    backward_ns: int


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a transfer between workers `ends` (sender, receiver), or of a reduction over `ends` members."""

    ends: tuple[int, ...]
    num_bytes: int
    duration_ns: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker measured. `layers` by variant name; sizes are the same on all workers.

    `core_share` is the share of its cores that the worker had while it measured layers.
    """

    layers: dict[str, LayerProfile]
    stage: StageProfile
    core_share: float = 1.0
    transfers: tuple[LinkSample, ...] = ()
    reductions: tuple[LinkSample, ...] = ()
