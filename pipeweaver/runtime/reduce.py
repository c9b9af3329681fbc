"""Gradients of parameter groups: one flat bucket each, summed over all that hold the group.

The gradient of every parameter is a view of its group's bucket, so backward accumulates in place and a
reduction is one call on one tensor. A parameter that saw no data keeps the zeros it started with.

Example: language.0 lives on workers 0 and 2 of two replicas: its bucket is summed over (0,0) (0,2) (1,0) (1,2)
in replica and worker, and only (0,0) counts it in the global norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeweaver.runtime.transport import Address
from pipeweaver.schedule.ir import ParameterGroup


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients of one parameter group on one worker. `members` hold the same group, in a fixed order."""

    group: int
    names: tuple[str, ...]
    flat: Tensor
    members: tuple[Address, ...]

    def squared_norm(self) -> float:
        """Sum of squares, accumulated in float64."""
        if self.flat.device.type != "cpu":
            return float(torch.linalg.vector_norm(self.flat, dtype=torch.float64)) ** 2
        # The same in pieces that stay in the cache: eight times as fast on a CPU.
        pieces = (piece.double() for piece in self.flat.split(1 << 16))
        return sum(float(torch.dot(piece, piece)) for piece in pieces)


def make_buckets(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], worker: int, num_replicas: int
) -> dict[int, Bucket]:
    """Buckets by group number, for the groups that `worker` holds; sets `.grad` of their parameters to views.

    `parameters` are those of the worker, by name; those in no group get no gradient (`.grad` None) and are not
    stepped. Parameters that are not trained have no place in a bucket.
    """
    for parameter in parameters.values():
        parameter.grad = None
    members = group_members(groups, parameters, worker)
    buckets = {}
    for number, names in members.items():
        flat = _flat(names, parameters)
        start = 0
        for name in names:
            parameter = parameters[name]
            parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        buckets[number] = Bucket(
            group=number,
            names=names,
            flat=flat,
            members=tuple(
                Address(replica, holder) for replica in range(num_replicas) for holder in groups[number].holders
            ),
        )
    return buckets


def group_members(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], worker: int
) -> dict[int, tuple[str, ...]]:
    """Names of the trained parameters in each group that the worker holds, sorted: equal on all holders.

    A full parameter name in some group takes precedence over the layer that the parameter is in.
    """
    of_parameter: dict[str, int] = {}
    of_layer: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in group.parameters:
            # A tied parameter is named in full in groups of all holders, also of those without this worker.
            (of_parameter if name in parameters else of_layer)[name] = number
    found: dict[int, list[str]] = {}
    for name, parameter in sorted(parameters.items()):
        if not parameter.requires_grad:
            continue
        found_in = of_parameter.get(name, _of_layer(of_layer, name))
        if found_in is not None and worker in groups[found_in].holders:
            found.setdefault(found_in, []).append(name)
    return {number: tuple(names) for number, names in sorted(found.items())}


def _of_layer(of_layer: Mapping[str, int], name: str) -> int | None:
    """Group of the layer that a parameter is in: `language.layers.3.attention.weight` is in `language.layers.3`."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in of_layer:
            return of_layer[name]
    return None


def _flat(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    first = parameters[names[0]]
    for name in names:
        assert parameters[name].dtype == first.dtype, (
            f"{name} is {parameters[name].dtype}, {names[0]} is {first.dtype}: a parameter group has one dtype"
        )
    num_elements = sum(parameters[name].numel() for name in names)
    return torch.zeros(num_elements, dtype=first.dtype, device=first.device)
