"""A causal language model in the layout of Llama and Qwen2 (arXiv 2302.13971, 2407.10671).

    before   token embedding; rows of features at their placeholders   carries x
    blocks   causal attention within each sequence, gated MLP          carries x
    after    norm, head, token loss                                    loss; sends hidden if asked to

The data set supplies "tokens", "labels" (the next token of each row, -100 where no loss is wanted) and, if
`answers` are counted, "spans": for rows that predict a token of an answer its number, otherwise -1; rows of
a span are neighbours. Example, one answer "ab" after a prompt "x:":

    tokens  x    :   a   b        labels  -100  a   b  -100      spans  -1   0   0  -1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from pipeweaver.model import layers
from pipeweaver.model.attention import positions, rotary
from pipeweaver.model.graph import LayerSpec, LossSpec, Module, Reading, TensorSpec
from pipeweaver.model.layers import (
    WHOLE,
    Activation,
    Attention,
    GatedMlp,
    Linear,
    Mlp,
    NumLayers,
    Sublayer,
    residual_deviation,
    run_attention,
)
from pipeweaver.model.part import PartView

PositiveInt = Annotated[int, Meta(ge=1)]


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="language"):
    """[model.NAME] with type = "language".

    `kv_heads` are by default `heads`, `head_dim` hidden / heads, `ffn` 4 * hidden. `placeholders` maps the
    name of each flow that brings features to the token whose rows they replace. With `head` there is a token
    loss; with `sends_hidden` the normed output goes to whoever reads "hidden". `tied` shares embedding and
    head. `answers` reports the share of answers whose every token is predicted. With `sublayers` a block is two layers,
    attention and MLP: chunks may begin between them.
    """

    layers: NumLayers
    hidden: PositiveInt
    heads: PositiveInt
    vocab: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    ffn: PositiveInt | None = None
    gated: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    rope_base: Annotated[float, Meta(gt=1)] = 10_000.0
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    tied: bool = False
    head: bool = True
    sends_hidden: bool = False
    answers: bool = False
    placeholders: dict[str, Annotated[int, Meta(ge=0)]] = {}
    sublayers: bool = False
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.head_dim is None:
            layers.check_heads(self.hidden, self.heads)
        layers.check_rotary(self.dimensions, axes=1)
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} do not divide heads = {self.heads}")
        if not self.head and not self.sends_hidden:
            raise ValueError("head = false leaves nothing to train for: set sends_hidden = true, or head = true")
        if not self.head and (self.tied or self.answers):
            raise ValueError(f"{'tied' if self.tied else 'answers'} = true needs head = true")
        for name, token in self.placeholders.items():
            if token >= self.vocab:
                raise ValueError(f"placeholders.{name} = {token} is not below vocab = {self.vocab}")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dimensions(self) -> int:
        """Dimension of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Width inside the MLP."""
        return self.ffn or 4 * self.hidden


def language(name: str, config: LanguageConfig, readings: Sequence[Reading] = ()) -> Module:
    """The module: `before` loads "tokens" and reads features, `after` has the loss or sends "hidden".

    Raises ValueError if features have no placeholder or another width than the embedding.
    """
    for reading in readings:
        if reading.name not in config.placeholders:
            raise ValueError(
                f"{name} reads {reading.name} from {reading.source}, but placeholders has no token for it: "
                f"set placeholders = {{ {reading.name} = TOKEN }}"
            )
        if reading.spec.width != config.hidden:
            raise ValueError(
                f"{reading.source} sends {reading.spec.name} of width {reading.spec.width} to {name}, "
                f"whose hidden size is {config.hidden}; they must be equal"
            )
    x = TensorSpec(name="x", width=config.hidden)
    before = LayerSpec(
        kind=layers.kind("language.before", hidden=config.hidden, vocab=config.vocab, reads=len(readings)),
        build=lambda: TokenEmbedding(config, readings),
        loads=("tokens",),
        reads=tuple(reading.name for reading in readings),
        carries=(x,),
        trainable=config.trainable,
    )

    def block(halves: tuple[Sublayer, ...]) -> LayerSpec:
        return LayerSpec(
            kind=layers.block_kind(
                "language",
                halves,
                both=dict(hidden=config.hidden),
                attention=dict(
                    heads=config.heads,
                    kv_heads=config.key_heads,
                    head_dim=config.dimensions,
                    bias=config.qkv_bias,
                ),
                mlp=dict(ffn=config.width, gated=config.gated, activation=config.activation),
            ),
            build=lambda: LanguageBlock(config, halves),
            carries=(x,),
            trainable=config.trainable,
        )

    after = LayerSpec(
        kind=layers.kind(
            "language.after",
            hidden=config.hidden,
            vocab=config.vocab if config.head else 0,
            sends=config.sends_hidden,
            answers=config.answers,
        ),
        build=lambda: Head(config),
        loads=(("labels",) if config.head else ()) + (("spans",) if config.answers else ()),
        sends=(TensorSpec(name="hidden", width=config.hidden),) if config.sends_hidden else (),
        trainable=config.trainable,
    )
    return Module(
        name=name,
        layers=layers.block_layers(config.layers, config.sublayers, block),
        before=before,
        after=after,
        tied={"after.head.weight": "before.embedding.weight"} if config.tied else {},
        loss=LossSpec(units="supervised") if config.head else None,
    )


class TokenEmbedding(nn.Module):
    """tokens [tokens] -> x [tokens, hidden], placeholders replaced by the rows that flow in."""

    def __init__(self, config: LanguageConfig, readings: Sequence[Reading]) -> None:
        super().__init__()
        self.readings = tuple(readings)
        self.placeholders = config.placeholders
        self.embedding = nn.Embedding(config.vocab, config.hidden, _weight=torch.empty(config.vocab, config.hidden))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        tokens = part.loaded["tokens"]
        x = self.embedding(tokens)
        for reading in self.readings:
            here = tokens == self.placeholders[reading.name]
            _check_placeholders(here, reading, part)
            rows = state[reading.name]
            if rows.shape[0]:
                # The n-th placeholder takes row n. An index of known size: nothing waits for the device.
                index = (here.cumsum(0) - 1).clamp(0, rows.shape[0] - 1)
                x = torch.where(here[:, None], rows.index_select(0, index), x)
        return {"x": x}


class LanguageBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or one of these; attention is causal, within each sequence."""

    def __init__(self, config: LanguageConfig, halves: tuple[Sublayer, ...] = WHOLE) -> None:
        super().__init__()
        self.config, self.halves = config, halves
        if "attention" in halves:
            self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
            self.attention = Attention(
                config.hidden,
                heads=config.heads,
                key_heads=config.key_heads,
                head_dim=config.dimensions,
                bias=config.qkv_bias,
                out_deviation=residual_deviation(config.heads * config.dimensions, config.layers),
            )
        if "mlp" in halves:
            self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
            self.mlp = (GatedMlp if config.gated else Mlp)(
                config.hidden,
                config.width,
                config.activation,
                bias=False,
                out_deviation=residual_deviation(config.width, config.layers),
            )

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x, config = state["x"], self.config
        if "attention" in self.halves:
            lengths = part.sizes()
            angles = part.once(
                ("rotary", "line", config.dimensions, config.rope_base),
                lambda: rotary((positions(lengths, part.device),), config.dimensions, config.rope_base, part.dtype),
            )
            x = x + run_attention(part, self.attention, self.attention_norm(x), lengths, angles=angles, causal=True)
        if "mlp" in self.halves:
            x = x + self.mlp(self.mlp_norm(x))
        return {"x": x}


class Head(nn.Module):
    """x [tokens, hidden] -> the summed token loss, and the normed rows as "hidden"."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = Linear(config.hidden, config.vocab, deviation=0.02) if config.head else None

    def forward(self, state: dict[str, Tensor], part: PartView) -> dict[str, Tensor]:
        x = self.norm(state["x"])
        outputs = {"hidden": x} if self.config.sends_hidden else {}
        if self.head is not None:
            logits = self.head(x)
            labels = part.loaded["labels"]
            precise = logits if logits.dtype == torch.float64 else logits.float()
            outputs["loss"] = F.cross_entropy(precise, labels, ignore_index=-100, reduction="sum")
            self._report(logits.detach(), labels, part)
        return outputs

    def _report(self, logits: Tensor, labels: Tensor, part: PartView) -> None:
        supervised = labels != -100
        right = logits.argmax(-1) == labels
        part.report("accuracy", right.sum(), supervised.sum())
        if self.config.answers:
            part.report("answers", *count_answers(right, part.loaded["spans"], part.sizes()))


def count_answers(right: Tensor, spans: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(spans all of whose rows are right, spans). Spans are numbered within each sequence; -1 is none."""
    starts_sequence = torch.zeros(sum(lengths) + 1, dtype=torch.bool)
    starts_sequence[torch.tensor([0, *lengths]).cumsum(0)] = True
    previous = torch.cat([spans.new_full((1,), -1), spans[:-1]]) if len(spans) else spans
    starts = (spans >= 0) & ((spans != previous) | starts_sequence[:-1].to(spans.device))
    # Numbers of the spans in this part, 0 for rows before the first: shapes do not depend on values.
    number = starts.cumsum(0)
    wrong = torch.zeros(len(spans) + 1, dtype=torch.int64, device=spans.device)
    wrong = wrong.index_add(0, number, ((spans >= 0) & ~right).long())
    return starts.sum() - (wrong > 0).sum(), starts.sum()


def _check_placeholders(here: Tensor, reading: Reading, part: PartView) -> None:
    """Raise ValueError, naming the item, unless placeholders equal the rows that flow in, item by item."""
    if type(here) is not Tensor or here.is_meta:  # traced for its shapes: there are no values
        return
    ends = torch.tensor([0, *part.sizes()]).cumsum(0).to(here.device)
    totals = torch.cat([here.new_zeros(1, dtype=torch.int64), here.cumsum(0)])
    counts = totals[ends].diff().tolist()
    for item, count, rows in zip(part.items, counts, part.linked_sizes(reading.source, reading.spec.rows), strict=True):
        if count != rows:
            raise ValueError(
                f"{item.name}: {count} placeholders for {reading.name}, but {rows} rows of {reading.spec.name} "
                f"come from its linked {reading.source} items"
            )
