"""A model that does not fit its data is told before anything runs, by the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeweaver.agreement import check_agreement, check_model
from pipeweaver.config import Job, load
from pipeweaver.data.config import build_dataset
from pipeweaver.model.build import build_graph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.runtime.prepare import job_graph

DIGITS = Path(__file__).parents[1] / "examples" / "digits.toml"


def check(job: Job) -> None:
    check_agreement(job, "main", build_dataset(job.tasks["main"].data, "train"))


def test_the_example_agrees() -> None:
    check(load(DIGITS))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.language.vocab=200", "model.language.placeholders={vision=9}"], "model.language.vocab = 200: the data has 259 tokens; set it to that or more"),
        (["model.language.placeholders={vision=9}"], "model.language.placeholders.vision = 9: in the data it is token 258"),
        (["model.vision.channels=3"], "model.vision.patch = 4: a row of pixels is 48 values for the module, 16 in the data"),
        (["model.vision.patch=8"], "model.vision.patch = 8: a row of pixels is 64 values for the module, 16 in the data"),
        (["model.vision.merge=1"], "model.vision.merge = 1: tasks.main.data.merge = 2; both must be the same"),
        (["tasks.main.data.kind=text"], "model.vision.patch = 4: the module takes pixels, but the data has no such tensors"),
        (["tasks.main.data.language=text"], "tasks.main.data has items for module text, but [model] defines only vision, language"),
        (["model.flows=[]"], 'model.flows: in the data, items of vision belong into items of language, but no flow leads there; add "vision.TENSOR -> language"'),
        (["model.language.placeholders={vision=258, audio=3}"], 'model.language.placeholders.audio: no flow brings audio to language; add "MODULE.TENSOR -> language.audio" to model.flows, or leave the placeholder out'),
    ],
)  # fmt: skip
def test_each_disagreement_names_its_key(overrides: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(load(DIGITS, overrides))
    assert str(caught.value) == f"{DIGITS}: {expected}"


def test_a_backbone_without_items() -> None:
    overrides = ["tasks.main.backbone=spare", "model.spare={type='language', layers=1, hidden=8, heads=2, vocab=259}"]
    with pytest.raises(
        ValueError, match=r'tasks.main.backbone = "spare": the first 64 samples have no items for it, only'
    ):
        check(load(DIGITS, overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["workers.pipeline=1000000000"], "workers.pipeline = 1000000000: the model has 8 layers, and every worker needs one; use 8 workers at most"),
        (["model.vision.trainable=false", "model.language.trainable=false"], "model: nothing is left to train; set trainable = true for a module"),
        (["model.spare={type='vit', layers=1, hidden=8, heads=2, patch=4, output=8}"], "model.spare: it has no loss, and no flow leads from it: it is for nothing"),
    ],
)  # fmt: skip
def test_models_that_make_no_sense(overrides: list[str], expected: str) -> None:
    layers = ["model.vision.layers=4", "model.language.layers=4"]
    job = load(DIGITS, [*layers, *overrides])
    with pytest.raises(ValueError) as caught:
        check_model(job, job_graph(job))
    assert str(caught.value) == expected


@pytest.mark.parametrize("policy", ["dynamic", "pipeweaver", "auto"])
def test_more_chunks_than_layers_are_said(policy: str) -> None:
    job = load(DIGITS, [f"policy.name={policy}", "policy.chunks_per_worker={vision=2, language=1}"])
    expected = "vision = 2: vision has 3 layers, too few for 2 chunks on each of 2 workers; it gets 1"
    with pytest.warns(UserWarning, match=expected):
        check_model(job, job_graph(job))


@pytest.mark.parametrize("key", ["hidden", "ffn", "vocab", "head_dim"])
def test_layers_too_large_for_any_machine(key: str) -> None:
    """What torch cannot even describe is an error of the model, not of torch."""
    sizes = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 9} | {key: 1 << 62}
    graph = build_graph({"language": LanguageConfig(**sizes)})
    with pytest.raises(ValueError, match=r"model.language: layer 'language\.\w+ .*' cannot be built: \w+: "):
        check_model(load(DIGITS), graph)


MULTITASK = DIGITS.with_name("multitask.toml")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["workers.replicas=2"], "workers.replicas = 2: the loss of match is joint, it needs a task's whole batch in one place; use 1 replica and more workers in workers.pipeline"),
        (["model.spare={type='language', layers=1, hidden=8, heads=2, vocab=259}"], "model.spare: no task activates it; name it in the modules of one, or leave it out"),
        (["tasks.paint.modules=['language', 'diffusion', 'vision']", "tasks.paint.flows=['language.hidden -> diffusion']"], "tasks.paint.modules: vision has no loss, and no flow leads from it to a module of the task: it is for nothing there"),
        (["tasks.paint.modules=['language', 'diffusion', 'match']", "tasks.match.modules=['vision', 'text']", "tasks.match.backbone=text"], "tasks.match: none of its modules has a loss, only others have; it trains nothing"),
        (["model.flows=['vision.features -> language', 'language.hidden -> diffusion', 'text.hidden -> match']"], "match compares two towers, so two flows must lead to it, not 1: text.hidden"),
        (["model.flows=['vision.features -> language', 'language.hidden -> vision']"], "the flows between vision, language form a cycle"),
        (["tasks.text.data.kind=documents"], "tasks.text.data has items for module vision, but tasks.text.modules activates only language"),
        (["tasks.text.modules=['language', 'vision']"], "model.vision.patch = 4: the module takes pixels, but the data has no such tensors"),
        (["tasks.paint.modules=['language', 'diffusion', 'text', 'match']"], "tasks.paint.modules: the first 64 samples have no items for text, match, only for diffusion, language"),
        (["tasks.caption.flows=['vision.features -> match']"], "tasks.caption.flows = [\"vision.features -> match\"]: 'vision.features -> match' joins modules of which the task activates only vision, language"),
        (["tasks.paint.modules=['language', 'diffusion', 'match']", "tasks.paint.flows=[]", "tasks.paint.loss_weights.text=1"], "tasks.paint.loss_weights.text = 1: the task does not activate text, only language, diffusion, match"),
    ],
)  # fmt: skip
def test_tasks_that_make_no_sense(overrides: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        job = load(MULTITASK, overrides)
        graph = job_graph(job)
        check_model(job, graph)
        for task, settings in job.tasks.items():
            check_agreement(job, task, build_dataset(settings.data, "train"))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(expected)


def test_a_task_that_leaves_out_the_flow_of_its_links() -> None:
    job = load(
        MULTITASK, ["tasks.match.modules=['vision', 'text', 'match']", "tasks.match.flows=['text.hidden -> match']"]
    )
    with pytest.raises(
        ValueError, match=r'match.flows: in the data, items of vision belong into .* leaves out "vision.fe'
    ):
        check_agreement(job, "match", build_dataset(job.tasks["match"].data, "train"))


def test_the_multitask_example_agrees() -> None:
    job = load(MULTITASK)
    check_model(job, job_graph(job))
    for task, settings in job.tasks.items():
        check_agreement(job, task, build_dataset(settings.data, "train"))
