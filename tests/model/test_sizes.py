"""Parameter counts of published models: near their names, and as their layers add up."""

import pytest

from pipeweaver.model import sizes
from pipeweaver.model.build import build_graph, num_parameters


def count(config) -> int:
    return num_parameters(build_graph({"m": config}))["m"]


@pytest.mark.parametrize(
    ("config", "billions", "tolerance"),
    [
        (sizes.VIT_5B, 5, 0.15),  # 63 layers of 68M: the paper's table makes 4.3B
        (sizes.VIT_22B, 22, 0.07),
        (sizes.LLAMA3_8B, 8, 0.01),
        (sizes.QWEN2_32B, 32, 0.03),
        (sizes.QWEN2_72B, 72, 0.02),
        (sizes.GPT_175B, 175, 0.01),
        (sizes.DIT_5B, 5, 0.15),
        (sizes.DIT_30B, 30, 0.15),
    ],
)
def test_counts_are_near_the_names(config, billions, tolerance):
    assert count(config) == pytest.approx(billions * 1e9, rel=tolerance)


def test_llama3_8b_has_the_published_count():
    assert count(sizes.LLAMA3_8B) == 8_030_261_248  # as Meta-Llama-3-8B states it


def test_qwen2_72b_has_the_published_count():
    assert count(sizes.QWEN2_72B) == 72_706_203_648  # as Qwen2-72B states it


@pytest.mark.parametrize("name", sizes.SETUPS)
def test_setups_are_graphs(name):
    graph = sizes.setup(name)
    assert len(graph.modules) == 2 and graph.modules[1].loss is not None


def test_unknown_setups_name_the_known_ones():
    with pytest.raises(ValueError, match="there is no setup VLM-XXL; there are VLM-S, "):
        sizes.setup("VLM-XXL")
