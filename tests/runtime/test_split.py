"""A split backward gives the gradients of one that is not, whatever layers are made of, and keeps what W needs alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipeweaver.data.items import Item
from pipeweaver.model.graph import LayerSpec, TensorSpec
from pipeweaver.model.layers import run_attention
from pipeweaver.model.part import PartView
from pipeweaver.runtime.offload import Copies
from pipeweaver.runtime.split import WeightGradients
from pipeweaver.runtime.stage import BuiltChunk, BuiltLayer, run_backward, run_forward
from tests.live import LiveBytes

ROWS, WIDTH = 6, 4
X = TensorSpec(name="x", width=WIDTH)


class Layer(nn.Module):
    """What `build` returns is run on x; parameters of the test's own are `w` [4, 4] and `b` [4]."""

    def __init__(self, run, **parts) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH))
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, state, part):
        self.part = part
        return {"x": self.run(self, state["x"])}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2  # held by the graph, not by autograd's saved tensors
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def attention(self, x):
    q, k, v = (F.linear(x, w) for w in (self.w, self.other, self.w))
    return x + F.linear(torch.softmax(q @ k.T, -1) @ v, self.last, self.b)


def penalty(self, x):
    """The norm of a gradient taken inside, differentiated again."""
    y = torch.tanh(F.linear(x, self.w, self.b))
    z = x.detach().requires_grad_()
    (inner,) = torch.autograd.grad(torch.tanh(F.linear(z, self.w)).sum(), z, create_graph=True)
    return y + inner


def steered(self, x):
    """Moves along a gradient that is taken inside and not differentiated."""
    z = x.detach().requires_grad_()
    (inner,) = torch.autograd.grad(torch.tanh(z @ self.w).square().sum(), z)
    return F.linear(x, self.w) + inner


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        narrow = F.linear(x.float(), self.narrow)
    return narrow.double() + F.linear(x, self.w)


def hooked_region(self, x):
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(F.linear(x, self.w, self.b))


def per_row(self, x):
    def energy(row):
        return torch.tanh(F.linear(row, self.w.detach())).sum()

    return F.linear(x, self.w) + torch.func.vmap(torch.func.grad(energy))(x)


def unused(self, x):
    F.linear(x, self.w)
    return x @ self.w


def square():
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


KINDS = {
    # name: (how to build it, number of linear maps that are put off)
    "linear": (lambda: Layer(lambda self, x: F.linear(x, self.w, self.b)), 1),
    "linear by name": (lambda: Layer(lambda self, x: F.linear(bias=self.b, weight=self.w, input=x)), 1),
    "module": (lambda: Layer(lambda self, x: self.m(x), m=nn.Linear(WIDTH, WIDTH)), 1),
    "matmul": (lambda: Layer(lambda self, x: x @ self.w), 1),
    "transposed": (lambda: Layer(lambda self, x: torch.matmul(x, self.w.T) + x.mm(self.w.t()) + x @ self.w.mT), 3),
    "three axes": (lambda: Layer(lambda self, x: (x.view(2, 3, WIDTH) @ self.w).reshape(x.shape)), 1),
    "one axis": (lambda: Layer(lambda self, x: torch.stack([self.w @ x[0], F.linear(x[1], self.w), *x[2:]])), 1),
    "addmm": (lambda: Layer(lambda self, x: torch.addmm(self.b, x, self.w) + torch.addmm(self.b, x, self.w.T)), 2),
    "scaled addmm": (lambda: Layer(lambda self, x: torch.addmm(self.b, x, self.w, beta=2, alpha=0.5)), 0),
    "slice": (
        lambda: Layer(lambda self, x: torch.cat([F.linear(x, self.w[:1]), F.linear(x, self.w[1:], self.b[1:])], 1)),
        2,
    ),
    "cast": (
        lambda: Layer(
            lambda self, x: F.linear(x, self.narrow.to(x.dtype)), narrow=nn.Parameter(torch.randn(4, 4).float())
        ),
        1,
    ),
    "used twice": (lambda: Layer(lambda self, x: torch.tanh(F.linear(x, self.w)) @ self.w), 2),
    "weight product": (lambda: Layer(lambda self, x: F.linear(x, self.w @ self.other), other=square()), 1),
    "low rank": (lambda: Layer(lambda self, x: F.linear(F.linear(x, self.w[:2]), self.w[:, :2])), 2),
    "used otherwise too": (lambda: Layer(lambda self, x: F.linear(x, self.w) * self.w.square().sum() + self.b), 1),
    "in place behind": (lambda: Layer(lambda self, x: F.relu_(F.linear(x, self.w, self.b).mul_(2))), 1),
    "shared input": (lambda: Layer(attention, other=square(), last=square()), 4),
    "convolution": (
        lambda: Layer(lambda self, x: self.conv(x.T[None])[0].T, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        0,
    ),
    "multi-head": (lambda: Layer(lambda self, x: self.m(x, x, x)[0], m=nn.MultiheadAttention(WIDTH, 2)), 0),
    "norms": (lambda: Layer(lambda self, x: F.linear(self.norm(x), self.w), norm=nn.LayerNorm(WIDTH)), 1),
    "weight norm": (
        lambda: Layer(lambda self, x: self.m(x), m=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        0,
    ),
    "einsum": (lambda: Layer(lambda self, x: torch.einsum("rk,kn->rn", x, self.w)), 0),
    "frozen weight": (lambda: Layer(lambda self, x: F.linear(x, self.w.detach(), self.b)), 0),
    "computed bias": (lambda: Layer(lambda self, x: F.linear(x, self.w, torch.tanh(self.b))), 1),
    "frozen module": (lambda: Layer(lambda self, x: self.m(x), m=nn.Linear(WIDTH, WIDTH).requires_grad_(False)), 0),
    "own function": (lambda: Layer(lambda self, x: Twice.apply(F.linear(x, self.w))), 1),
    "penalty": (lambda: Layer(penalty), 2),
    "steered": (lambda: Layer(steered), 1),
    "per row": (lambda: Layer(per_row), 1),
    "unused": (lambda: Layer(unused), 1),
    "autocast": (lambda: Layer(autocast, narrow=nn.Parameter(torch.randn(4, 4).float())), 1),
    "own hooks": (lambda: Layer(hooked_region), 0),
    "checkpoint inside": (
        lambda: Layer(lambda self, x: checkpoint(self.m, x, use_reentrant=False) @ self.w, m=nn.Linear(WIDTH, WIDTH)),
        1,
    ),
    "reentrant checkpoint inside": (
        lambda: Layer(lambda self, x: checkpoint(self.m, x, use_reentrant=True) @ self.w, m=nn.Linear(WIDTH, WIDTH)),
        1,
    ),
    "attention to recompute": (
        lambda: Layer(
            lambda self, x: x + run_attention(self.part, lambda y: attention(self, y), x) @ self.w,
            other=square(),
            last=square(),
        ),
        5,
    ),
}
STRATEGIES = ("keep", "recompute", "recompute-attention", "offload")


def make_chunk(layers) -> BuiltChunk:
    spec = LayerSpec(kind="layer", build=nn.Identity, carries=(X,))
    built = [BuiltLayer(name=f"m.layers.{i}", spec=spec, module=module, inside={}) for i, module in enumerate(layers)]
    return BuiltChunk(layers=tuple(built), inputs={"x": X}, loads=(), loss=None)


def view_of(rows=ROWS) -> PartView:
    item = Item(task="main", draw=0, module="m", position=0, sizes={"tokens": rows})
    return PartView(
        items=[item], links=[()], loaded={}, step=0, seed=0, device=torch.device("cpu"), dtype=torch.float64
    )


def run_chunk(layers, x, gradient, *, split, strategy="keep", needs_grad=("x",)):
    """(gradient of the input, {parameter: gradient}, state before W is run)."""
    chunk = make_chunk(layers)
    parameters = {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    state = run_forward(
        chunk,
        {"x": x},
        view_of(len(x)),
        outputs={"x"},
        grad=True,
        needs_grad=needs_grad,
        strategies=(strategy,) * len(layers),
        split=split,
    )
    if state.offloaded is not None:
        round_trip(state.offloaded)
    returned = run_backward(state, {"x": gradient})
    put_off = len(state.later._products) if split else 0
    if split:
        state.later.accumulate()
        assert state.later.num_bytes == 0
    return returned.get("x"), {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}, put_off


def round_trip(saved) -> None:
    copies = Copies(torch.device("cpu"))
    copies.begin_out(saved)
    copies.settle(saved)
    saved.free_leaving()
    copies.begin_back(saved)
    copies.settle(saved)
    saved.free_host()


def double(build):
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == expected[name].dtype, name
        rtol = 1e-12 if gradient.dtype == torch.float64 else 1e-6
        assert torch.allclose(gradient, expected[name], rtol=rtol, atol=1e-13 if rtol < 1e-9 else 1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_backward_is_exact(kind, strategy):
    if kind == "per row" and strategy in ("recompute", "offload"):
        pytest.skip("torch.func does not take saved-tensor hooks")
    build, num_put_off = KINDS[kind]
    layers = [double(build), double(build)]
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    expected_x, expected, _ = run_chunk(layers, x, gradient, split=False)
    found_x, found, put_off = run_chunk(layers, x, gradient, split=True, strategy=strategy)
    assert torch.allclose(found_x, expected_x, rtol=1e-12, atol=1e-13)
    assert_equal(found, expected)
    assert put_off == 2 * num_put_off
    # torch's reentrant checkpoint has no gradients where its inputs need none.
    if all(p.requires_grad for p in layers[0].parameters()) and kind != "reentrant checkpoint inside":
        # Nothing before the chunk learns: no input gradient, the same weight gradients.
        nothing, found, _ = run_chunk(layers, x, gradient, split=True, strategy=strategy, needs_grad=())
        assert nothing is None
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["linear", "shared input", "slice"])
def test_no_rows_give_no_gradients(kind):
    layers = [double(KINDS[kind][0])]
    x = torch.randn(0, WIDTH, dtype=torch.float64)
    found_x, found, _ = run_chunk(layers, x, x, split=True)
    assert found_x.shape == (0, WIDTH)
    assert all(not gradient.any() for gradient in found.values())


def test_weights_wait_for_w_and_all_else_does_not():
    layer = double(KINDS["norms"][0])
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    later = WeightGradients()
    with later.intercepted():
        y = layer({"x": x}, view_of())["x"]
    with later.put_off():
        y.square().sum().backward()
    assert x.grad.any() and layer.norm.weight.grad.any() and not layer.w.grad.any()
    later.accumulate()
    assert layer.w.grad.any()


def test_hooks_on_parameters_see_the_gradient():
    layer = double(KINDS["linear"][0])
    seen = []
    layer.w.register_hook(lambda gradient: gradient * 3)
    layer.b.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    _, expected, _ = run_chunk([layer], x, gradient, split=False)
    _, found, _ = run_chunk([layer], x, gradient, split=True)
    assert_equal(found, expected)
    assert len(seen) == 2 and torch.equal(*seen)
    assert torch.allclose(found["0.w"], 3 * gradient.T @ x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_i_only_inputs_and_output_gradients_of_linear_maps_are_held(strategy):
    layers = [double(KINDS["shared input"][0]) for _ in range(3)]
    x, gradient = torch.randn(2, 50, WIDTH, dtype=torch.float64)
    chunk = make_chunk(layers)
    for parameter in itertools.chain.from_iterable(layer.parameters() for layer in layers):
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        state = run_forward(
            chunk,
            {"x": x},
            view_of(50),
            outputs={"x"},
            grad=True,
            needs_grad={"x"},
            strategies=(strategy,) * 3,
            split=True,
        )
        returned = run_backward(state, {"x": gradient})
        later = state.later
        del state
        # Per layer: x (of the first it is the chunk's input, made outside), what `last` takes in, and gradients of
        # q, k, v and the output; that of the last layer is the chunk's, made outside.
        one = 50 * WIDTH * 8
        held = 3 * 6 - 2
        assert live.now == held * one + returned["x"].nbytes
        assert later.num_bytes == (held + 2) * one
        later.accumulate()
        assert live.now == returned["x"].nbytes


def test_views_into_something_larger_are_copied_out_of_it():
    layer = double(lambda: Layer(lambda self, x: torch.cat([F.linear(x[:1], self.w), x[1:]])))
    x, gradient = torch.randn(2, 100, WIDTH, dtype=torch.float64)
    chunk = make_chunk([layer])
    state = run_forward(chunk, {"x": x}, view_of(100), outputs={"x"}, grad=True, needs_grad={"x"}, split=True)
    run_backward(state, {"x": gradient})
    assert state.later.num_bytes == 2 * WIDTH * 8


def test_a_layer_that_writes_into_its_input_is_refused_by_name_wherever_the_model_is_cut():
    writing = Layer(lambda self, x: F.relu_(x) @ self.w)
    innocent = Layer(lambda self, x: x @ self.w)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    for layers, name in (([writing], "m.layers.0"), ([innocent, writing], "m.layers.1")):
        chunk = make_chunk([layer.double() for layer in layers])
        for grad, needs, strategy in itertools.product((True, False), ((), ("x",)), STRATEGIES):
            with pytest.raises(ValueError, match=rf"layer {name} writes in place into what it is given \(x\)"):
                run_forward(
                    chunk,
                    {"x": x.clone()},
                    view_of(),
                    outputs={"x"},
                    grad=grad,
                    needs_grad=needs,
                    strategies=(strategy,) * len(layers),
                )


def test_compiled_modules_are_exact():
    module = double(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    layer = double(lambda: Layer(lambda self, x: torch.compile(self.m, backend="aot_eager")(x) @ self.w, m=module))
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    expected_x, expected, _ = run_chunk([layer], x, gradient, split=False)
    found_x, found, put_off = run_chunk([layer], x, gradient, split=True)
    assert torch.allclose(found_x, expected_x) and put_off == 1
    assert_equal(found, expected)
