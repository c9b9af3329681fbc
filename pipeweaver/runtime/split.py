"""A backward in two halves: weight gradients of linear maps are put off from stage I to stage W.

A torch function mode intercepts `F.linear`, `torch.matmul`, `torch.mm` and `torch.addmm` with a parameter, whoever
calls them: our layers or a user's. Of each call exactly its input and the gradient of its output stay behind:

    later = WeightGradients()
    with later.intercepted():
        y = layer(x)
    with later.put_off():
        y.backward(gradient)        stage I: x.grad, and the gradients of everything that is not intercepted
    later.accumulate()              stage W: weight.grad += output gradient^T @ input

Not intercepted, so all of its backward is in I: other uses of parameters (norms, embeddings, convolutions), weights
that are more than a view or cast of one parameter or whose gradient has hooks, and linear maps under autocast, torch.func, torch.compile, tensor
subclasses, or saved-tensor hooks of a layer's own (it checkpoints inside).

The split is that of zero-bubble pipelines (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.overrides import TorchFunctionMode


class WeightGradients:
    """What one forward puts off. `intercepted` may be entered many times: layer by layer, and where one is recomputed."""

    def __init__(self) -> None:
        self.is_open = False
        self._products: deque[_Product] = deque()

    def intercepted(self) -> AbstractContextManager[Any]:
        """Linear maps called inside have their weight gradients put off."""
        return _Interceptor(self)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """A backward inside is stage I. What stays behind is no view into something larger."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
        self._products = deque(_compact(self._products))

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """A gradient taken inside, by a layer for its own use, puts nothing off."""
        before, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = before

    def add(self, weight: _Destination, bias: nn.Parameter | None, inputs: Tensor, gradient: Tensor) -> None:
        self._products.append(_Product(weight, bias, inputs.detach(), gradient.detach()))

    def accumulate(self) -> None:
        """Stage W: add to the parameters' gradients, letting go of each product as it is done."""
        with torch.no_grad():
            while self._products:
                self._products.popleft().accumulate()

    @property
    def num_bytes(self) -> int:
        """Memory that is held from I to W: distinct storages."""
        storages = {_storage(t): t.untyped_storage().nbytes() for p in self._products for t in (p.inputs, p.gradient)}
        return sum(storages.values())


@dataclass(frozen=True)
class _Destination:
    """Where a weight's gradient goes: back through views or casts `path` to `parameter`.

    `is_transposed`: the weight is the parameter's transpose and nothing else.
    """

    parameter: nn.Parameter
    path: tuple[Any, ...] = ()
    is_transposed: bool = False


class _Product(NamedTuple):
    """weight.grad += gradient^T @ inputs; bias.grad += column sums of the gradient."""

    weight: _Destination
    bias: nn.Parameter | None
    inputs: Tensor
    gradient: Tensor

    def accumulate(self) -> None:
        inputs = self.inputs.reshape(-1, self.inputs.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        parameter, path, is_transposed = self.weight.parameter, self.weight.path, self.weight.is_transposed
        total = parameter.grad
        if (not path or is_transposed) and total is not None and total.dtype == gradient.dtype:
            # One product that adds in place: no gradient of the weight's size beside the sum.
            left, right = (inputs, gradient) if is_transposed else (gradient, inputs)
            total.addmm_(left.t(), right)
        else:
            change = gradient.t() @ inputs
            for node in path:
                change = node(change)
            _add(parameter, change)
        if self.bias is not None:
            _add(self.bias, gradient.sum(0))


def _add(parameter: nn.Parameter, change: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(change)


class _Linear(torch.autograd.Function):
    """inputs @ weight^T + bias, whose parameters' gradients are put off while `later` is open."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, destination: _Destination, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight if ctx.needs_input_grad[0] else None)
        ctx.destination, ctx.later = destination, later
        ctx.bias = bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        back = gradient @ weight if ctx.needs_input_grad[0] else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_weight = to_bias = None
        if ctx.later.is_open:
            ctx.later.add(ctx.destination, ctx.bias, inputs, gradient)
        elif ctx.needs_input_grad[1]:
            to_weight = rows.t() @ inputs.reshape(-1, inputs.shape[-1])
        if ctx.needs_input_grad[2] and not (ctx.later.is_open and ctx.bias is not None):
            to_bias = rows.sum(0)
        return back, to_weight, to_bias, None, None


class _Call(NamedTuple):
    """A call in the terms of F.linear."""

    inputs: Any
    weight: Any
    bias: Any = None


class _Interceptor(TorchFunctionMode):
    """Rewrites linear maps with a parameter, from `__enter__` on, where no other saved-tensor hooks come in between."""

    def __init__(self, later: WeightGradients) -> None:
        super().__init__()
        self.later = later
        self._hooks: Any = None

    def __enter__(self) -> Any:
        self._hooks = _top_saved_tensors_default_hooks(False)
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _CALLS and torch.is_grad_enabled():
            try:
                call = _CALLS[func](*args, **kwargs)
            except TypeError:
                return func(*args, **kwargs)
            destination = _destination(call.weight) if self._can_put_off(*call) else None
            if destination is not None:
                return _Linear.apply(call.inputs, call.weight, call.bias, destination, self.later)
        elif func is torch.autograd.grad:
            with self.later.in_full():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _can_put_off(self, inputs: Any, weight: Any, bias: Any) -> bool:
        return (
            type(inputs) in _TENSORS
            and type(weight) in _TENSORS
            and weight.requires_grad
            and weight.dim() == 2
            and (bias is None or (type(bias) in _TENSORS and bias.shape == weight.shape[:1]))
            and inputs.dim() > 0
            and inputs.dtype == weight.dtype
            and inputs.layout == weight.layout == torch.strided
            and not torch.is_autocast_enabled(inputs.device.type)
            and not torch._C._are_functorch_transforms_active()
            and _top_saved_tensors_default_hooks(False) == self._hooks
        )


_TENSORS = (Tensor, nn.Parameter)


# Arguments in the names of torch's signatures. Other ones (out, alpha, beta) are a TypeError: not such a call.


def _of_linear(input: Any, weight: Any, bias: Any = None) -> _Call:
    return _Call(input, weight, bias)


def _of_matmul(input: Any, other: Any) -> _Call:
    return _Call(input, _transposed(other))


def _of_mm(input: Any, mat2: Any) -> _Call:
    return _Call(input, _transposed(mat2))


def _of_addmm(input: Any, mat1: Any, mat2: Any) -> _Call:
    return _Call(mat1, _transposed(mat2), input)


def _transposed(matrix: Any) -> Any:
    return matrix.t() if type(matrix) in _TENSORS and matrix.dim() == 2 else None


_CALLS: dict[Any, Callable[..., _Call]] = {
    F.linear: _of_linear,
    torch.matmul: _of_matmul,
    Tensor.matmul: _of_matmul,
    torch.mm: _of_mm,
    Tensor.mm: _of_mm,
    torch.addmm: _of_addmm,
    Tensor.addmm: _of_addmm,
}

_TRANSPOSES = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}

_PASSING = _TRANSPOSES | {
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Steps back from a weight to its parameter that hold no tensor, so that they can be taken late, and twice."""


def _destination(weight: Tensor) -> _Destination | None:
    """The one parameter that a weight's gradient goes to, or None if that is not simply so."""
    if isinstance(weight, nn.Parameter):
        return None if _is_hooked(weight) else _Destination(weight)
    path = []
    node: Any = weight.grad_fn
    while node is not None and node.name() in _PASSING:
        path.append(node)
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None)
    if not path or type(parameter) is not nn.Parameter or _is_hooked(parameter):
        return None
    is_transposed = (
        all(step.name() in _TRANSPOSES for step in path)
        and parameter.dim() == 2
        and weight.stride() == parameter.stride()[::-1]
        and weight.shape == parameter.shape[::-1]
    )
    return _Destination(parameter, tuple(path), is_transposed)


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether somebody wants to see the parameter's gradient as a backward makes it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _compact(products: Iterable[_Product]) -> list[_Product]:
    """The same with copies of what are views into storages that are larger than all that is held of them."""
    listed = list(products)
    views: dict[int, dict[tuple[object, ...], Tensor]] = {}
    for product in listed:
        for tensor in (product.inputs, product.gradient):
            views.setdefault(_storage(tensor), {}).setdefault(_view(tensor), tensor)
    copies: dict[tuple[object, ...], Tensor] = {}
    for storage, held in views.items():
        first = next(iter(held.values()))
        if sum(tensor.nbytes for tensor in held.values()) < first.untyped_storage().nbytes():
            copies |= {
                (storage, *view): tensor.clone(memory_format=torch.contiguous_format) for view, tensor in held.items()
            }
    if not copies:
        return listed

    def copied(tensor: Tensor) -> Tensor:
        return copies.get((_storage(tensor), *_view(tensor)), tensor)

    return [p._replace(inputs=copied(p.inputs), gradient=copied(p.gradient)) for p in listed]


def _view(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()
