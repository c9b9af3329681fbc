"""A small vision-language model."""

from pipeweaver.model.build import build_graph
from pipeweaver.model.graph import Flow
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig

FLOWS = (Flow(source="vision", tensor="features", destination="language", name="vision"),)


def make_graph(*, layers: int = 3, trainable: bool | str = True, hidden: int = 32):
    return build_graph(
        {
            "vision": VitConfig(
                layers=layers, hidden=32, heads=2, patch=4, merge=2, channels=1, output=hidden, trainable=trainable
            ),
            "language": LanguageConfig(
                layers=layers, hidden=hidden, heads=2, vocab=259, placeholders={"vision": 258}, answers=True
            ),
        },
        FLOWS,
    )
