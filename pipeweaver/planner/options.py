"""What a user may set about placement and parts; everything left out is chosen by the policy.

Example: `PolicyOptions(chunks_per_worker={"vision": 2}, items_per_part={"vision": 8})` cuts vision into two
chunks per worker and its images into parts of at most eight; language is left to the policy.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeweaver.schedule.ir import Strategy

Balance = Literal["cost", "parameters"]


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the policies, by module name where they differ between modules.

    `balance`: what a partition makes even, measured time or number of parameters.
    `encoder_first` (contiguous splits): every encoder is whole and on the first worker.
    `pieces_per_worker` (`interleaved-1f1b`): into how many pieces per worker the concatenated modules are cut.
    `chunks_per_worker` (`dynamic`, `pipeweaver`): K of a module. `items_per_part`: B of a module, the most items that
    a part takes; a module that is not named keeps the items of a microbatch together, or is left to the policy.
    `even_parts`: parts of one microbatch are made even in number of items, or in cost.
    `regroup` (`dynamic`): samples may be grouped into other microbatches than they were drawn in.
    `exchange` (`dynamic`): replicas may exchange samples, where that makes their work more even.
    `split_backward` (`dynamic`): backwards may be split into input and weight gradients. `strategies` (`dynamic`,
    `pipeweaver`): the memory strategies that they may use where the budget calls for it; "keep" they may always.
    """

    balance: Balance = "cost"
    encoder_first: bool = False
    pieces_per_worker: int = 2
    chunks_per_worker: dict[str, int] = {}
    items_per_part: dict[str, int] = {}
    even_parts: Literal["items", "cost"] = "cost"
    regroup: bool = True
    exchange: bool = True
    split_backward: bool = True
    strategies: tuple[Strategy, ...] = ("recompute", "recompute-attention", "offload")

    def __post_init__(self) -> None:
        if self.pieces_per_worker < 1:
            raise ValueError(f"pieces_per_worker is {self.pieces_per_worker}; it must be at least 1")
        for name, setting in (("chunks_per_worker", self.chunks_per_worker), ("items_per_part", self.items_per_part)):
            for module, value in setting.items():
                if value < 1:
                    raise ValueError(f"{name} of {module} is {value}; it must be at least 1")


DEFAULTS = PolicyOptions()
