"""AdamW, its learning rate by step, and clipping by the global gradient norm.

Example: `OptimizerConfig(lr=1e-3, warmup_steps=10, schedule="cosine")` over 100 steps rises to 1e-3 in steps
0..9, then falls along a half cosine, which would reach 0 in step 100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec
import torch
from torch import nn


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW and what steers it. `clip_norm` 0 means no clipping.

    Raises ValueError for a value that no run can want.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "clip_norm", "warmup_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}: it must be a number of at least 0")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas = {list(self.betas)}: both must be at least 0 and below 1")


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Of step 0..num_steps-1: linear warm-up over `warmup_steps`, then constant or down a half cosine."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def adamw(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over parameters by name, in the order of the names, so that its state has names in checkpoints.

    A parameter whose gradient is None is not stepped.
    """
    return torch.optim.AdamW(
        sorted(parameters.items()),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def clip_factor(clip_norm: float, norm: float) -> float:
    """What gradients of global norm `norm` are multiplied by: torch's `clip_grad_norm_`, 1.0 without clipping."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
