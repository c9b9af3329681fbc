"""Sizes of published models, and the setups that PipeWeaver is measured on (arXiv 2504.14145, section 6).

    graph = setup("VLM-L")        # ViT 22B -> Qwen2 72B, as a model graph; nothing is allocated

Layers, hidden sizes, FFN, heads and key heads are the paper's. What it leaves open is chosen here: patches of
14 pixels merged 4 x 4; vocabularies and rotary bases of the published language models; one placeholder
token at the end of the vocabulary; diffusion latents of 16 channels in patches of 2 x 2, with few key heads in
the cross-attention, which keeps the parameter counts near the models' names.
"""

from __future__ import annotations

import msgspec

from pipeweaver.model.build import ModuleConfig, build_graph
from pipeweaver.model.diffusion import DiffusionConfig
from pipeweaver.model.graph import Flow, ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig

VIT_5B = VitConfig(layers=63, hidden=1792, heads=16, ffn=15360, patch=14, merge=4, output=4096)
VIT_22B = VitConfig(layers=48, hidden=6144, heads=48, ffn=24576, patch=14, merge=4, output=8192)
LLAMA3_8B = LanguageConfig(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, rope_base=500_000.0, norm_eps=1e-5
)
QWEN2_32B = LanguageConfig(
    layers=64, hidden=5120, heads=40, kv_heads=8, ffn=27648, vocab=152_064, rope_base=1e6, qkv_bias=True
)
QWEN2_72B = LanguageConfig(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568, vocab=152_064, rope_base=1e6, qkv_bias=True
)
GPT_175B = LanguageConfig(
    layers=96, hidden=12288, heads=96, ffn=49152, vocab=50_257, gated=False, activation="gelu", tied=True
)
DIT_5B = DiffusionConfig(layers=28, hidden=3584, heads=28, cross_kv_heads=4, ffn=10240, channels=64, positions="grid")
DIT_30B = DiffusionConfig(layers=48, hidden=6144, heads=48, cross_kv_heads=8, ffn=24576, channels=64, positions="grid")

SETUPS: dict[str, tuple[ModuleConfig, ModuleConfig]] = {
    "VLM-S": (VIT_5B, LLAMA3_8B),
    "VLM-M": (VIT_5B, QWEN2_32B),
    "VLM-L": (VIT_22B, QWEN2_72B),
    "VLM-XL": (VIT_22B, GPT_175B),
    "T2V-S": (LLAMA3_8B, DIT_5B),
    "T2V-L": (QWEN2_32B, DIT_30B),
    "T2V-XL": (QWEN2_72B, DIT_30B),
}
"""Source and destination of each setup."""


def setup(name: str, *, sublayers: bool = False) -> ModelGraph:
    """The model graph of a setup: vision -> language, or language -> diffusion. Raises ValueError for other names.

    With `sublayers`, chunks may begin between attention and MLP of a block.
    """
    if name not in SETUPS:
        raise ValueError(f"there is no setup {name}; there are {', '.join(SETUPS)}")
    source, destination = (msgspec.structs.replace(config, sublayers=sublayers) for config in SETUPS[name])
    if isinstance(source, VitConfig) and isinstance(destination, LanguageConfig):
        return _vision_language(source, destination)
    assert isinstance(source, LanguageConfig) and isinstance(destination, DiffusionConfig)
    return _text_to_video(source, destination)


def _vision_language(vision: VitConfig, language: LanguageConfig) -> ModelGraph:
    vision = msgspec.structs.replace(vision, output=language.hidden)
    language = msgspec.structs.replace(language, placeholders={"vision": language.vocab - 1})
    flow = Flow(source="vision", tensor="features", destination="language", name="vision")
    return build_graph({"vision": vision, "language": language}, [flow])


def _text_to_video(language: LanguageConfig, diffusion: DiffusionConfig) -> ModelGraph:
    language = msgspec.structs.replace(language, head=False, sends_hidden=True)
    flow = Flow(source="language", tensor="hidden", destination="diffusion", name="text")
    return build_graph({"language": language, "diffusion": diffusion}, [flow])
