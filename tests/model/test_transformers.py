"""With weights mapped, our layers equal published ones: loss, features and every gradient."""

import pytest
import torch

from pipeweaver.data.items import Item
from pipeweaver.model.build import build_graph, materialise_all
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.reference import run_all
from pipeweaver.model.vit import VitConfig
from tests.model.examples import text

transformers = pytest.importorskip("transformers")

CLOSE = dict(rtol=1e-5, atol=1e-7)
LENGTHS = [9, 1, 14]


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "tied", "base"),
    [
        ("Llama", 4, 4, False, 10_000.0),
        ("Llama", 4, 2, True, 500_000.0),
        ("Qwen2", 6, 2, False, 1e6),
        ("Qwen2", 2, 1, True, 1e4),
    ],
)
def test_language_layers(family, heads, kv_heads, tied, base):
    torch.manual_seed(0)
    published = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=31,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    ).double()
    for name, parameter in published.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
    config = LanguageConfig(
        layers=3,
        hidden=24,
        heads=heads,
        kv_heads=kv_heads,
        ffn=40,
        vocab=31,
        rope_base=base,
        norm_eps=1e-5,
        qkv_bias=family == "Qwen2",
        tied=tied,
    )
    graph = build_graph({"language": config})
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    names = language_names(3, family == "Qwen2", tied)
    pairs = {ours: published.get_parameter(theirs) for ours, theirs in names.items()}
    ours = {name: layers[name.split("|")[0]].get_parameter(name.split("|")[1]) for name in pairs}
    assert sum(p.numel() for p in published.parameters()) == sum(p.numel() for p in ours.values())
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(pairs[name])

    tokens = torch.randint(0, 31, (sum(LENGTHS),))
    labels = torch.where(torch.rand(sum(LENGTHS)) < 0.7, torch.randint(0, 31, (sum(LENGTHS),)), -100)
    items = [text(length, supervised=1, draw=i) for i, length in enumerate(LENGTHS)]
    outcome = run_all(
        graph,
        layers,
        items,
        [],
        lambda _, names: {name: {"tokens": tokens, "labels": labels}[name] for name in names},
        normalisers={"main/language": 1},
        dtype=torch.float64,
    )
    outcome.loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for piece, own in zip(tokens.split(LENGTHS), labels.split(LENGTHS), strict=True):
        logits = published(input_ids=piece[None]).logits[0]
        expected = expected + torch.nn.functional.cross_entropy(logits, own, ignore_index=-100, reduction="sum")
    expected.backward()
    torch.testing.assert_close(outcome.loss, expected, **CLOSE)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.grad, pairs[name].grad, rtol=1e-5, atol=1e-5)


def language_names(count: int, bias: bool, tied: bool) -> dict[str, str]:
    """ "layer|parameter" of ours -> parameter of Llama or Qwen2"""
    names = {
        "language.before|embedding.weight": "model.embed_tokens.weight",
        "language.after|norm.weight": "model.norm.weight",
    }
    if not tied:
        names["language.after|head.weight"] = "lm_head.weight"
    for i in range(count):
        ours, theirs = f"language.layers.{i}|", f"model.layers.{i}."
        names[ours + "attention_norm.weight"] = theirs + "input_layernorm.weight"
        names[ours + "mlp_norm.weight"] = theirs + "post_attention_layernorm.weight"
        names[ours + "attention.out.weight"] = theirs + "self_attn.o_proj.weight"
        for letter in "qkv":
            for what in ("weight", "bias") if bias else ("weight",):
                names[f"{ours}attention.{letter}.{what}"] = f"{theirs}self_attn.{letter}_proj.{what}"
        for matrix in ("gate", "up", "down"):
            names[f"{ours}mlp.{matrix}.weight"] = f"{theirs}mlp.{matrix}_proj.weight"
    return names


SHAPES = [(4, 6), (4, 4), (4, 4), (2, 8)]


def images(shapes, patch, channels):
    return [torch.randn(channels, height * patch, width * patch, dtype=torch.float64) for height, width in shapes]


def patches(image, patch):
    """Row-major patches, each (channel, y, x): what the data set supplies."""
    return torch.nn.functional.unfold(image[None], patch, stride=patch)[0].T


def features_of(config, layers, graph, pictures, shapes):
    items = [
        Item(
            task="main",
            draw=0,
            module="vision",
            position=i,
            sizes={"tokens": h * w, "features": h * w // config.merge**2, "height": h, "width": w},
        )
        for i, (h, w) in enumerate(shapes)
    ]
    pixels = torch.cat([patches(picture, config.patch) for picture in pictures])
    outcome = run_all(graph, layers, items, [], lambda _, names: {"pixels": pixels}, dtype=torch.float64)
    return outcome.sent["main", "vision"]["features"]


def copy_block(block, attention, mlp, norms):
    """`attention` is the published (q, k, v, out), `mlp` (up, down), `norms` the two norms."""
    mine = [block.attention.q, block.attention.k, block.attention.v, block.attention.out, block.mlp.up, block.mlp.down]
    for own, other in zip([*mine, block.attention_norm, block.mlp_norm], [*attention, *mlp, *norms], strict=True):
        own.weight.copy_(other[0])
        own.bias.copy_(other[1])


def pair(module):
    return module.weight, module.bias


@torch.no_grad()
def test_qwen2_vl_vision():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    torch.manual_seed(0)
    published = Qwen2VisionTransformerPretrainedModel(
        Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=20, num_heads=4, mlp_ratio=3, patch_size=2)
    ).double()
    randomise(published)
    config = VitConfig(
        layers=2,
        hidden=32,
        heads=4,
        ffn=96,
        patch=2,
        merge=2,
        output=20,
        projector_hidden=128,
        activation="quick_gelu",
        patch_bias=False,
    )
    graph = build_graph({"vision": config})
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    # A still image is the same frame twice.
    layers["vision.before"].patch.weight.copy_(published.patch_embed.proj.weight.sum(2).flatten(1))
    for i, block in enumerate(published.blocks):
        qkv = list(zip(block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3), strict=True))
        copy_block(
            layers[f"vision.layers.{i}"],
            [*qkv, pair(block.attn.proj)],
            [pair(block.mlp.fc1), pair(block.mlp.fc2)],
            [pair(block.norm1), pair(block.norm2)],
        )
    layers["vision.after"].norm.load_state_dict(published.merger.ln_q.state_dict())
    layers["vision.after"].projector.load_state_dict(published.merger.mlp.state_dict())

    pictures = images(SHAPES, 2, 3)
    inputs = []
    for picture, (height, width) in zip(pictures, SHAPES, strict=True):
        frames = torch.stack([patches(picture, 2).view(-1, 3, 2, 2)] * 2, dim=2).flatten(1)
        windows = frames.view(height // 2, 2, width // 2, 2, -1).transpose(1, 2)
        inputs.append(windows.flatten(0, 3))
    expected = published(torch.cat(inputs), grid_thw=torch.tensor([(1, *shape) for shape in SHAPES]))
    expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(features_of(config, layers, graph, pictures, SHAPES), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("shapes", [[(3, 3), (3, 3)], [(3, 3), (5, 2), (4, 6)]], ids=["its own size", "interpolated"])
def test_siglip_vision(shapes):
    torch.manual_seed(0)
    published = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=3,
            image_size=12,
            patch_size=4,
            vision_use_head=False,
        )
    ).double()
    randomise(published)
    published = getattr(published, "vision_model", published)
    config = VitConfig(
        layers=2,
        hidden=24,
        heads=3,
        ffn=40,
        patch=4,
        positions="learned",
        grid=3,
        projector="none",
        activation="gelu_tanh",
    )
    graph = build_graph({"vision": config})
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    before = layers["vision.before"]
    before.patch.weight.copy_(published.embeddings.patch_embedding.weight.flatten(1))
    before.patch.bias.copy_(published.embeddings.patch_embedding.bias)
    before.positions.copy_(published.embeddings.position_embedding.weight.view(3, 3, -1))
    for i, block in enumerate(published.encoder.layers):
        own = block.self_attn
        copy_block(
            layers[f"vision.layers.{i}"],
            [pair(own.q_proj), pair(own.k_proj), pair(own.v_proj), pair(own.out_proj)],
            [pair(block.mlp.fc1), pair(block.mlp.fc2)],
            [pair(block.layer_norm1), pair(block.layer_norm2)],
        )
    layers["vision.after"].norm.load_state_dict(published.post_layernorm.state_dict())
    pictures = images(shapes, 4, 3)
    expected = [published(p[None], interpolate_pos_encoding=True).last_hidden_state[0] for p in pictures]
    torch.testing.assert_close(features_of(config, layers, graph, pictures, shapes), torch.cat(expected), **CLOSE)


def randomise(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
