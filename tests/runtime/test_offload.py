"""Offloaded tensors leave, come back as they were, and take the memory that the plan says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeweaver.runtime.offload import Copies, SavedTensors
from pipeweaver.runtime.stage import run_backward, run_forward
from tests.live import LiveBytes
from tests.runtime.test_split import ROWS, WIDTH, Layer, double, make_chunk, view_of

CPU = torch.device("cpu")


def test_memory_leaves_returns_and_goes_with_the_backward():
    # Each layer saves its input for the linear map and the output of tanh.
    layers = [double(lambda: Layer(lambda self, x: torch.tanh(F.linear(x, self.w)) * 2)) for _ in range(3)]
    for layer in layers:
        layer.w.grad = torch.zeros_like(layer.w)
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    one = x.nbytes
    copies = Copies(CPU)
    with LiveBytes() as live:
        state = run_forward(
            make_chunk(layers),
            {"x": x},
            view_of(),
            outputs={"x"},
            grad=True,
            needs_grad={"x"},
            strategies=("offload", "offload", "keep"),
        )
        saved = state.offloaded
        # Three times tanh, twice the input of the next layer, the output; the last layer keeps its two.
        assert live.now == 6 * one
        assert saved.num_bytes == 3 * one
        copies.begin_out(saved)
        copies.settle(saved)
        assert live.now == 9 * one
        saved.free_leaving()
        assert live.now == 6 * one
        copies.begin_back(saved)
        copies.settle(saved)
        assert live.now == 9 * one
        saved.free_host()
        assert live.now == 6 * one
        live.reset_peak()
        returned = run_backward(state, {"x": gradient})
        # What was returned goes as the backward goes: no more is held than without offloading.
        assert live.peak <= 8 * one
        assert live.now == 2 * one  # the output, and the input's gradient
        del state, returned
        assert live.now == 0


def test_views_of_one_storage_travel_once_and_stay_views():
    saved = SavedTensors(CPU)
    w = torch.randn(8, requires_grad=True)
    with saved.of("layer"):
        base = torch.arange(16.0)
        y = w * base[::2] + w * base[1:9] + w * base.view(2, 8)[1] + (w * base[:1].expand(8))
    saved.seal()
    expected = torch.arange(16.0)
    del base
    copies = Copies(CPU)
    assert saved.num_bytes == 64
    copies.begin_out(saved)
    saved.free_leaving()
    copies.begin_back(saved)
    saved.free_host()
    y.sum().backward()
    assert torch.equal(w.grad, expected[::2] + expected[1:9] + expected[8:] + expected[0])


def test_what_others_hold_stays():
    layer = double(lambda: Layer(lambda self, x: F.linear(torch.tanh(F.linear(x, self.w)), self.w).sigmoid()))
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    state = run_forward(
        make_chunk([layer]),
        {"x": x},
        view_of(),
        outputs={"x"},
        grad=True,
        needs_grad={"x"},
        strategies=("offload",),
    )
    # Not the input, not the weights, not the output, which sigmoid saves: tanh alone.
    assert state.offloaded.num_bytes == x.nbytes


def test_a_change_behind_the_saving_is_refused_by_name():
    layer = double(lambda: Layer(lambda self, x: torch.tanh(F.linear(x, self.w)).mul_(2)))
    with pytest.raises(ValueError, match=r"layer m.layers.0 changes a tensor of shape \[6, 4\] in place"):
        run_forward(
            make_chunk([layer]),
            {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)},
            view_of(),
            outputs={"x"},
            grad=True,
            needs_grad={"x"},
            strategies=("offload",),
        )


def test_what_no_backward_needs_does_not_travel():
    saved = SavedTensors(CPU)
    x = torch.randn(4, requires_grad=True)
    with saved.of("layer"):
        torch.tanh(x)  # its graph is gone when the forward is over
        y = torch.sigmoid(x)
    saved.seal()
    assert saved.num_bytes == 16
    del y


def test_nothing_is_saved_without_gradients():
    module = Layer(lambda self, x: F.linear(x, self.w)).double()
    state = run_forward(
        make_chunk([module]),
        {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)},
        view_of(),
        outputs={"x"},
        grad=False,
        strategies=("offload",),
    )
    assert state.offloaded is None and isinstance(module, nn.Module)
