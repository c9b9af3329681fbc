"""A model that does not fit its data is told before anything runs, by the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeweaver.agreement import check_agreement
from pipeweaver.config import Job, load
from pipeweaver.data.config import build_dataset

DIGITS = Path(__file__).parents[1] / "examples" / "digits.toml"


def check(job: Job) -> None:
    check_agreement(job, build_dataset(job.data, "train"))


def test_the_example_agrees() -> None:
    check(load(DIGITS))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.language.vocab=200", "model.language.placeholders={vision=9}"], "model.language.vocab = 200: the data has 259 tokens; set it to that or more"),
        (["model.language.placeholders={vision=9}"], "model.language.placeholders.vision = 9: in the data it is token 258"),
        (["model.vision.channels=3"], "model.vision.patch = 4: a row of pixels is 48 values for the module, 16 in the data"),
        (["model.vision.patch=8"], "model.vision.patch = 8: a row of pixels is 64 values for the module, 16 in the data"),
        (["model.vision.merge=1"], "model.vision.merge = 1: task.data.merge = 2; both must be the same"),
        (["task.data.kind=text"], "model.vision.patch = 4: the module takes pixels, but the data has no such tensors"),
        (["task.data.language=text"], "task.data has items for module text, but [model] defines only vision, language"),
        (["model.flows=[]"], 'model.flows: in the data, items of vision belong into items of language, but no flow leads there; add "vision.TENSOR -> language"'),
    ],
)  # fmt: skip
def test_each_disagreement_names_its_key(overrides: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(load(DIGITS, overrides))
    assert str(caught.value) == f"{DIGITS}: {expected}"


def test_a_backbone_without_items() -> None:
    overrides = ["task.backbone=spare", "model.spare={type='language', layers=1, hidden=8, heads=2, vocab=259}"]
    with pytest.raises(ValueError, match=r'task.backbone = "spare": the first 64 samples have no items for it, only'):
        check(load(DIGITS, overrides))
