"""Live bytes against an independent count: what autograd packs, each storage once."""

import gc

import torch
from torch import nn

from tests.live import LiveBytes


def saved_by_hooks(run, known):
    """Bytes of what autograd saves, by saved_tensors_hooks, without the storages of `known` tensors."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in known}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(storages.values()), result


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24), nn.Tanh())


def test_what_stays_after_a_forward_is_what_autograd_saved():
    model, x = make(), torch.randn(10, 24, requires_grad=True)
    expected, y = saved_by_hooks(lambda: model(x), [x, *model.parameters()])
    del y
    gc.collect()
    with LiveBytes() as live:
        y = model(x)
        assert live.now == expected  # tanh saves its output, so the output is among them
        assert live.peak >= live.now
        assert live.bytes_of([y]) == 10 * 24 * 4
        assert live.bytes_of([x]) == 0
        y.sum().backward()
        del y
    gradients = sum(p.numel() for p in model.parameters()) * 4 + x.numel() * 4
    assert live.now == gradients


def test_views_count_once_and_vanish_with_their_last_user():
    with LiveBytes() as live:
        x = torch.ones(100)
        halves = x.split(50)
        del x
        assert live.now == 400
        del halves
        assert live.now == 0
        assert live.peak == 400
        live.reset_peak()
        assert live.peak == 0


def test_in_place_operators_make_nothing():
    x = torch.ones(100)
    with LiveBytes() as live:
        x.add_(1).mul_(2)
        assert live.peak == 0
