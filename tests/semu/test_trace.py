"""Traces: FLOPs are torch's, saved bytes those of a real forward, phases and live bytes as they must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2DecoderLayer
from transformers.models.vit.modeling_vit import ViTConfig, ViTLayer

from pipeweaver.semu.calls import Trace
from pipeweaver.semu.kernels import device_kernels
from pipeweaver.semu.trace import trace

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def llama() -> nn.Module:
    return LlamaDecoderLayer(LlamaConfig(num_key_value_heads=2, attn_implementation="sdpa", **SHAPE), 0)


def qwen() -> nn.Module:
    return Qwen2DecoderLayer(Qwen2Config(num_key_value_heads=4, attn_implementation="sdpa", **SHAPE), 0)


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=32, n_head=4, n_inner=48, attn_implementation="sdpa", resid_pdrop=0.0, attn_pdrop=0.0)
    return GPT2Block(config, 0)


def vit() -> nn.Module:
    return ViTLayer(ViTConfig(attn_implementation="sdpa", hidden_dropout_prob=0.0, **SHAPE))


LAYERS = [mlp, llama, qwen, gpt2, vit]


def run(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, LlamaDecoderLayer | Qwen2DecoderLayer):
        angles = torch.zeros(x.shape[0], x.shape[1], 8, device=x.device)
        out = layer(x, position_embeddings=(angles, angles))
    else:
        out = layer(x)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def traced(make: object, kernels: str | None = None, rows: int = 6) -> Trace:
    with torch.device("meta"):
        layer = make()  # type: ignore[operator]
        x = torch.empty(2, rows, 32, requires_grad=True)
    return trace(
        lambda: {"y": run(layer, x)},
        inputs={"x": x},
        parameters=dict(layer.named_parameters()),
        kernels=device_kernels(kernels) if kernels else None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("make", LAYERS)
def test_raw_flops_equal_torchs_counter(make: object) -> None:
    with torch.device("meta"):
        layer = make()  # type: ignore[operator]
        x = torch.empty(2, 6, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        run(layer, x).sum().backward()
    assert sum(call.flops for call in traced(make).calls) == counter.get_total_flops() > 0


@pytest.mark.parametrize("make", LAYERS)
def test_saved_bytes_equal_those_of_a_real_forward(make: object) -> None:
    layer = make()  # type: ignore[operator]
    x = torch.randn(2, 6, 32, requires_grad=True)
    theirs = {p.untyped_storage().data_ptr() for p in layer.parameters()} | {x.untyped_storage().data_ptr()}
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor)
        if storage.data_ptr() not in theirs:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(layer, x)
    assert traced(make, "cpu").saved_bytes == sum(found.values()) > 0


def test_backward_is_told_apart_by_what_needs_it() -> None:
    calls = traced(mlp).calls
    matmuls = [(call.phase, call.parameter, call.shape) for call in calls if call.kind == "matmul"]
    assert matmuls == [
        ("F", "1.weight", (1, 12, 32, 48)),
        ("F", "3.weight", (1, 12, 48, 32)),
        ("I", "3.weight", (1, 12, 32, 48)),
        ("W", "3.weight", (1, 32, 12, 48)),
        ("I", "1.weight", (1, 12, 48, 32)),
        ("W", "1.weight", (1, 48, 12, 32)),
    ]
    assert {call.parameter for call in calls if call.accumulates} == {
        f"{i}.{n}" for i in "013" for n in ("weight", "bias")
    }


def test_without_an_input_gradient_all_of_backward_is_for_weights() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(4, 8), torch.empty(3, 4)
    found = trace(lambda: {"y": layer(x)}, inputs={"x": x}, parameters=dict(layer.named_parameters()))
    assert {call.phase for call in found.calls} == {"F", "W"}
    assert found.input_gradients == {}


def test_live_bytes_are_what_is_held_while_a_call_runs() -> None:
    found = traced(lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    live = [sum(found.storages[s].num_bytes for s in call.live) for call in found.calls if call.phase == "F"]
    hidden, out = 12 * 64 * 4, 12 * 32 * 4
    assert live == [hidden, 2 * hidden, hidden + out]  # the linear saves its input x, not its output


def test_an_intermediate_that_no_graph_holds_is_not_saved() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(4, 4), torch.empty(3, 4, requires_grad=True)

    def forward() -> dict[str, Tensor]:
        layer(x).tanh().sum()
        return {"y": layer(x)}

    found = trace(forward, inputs={"x": x}, parameters=dict(layer.named_parameters()))
    assert found.saved_bytes == 0


def test_attention_is_one_operator_and_causal_attention_costs_its_share() -> None:
    def attentions(make: object, rows: int) -> list[tuple[str, int, int]]:
        calls = traced(make, "cuda", rows).calls
        return [(call.phase, call.flops, call.counted_flops) for call in calls if call.kind == "attention"]

    rows, matmul = 6, 2 * 2 * 4 * 6 * 6 * 8
    share = (rows + 1) / (2 * rows)
    assert attentions(vit, rows) == [("F", 2 * matmul, 2 * matmul), ("I", 5 * matmul, 5 * matmul)]
    assert attentions(llama, rows) == [("F", 2 * matmul, 2 * matmul * share), ("I", 5 * matmul, 5 * matmul * share)]


def test_tensors_that_are_not_on_the_meta_device_are_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="x is on cpu"):
        trace(lambda: {"y": layer(x)}, inputs={"x": x}, parameters={})
