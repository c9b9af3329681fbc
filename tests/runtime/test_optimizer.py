"""Learning rates in closed form, clipping as torch's, buckets by parameter group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeweaver.runtime.optimizer import OptimizerConfig, clip_factor, learning_rate
from pipeweaver.runtime.reduce import group_members, make_buckets
from pipeweaver.runtime.transport import Address
from pipeweaver.schedule.ir import ParameterGroup


def test_learning_rates():
    flat = OptimizerConfig(lr=0.5)
    assert [learning_rate(flat, step, 10) for step in (0, 5, 9)] == [0.5] * 3
    warm = OptimizerConfig(lr=0.5, warmup_steps=5)
    assert [learning_rate(warm, step, 10) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    cosine = OptimizerConfig(lr=0.5, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(cosine, step, 20) for step in range(20)]
    assert rates[3] == rates[4] == 0.5
    assert rates[12] == pytest.approx(0.25)
    assert rates[19] == pytest.approx(0.25 * (1 + math.cos(math.pi * 15 / 16)))
    assert learning_rate(cosine, 99, 20) == 0.0


@pytest.mark.parametrize("clip_norm", [0.3, 1e6])
def test_clipping_is_torchs(clip_norm):
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 5)]
    gradients = [torch.randn(n, dtype=torch.float64) for n in (3, 5)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = float(nn.utils.clip_grad_norm_(parameters, clip_norm))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.allclose(gradient * clip_factor(clip_norm, norm), parameter.grad, rtol=1e-14)
    assert clip_factor(0.0, norm) == 1.0


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"lr": -1.0}, "lr = -1.0: it must be a number of at least 0"),
        ({"clip_norm": float("nan")}, "clip_norm = nan"),
        ({"betas": (0.9, 1.0)}, "betas = .0.9, 1.0.: both must be at least 0 and below 1"),
    ],
)
def test_impossible_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**setting)


GROUPS = (
    ParameterGroup(parameters=("m.before", "m.layers.1"), holders=(0,)),
    ParameterGroup(parameters=("m.before.weight", "m.layers.12"), holders=(0, 2)),
    ParameterGroup(parameters=("m.after",), holders=(2,)),
)


def parameters(*names, dtype=torch.float32):
    return {name: nn.Parameter(torch.randn(2, 3, dtype=dtype)) for name in names}


def test_a_tied_parameter_is_reduced_over_both_of_its_holders():
    here = parameters("m.before.weight", "m.before.bias", "m.layers.1.weight", "m.layers.12.weight", "m.layers.3.w")
    assert group_members(GROUPS, here, 0) == {
        0: ("m.before.bias", "m.layers.1.weight"),
        1: ("m.before.weight", "m.layers.12.weight"),
    }
    # The worker with the other end of the tie knows the parameter by the same name.
    there = parameters("m.before.weight", "m.layers.12.weight", "m.after.bias")
    assert group_members(GROUPS, there, 2) == {1: ("m.before.weight", "m.layers.12.weight"), 2: ("m.after.bias",)}


def test_gradients_are_views_of_their_bucket_and_frozen_ones_have_none():
    held = parameters("m.before.weight", "m.before.bias", "m.layers.1.weight", "m.layers.12.weight", "m.layers.3.w")
    held["m.layers.1.weight"].requires_grad_(False)
    held["m.layers.3.w"].grad = torch.ones(2, 3)
    buckets = make_buckets(GROUPS, held, 0, num_replicas=2)
    assert buckets[1].members == (Address(0, 0), Address(0, 2), Address(1, 0), Address(1, 2))
    assert held["m.layers.1.weight"].grad is None and held["m.layers.3.w"].grad is None
    (held["m.before.weight"] * 2).sum().backward()
    (held["m.before.weight"] * 3).sum().backward()
    assert buckets[1].flat.tolist() == [5.0] * 6 + [0.0] * 6
    assert buckets[1].squared_norm() == pytest.approx(150.0)
    assert buckets[0].flat.tolist() == [0.0] * 6


def test_the_norm_is_accumulated_in_float64():
    held = parameters("m.after.bias")
    (bucket,) = make_buckets(GROUPS, held, 2, num_replicas=1).values()
    bucket.flat.copy_(torch.tensor([1e30, 1.0, 0.0, 0.0, 0.0, 0.0]))
    assert bucket.squared_norm() == pytest.approx(1e60)
