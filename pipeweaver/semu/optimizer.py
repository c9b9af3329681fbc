"""What training keeps and moves per parameter, beside the parameter itself: gradient and states of Adam.

plain_optimizer("float32").bytes_per_parameter(4)       # 16: parameter, gradient and two moments of 4 bytes each
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeweaver.schedule.ir import ITEM_SIZES


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What training keeps per parameter, in bytes: the gradient, and the state (float32 master copy and two
    moments of Adam in mixed precision, two moments in float32), which `shards` replicas share out."""

    gradient: int = 4
    state: int = 12
    shards: int = 1

    def bytes_per_parameter(self, parameter: int) -> float:
        return parameter + self.gradient + self.state / self.shards

    def moved_bytes(self, parameter: int) -> float:
        """By a step, per parameter: the gradient is read twice (norm, step) and zeroed; states are read and written by
        who owns them."""
        return 3 * self.gradient + parameter + 2 * self.state / self.shards


def plain_optimizer(dtype: str) -> Optimizer:
    """What this runtime keeps: gradients and both moments of AdamW in the parameters' own dtype."""
    item = ITEM_SIZES[dtype]
    return Optimizer(gradient=item, state=2 * item)


USUAL = {
    "bfloat16": Optimizer(gradient=4, state=12),
    "float16": Optimizer(gradient=4, state=12),
    "float32": Optimizer(gradient=4, state=8),
    "float64": Optimizer(gradient=8, state=16),
}
"""By dtype of the parameters: gradients and masters in float32 where they are in half precision."""
