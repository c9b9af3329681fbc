"""The models of published measurements, layer by layer as their frameworks run them.

    gpt(hidden=6144, heads=48, vocabulary=51200)      Megatron-DeepSpeed, float16, unfused attention, dropout
    llama(hidden=8192, heads=64, key_heads=8, ffn=28672, vocabulary=128256)     Megatron, bfloat16, fused kernels

Each is (before, block, after) as layer specs; items are sequences of "tokens". Only shapes and kernels: these
layers are traced, never run. Equal calls return the same layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeweaver.model.graph import LayerSpec, TensorSpec
from pipeweaver.model.part import PartView
from pipeweaver.semu.kernels import fused

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A model of equal blocks."""

    before: LayerSpec
    block: LayerSpec
    after: LayerSpec


@cache
def gpt(*, hidden: int, heads: int, vocabulary: int, sequence: int) -> Layers:
    """GPT as in Megatron-LM before flash attention: learned positions, LayerNorm, 4 * hidden, GELU, dropout 0.1."""
    x = TensorSpec(name="x", width=hidden)
    sizes = f"hidden={hidden} heads={heads} vocabulary={vocabulary} sequence={sequence}"
    return Layers(
        before=LayerSpec(
            kind=f"gpt.before {sizes}",
            build=lambda: _Embedding(hidden, vocabulary, sequence),
            loads=("tokens",),
            carries=(x,),
        ),
        block=LayerSpec(kind=f"gpt.block {sizes}", build=lambda: _GptBlock(hidden, heads), carries=(x,)),
        after=LayerSpec(kind=f"gpt.after {sizes}", build=lambda: _GptHead(hidden, vocabulary), loads=("labels",)),
    )


@cache
def llama(*, hidden: int, heads: int, key_heads: int, ffn: int, vocabulary: int) -> Layers:
    """Llama as in Megatron core with Transformer Engine: RMSNorm, rotary, grouped queries, SwiGLU, fused loss."""
    x = TensorSpec(name="x", width=hidden)
    sizes = f"hidden={hidden} heads={heads} key_heads={key_heads} ffn={ffn} vocabulary={vocabulary}"
    return Layers(
        before=LayerSpec(
            kind=f"llama.before {sizes}",
            build=lambda: _Embedding(hidden, vocabulary, 0),
            loads=("tokens",),
            carries=(x,),
        ),
        block=LayerSpec(
            kind=f"llama.block {sizes}", build=lambda: _LlamaBlock(hidden, heads, key_heads, ffn), carries=(x,)
        ),
        after=LayerSpec(kind=f"llama.after {sizes}", build=lambda: _LlamaHead(hidden, vocabulary), loads=("labels",)),
    )


class _Embedding(nn.Module):
    """Token embedding; with `positions` learned positions and dropout."""

    def __init__(self, hidden: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden, _weight=torch.empty(vocabulary, hidden))
        self.positions = nn.Parameter(torch.empty(positions, hidden)) if positions else None

    def forward(self, state: State, part: PartView) -> State:
        x = self.embedding(part.loaded["tokens"])
        if self.positions is None:
            return {"x": x}
        x = fused("add_positions", x, self.positions, shape=x.shape, passes=(0,))
        return {"x": _dropout(x)}


class _GptBlock(nn.Module):
    """Attention through the whole score matrix, with the fused kernels of Megatron-LM."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, state: State, part: PartView) -> State:
        x = state["x"]
        attended = F.linear(self.attend(self.qkv(self.attention_norm(x)), part), self.out.weight)
        x = _bias_dropout_add(attended, self.out.bias, x)
        wide = F.linear(self.mlp_norm(x), self.up.weight)
        wide = fused("bias_gelu", wide, self.up.bias, shape=wide.shape, save=(0, 1))
        return {"x": _bias_dropout_add(F.linear(wide, self.down.weight), self.down.bias, x)}

    def attend(self, qkv: Tensor, part: PartView) -> Tensor:
        batch, rows = len(part.items), part.items[0].sizes["tokens"]
        width = qkv.shape[-1] // (3 * self.heads)
        # [batch * rows, heads, 3 * width] -> three of [batch * heads, rows, width], as views
        query, key, value = (
            piece.unflatten(0, (rows, batch)).flatten(1, 2).transpose(0, 1)
            for piece in qkv.unflatten(-1, (self.heads, 3 * width)).chunk(3, dim=-1)
        )
        scores = torch.bmm(query, key.transpose(1, 2))
        probabilities = _dropout(fused("masked_softmax", scores, shape=scores.shape, save_output=True))
        context = torch.bmm(probabilities, value)  # [batch * heads, rows, width]
        context = context.unflatten(0, (batch, self.heads)).permute(2, 0, 1, 3).contiguous()
        return context.flatten(2).flatten(0, 1)


class _GptHead(nn.Module):
    """Final norm, logits, and the vocabulary-parallel loss of Megatron-LM in float32."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, state: State, part: PartView) -> State:
        logits = self.head(self.norm(state["x"])).float()
        # Maximum, exponentials in place, target's logit: reads and writes the logits about twice.
        return {"loss": fused("vocabulary_loss", logits, shape=(), save_output=False, save=(0,))}


class _LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, key_heads: int, ffn: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.groups, self.split = key_heads, [heads // key_heads, 1, 1]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, sum(self.split) * key_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, state: State, part: PartView) -> State:
        x = state["x"]
        # Each group's queries lie beside its key and value: laying them out by heads copies them.
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (self.groups, -1, self.width))
        query, key, value = (piece.flatten(1, 2) for piece in qkv.split(self.split, dim=2))
        query, key = _rotary(query), _rotary(key)
        x = x + self.out(_flash(query, key, value, part))
        wide = self.up(self.mlp_norm(x))
        wide = fused("swiglu", wide, shape=(wide.shape[0], wide.shape[1] // 2), save=(0,))
        return {"x": x + self.down(wide)}


class _LlamaHead(nn.Module):
    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, state: State, part: PartView) -> State:
        logits = self.head(self.norm(state["x"]))
        # The kernel leaves the gradient where the logits were.
        return {"loss": fused("cross_entropy", logits, shape=(), save=(0,), updates=(0,), dtype=torch.float32)}


def _dropout(x: Tensor) -> Tensor:
    return fused("dropout", x, shape=x.shape, extra=((x.shape, torch.bool),))


def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return fused("bias_dropout_add", x, bias, residual, shape=x.shape, passes=(2,), extra=((x.shape, torch.bool),))


def _rotary(x: Tensor) -> Tensor:
    return fused("rotary", x, shape=x.shape)


def _flash(query: Tensor, key: Tensor, value: Tensor, part: PartView) -> Tensor:
    from pipeweaver.model.attention import attend

    return attend(query, key, value, part.sizes(), causal=True).flatten(1)
