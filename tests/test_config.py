"""A job from a file: what is read, and that every mistake is one line with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pipeweaver.cluster import Workers
from pipeweaver.config import MODULES, Costs, Job, Policy, Run, Task, load, without_effect
from pipeweaver.data.config import DATA, DigitsData
from pipeweaver.model.graph import Flow
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.vit import VitConfig
from pipeweaver.planner.options import PolicyOptions
from pipeweaver.runtime.optimizer import OptimizerConfig

JOB = """
[run]
steps = 10
device = "cpu"

[workers]
pipeline = 2
memory = "2 GiB"

[policy]
name = "gpipe"
encoder_first = true

[model]
flows = ["vision.features -> language"]

[model.vision]
type = "vit"
layers = 2
hidden = 32
heads = 4
patch = 4
merge = 2
channels = 1
output = 64

[model.language]
type = "language"
layers = 3
hidden = 64
heads = 4
vocab = 259
placeholders = { vision = 258 }

[tasks.main]
backbone = "language"
tokens_per_microbatch = 512
microbatches = 4
loss_weights = { language = 0.5 }

[tasks.main.data]
type = "digits"

[optimizer]
lr = 0.002
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_what_a_file_becomes(path: Path) -> None:
    job = load(path)
    assert job.run.steps == 10 and job.run.seed == 0
    assert job.output == Path("runs/job")
    assert job.workers.total == 2 and job.workers.memory_bytes == 2 << 30
    assert (job.policy.name, job.policy.options) == ("gpipe", PolicyOptions(encoder_first=True))
    assert isinstance(job.modules["vision"], VitConfig) and isinstance(job.modules["language"], LanguageConfig)
    assert list(job.modules) == ["vision", "language"]
    assert job.flows == (Flow(source="vision", tensor="features", destination="language", name="vision"),)
    assert job.tasks["main"].loss_weights == {"language": 0.5}
    assert job.tasks["main"].data == DigitsData()
    assert job.tasks["main"].modules == ("vision", "language")
    assert job.optimizer.lr == 0.002


def test_a_flow_may_be_read_under_another_name(path: Path) -> None:
    assert load(path, ['model.flows=["vision.features->language.images"]']).flows[0].name == "images"


def test_output_is_where_the_user_says(path: Path) -> None:
    assert load(path, ["run.output=elsewhere/x"]).output == Path("elsewhere/x")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.stepz=10", "run.stepz = 10: unknown key; did you mean steps?"),
        ("run.steps=ten", 'run.steps = "ten": expected a whole number, not a string'),
        ("run.steps=0", "run.steps = 0: expected a whole number >= 1"),
        ("run.seed=-1", "run.seed = -1: expected a whole number >= 0"),
        ("run.watchdog_s=0", "run.watchdog_s = 0: expected a number > 0.0"),
        ("run.dtype=float16", 'run.dtype = "float16": expected one of "bfloat16", "float32", "float64"'),
        ("run.device=gpu", 'run.device = "gpu": expected one of "auto", "cpu", "cuda"'),
        ("run.tensorboard=1", "run.tensorboard = 1: expected true or false, not a whole number"),
        ("workers.pipeline=0", "workers.pipeline = 0: expected a whole number >= 1"),
        ("workers.replicas=0", "workers.replicas = 0: expected a whole number >= 1"),
        ("workers.memory=4", 'workers.memory = 4: memory "4" is not a size; write a number and a unit'),
        (
            "workers.memory='4 gigs'",
            'workers.memory = "4 gigs": memory "4 gigs" is not a size; '
            'write a number and a unit, such as "4 GiB" or "500 MB"',
        ),
        ("policy.name=pgipe", 'policy.name = "pgipe": expected one of '),
        ("policy.roundz=1", "policy.roundz = 1: unknown key; did you mean rounds?"),
        ("policy.balance=time", 'policy.balance = "time": expected one of "cost", "parameters"'),
        (
            "policy.chunks_per_worker.lang=1",
            "policy.chunks_per_worker.lang = 1: there is no module lang; [model] defines vision, language",
        ),
        ("model.flows=3", 'model.flows = 3: expected a list of flows, such as ["vision.features -> language"]'),
        (
            'model.flows=["vision -> language"]',
            'model.flows = ["vision -> language"]: expected "SOURCE.TENSOR -> DESTINATION", not \'vision -> language\'',
        ),
        (
            'model.flows=["audio.features -> language"]',
            'model.flows = ["audio.features -> language"]: there is no module audio; [model] defines vision, language',
        ),
        ("model.vision.type=vitt", 'model.vision.type = "vitt": expected one of "vit", "language"'),
        ("model.vision.layers=0", "model.vision.layers = 0: expected a whole number >= 1"),
        ("model.vision.layer=2", "model.vision.layer = 2: unknown key; did you mean layers?"),
        ("model.vision.heads=3", "model.vision.heads = 3: heads = 3 do not divide hidden = 32"),
        ("model.language.kv_heads=3", "model.language.kv_heads = 3: kv_heads = 3 do not divide heads = 4"),
        ("model.audio.layers=3", "model.audio.type: missing; it is one of "),
        (
            "tasks.main.backbone=lang",
            'tasks.main.backbone = "lang": there is no module lang; [model] defines vision, language',
        ),
        ("tasks.main.name=a", 'tasks.main.name = "a": unknown key; known here: backbone, tokens_per_microbatch'),
        (
            "tasks.main.modules=['lang']",
            'tasks.main.modules = ["lang"]: there is no module lang; [model] defines vision, language',
        ),
        (
            "tasks.main.flows=['vision -> language']",
            "tasks.main.flows = [\"vision -> language\"]: 'vision -> language' is not among model.flows",
        ),
        ("tasks.main.weight=-1", "tasks.main.weight = -1: expected a number >= 0.0"),
        ("tasks=3", "tasks = 3: expected a table, [tasks]"),
        ("wave=1", "wave = 1: unknown key; known here: run, workers, policy, model, tasks, optimizer, costs, planner"),
        ("task.backbone=language", "task: tasks have names: write [tasks.main] and [tasks.main.data], or another name"),
        ("model.vision.layers=100000", "model.vision.layers = 100000: expected a whole number <= 10000"),
        ("tasks.main.microbatches=0", "tasks.main.microbatches = 0: expected a whole number >= 1"),
        ("tasks.main.tokens_per_microbatch=0", "tasks.main.tokens_per_microbatch = 0: expected a whole number >= 1"),
        ("tasks.main.loss_weights.language=-1", "tasks.main.loss_weights.language = -1: expected a number >= 0.0"),
        (
            "tasks.main.loss_weights.lang=1",
            "tasks.main.loss_weights.lang = 1: there is no module lang; [model] defines",
        ),
        ("tasks.main.too_long=cut", 'tasks.main.too_long = "cut": expected one of "error", "skip", "truncate"'),
        ("tasks.main.data.type=digit", 'tasks.main.data.type = "digit": expected one of "digits", '),
        ("tasks.main.data.pixel=[24]", "tasks.main.data.pixel = [24]: unknown key; did you mean pixels?"),
        ("optimizer.lr=-1", "optimizer.lr = -1: it must be a number of at least 0"),
        ("optimizer.lr=inf", "optimizer.lr = Infinity: expected a finite number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas = [0.9, 1]: both must be at least 0 and below 1"),
        ("optimiser.lr=1", "optimiser: unknown key; did you mean optimizer?"),
    ],
)
def test_mistakes_are_told_in_one_line(path: Path, override: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(path, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert message.partition(": ")[2].startswith(expected) or message.startswith(f"--set {override}: {expected}")
    # The same in the file, with its line.
    key, _, value = override.partition("=")
    section, _, name = key.rpartition(".")
    if f"[{section}]" in JOB and f"\n{name} =" not in JOB and value[0] in "0123456789[-":
        path.write_text(JOB.replace(f"[{section}]\n", f"[{section}]\n{name} = {value}\n"))
        line = path.read_text().splitlines().index(f"{name} = {value}") + 1
        with pytest.raises(ValueError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}:{line}: {expected}")


SEVERAL = [
    "tasks.main.modules=['vision', 'language']",
    "tasks.text.data.type=digits",
    "tasks.text.modules=['language']",
]
TEXT = [*SEVERAL, "tasks.text.backbone=language", "tasks.text.tokens_per_microbatch=64", "tasks.text.microbatches=1"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tasks.main.modules=['vision']"], 'tasks.main.backbone = "language": the task does not activate language, only vision'),
        (SEVERAL[1:2], "tasks.main.modules: missing; where there are several tasks, each names its own of vision, language"),
        ([SEVERAL[0], "tasks.text.weight=2"], "tasks.text.data: missing; a task needs data of its own, [tasks.text.data]"),
        (SEVERAL, "tasks.text.backbone: missing; it has no default"),
        ([*TEXT, "tasks.text.microbatches=0"], "tasks.text.microbatches = 0: expected a whole number >= 1"),
        ([*TEXT, "tasks.text.backbone=vision"], 'tasks.text.backbone = "vision": the task does not activate vision, only language'),
        ([*TEXT, "tasks.text.loss_weights.vision=1"], "tasks.text.loss_weights.vision = 1: the task does not activate vision, only language"),
        ([*TEXT, "tasks.text.flows=['vision.features -> language']"], "tasks.text.flows = [\"vision.features -> language\"]: 'vision.features -> language' joins modules of which the task activates only language"),
    ],
)  # fmt: skip
def test_mistakes_in_tasks_are_told_in_one_line(path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value) and str(caught.value).partition(": ")[2].endswith(expected)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ("[{tasks=['text'], steps=0}]", "run.task_sets[0].steps = 0: expected a whole number >= 1"),
        ("[{tasks=[], steps=1}]", "run.task_sets[0].tasks = []: expected a list of length >= 1"),
        ("[{tasks=['texts'], steps=10}]", 'run.task_sets[0].tasks = ["texts"]: there is no task texts; there are main, text'),
        ("[{tasks=['text'], steps=4}, {tasks=['main'], steps=7}]", "run.steps = 10: run.task_sets have 11 steps together; leave run.steps out"),
        ("[{tasks=['text', 'text'], steps=10}]", 'run.task_sets[0].tasks = ["text", "text"]: text is named twice'),
        ("[{tasks=['text']}]", "run.task_sets[0].steps: missing; it has no default"),
    ],
)  # fmt: skip
def test_mistakes_in_task_sets_are_told_in_one_line(path: Path, sets: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(path, [*TEXT, f"run.task_sets={sets}"])
    assert str(caught.value).endswith(f": {expected}")


def test_task_sets(path: Path) -> None:
    path.write_text(JOB.replace("steps = 10\n", ""))
    job = load(path, [*TEXT, "run.task_sets=[{tasks=['text'], steps=4}, {tasks=['text'], steps=7}]"])
    assert job.run.steps == 11 and [job.task_set_at(step) for step in (0, 3, 4, 10, 11)] == [0, 0, 1, 1, 1]
    assert "tasks.main has no effect: no set of run.task_sets has it" in without_effect(job)
    assert load(path).task_set_at(99) == 0


def test_several_tasks(path: Path) -> None:
    job = load(path, [*TEXT, "tasks.text.weight=0.5"])
    assert list(job.tasks) == ["main", "text"]
    assert job.tasks["text"].modules == ("language",) and job.tasks["text"].weight == 0.5
    assert job.tasks["main"].moves(job.flows[0]) and not job.tasks["text"].moves(job.flows[0])


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            '[tasks.main.data]\ntype = "digits"\n',
            "tasks.main.data: missing; a task needs data of its own, [tasks.main.data]",
        ),
        ('[tasks.main]\nbackbone = "language"', "tasks.main.backbone: missing; it has no default"),
        ("microbatches = 4\n", "tasks.main.microbatches: missing; it has no default"),
    ],
)
def test_what_is_missing_is_named(path: Path, section: str, expected: str) -> None:
    path.write_text(JOB.replace(section, "[tasks.main]" if section.startswith("[tasks.main]") else ""))
    with pytest.raises(ValueError) as caught:
        load(path)
    assert expected in str(caught.value)


def test_a_file_without_a_model(path: Path) -> None:
    path.write_text("[run]\nsteps = 1\n")
    with pytest.raises(ValueError, match=r"job.toml: model: missing; a job needs at least one module"):
        load(path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (
            ["policy.name=dynamic"],
            ["policy.encoder_first has no effect with policy dynamic, only with gpipe or 1f1b or interleaved-1f1b"],
        ),
        (
            ["policy.items_per_part.vision=4"],
            ["policy.items_per_part has no effect with policy gpipe, only with dynamic"],
        ),
        (["policy.rounds=3"], ["policy.rounds has no effect with policy gpipe, which does not search"]),
        (["planner.seconds=3"], ["planner.seconds has no effect with policy gpipe, which does not search"]),
        (
            ["policy.name=dynamic", "policy.encoder_first=false", "policy.rounds=3", "planner.seconds=3"],
            ["planner.seconds has no effect: policy.rounds is set"],
        ),
        (["planner.processes=1000"], ["planner.processes = 1000: this machine has"]),
        (["run.evaluate_every=11"], ["run.evaluate_every = 11 is beyond the last step, 10"]),
        (
            ["workers.replicas=1000"],
            [
                "workers.replicas = 1000: a step has 4 microbatches, so 996 replicas have nothing to do",
                "workers.pin has no effect: 2000 workers of 1 threads need 2000 cores, this",
            ],
        ),
    ],
)
def test_settings_without_effect_are_told(path: Path, overrides: list[str], expected: list[str]) -> None:
    found = without_effect(load(path, overrides))
    assert len(found) == len(expected)
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True)), found


def test_every_example_is_read() -> None:
    paths = sorted(Path(__file__).parents[1].glob("examples/*.toml"))
    assert paths
    for example in paths:
        job = load(example)
        assert isinstance(job, Job)
        # On a machine with enough cores nothing in an example is without effect.
        assert not [warning for warning in without_effect(job) if "workers.pin" not in warning]


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    records: dict[str, tuple[type[msgspec.Struct], ...]] = {
        "[run]": (Run,),
        "[workers]": (Workers,),
        "[policy]": (Policy, PolicyOptions),
        **{f'type = "{name}"': (record,) for name, record in MODULES.items() if name != "custom"},
        "[tasks.NAME]": (Task,),
        **{f'type = "{name}"': (record,) for name, record in DATA.items() if name != "custom"},
        "[optimizer]": (OptimizerConfig,),
        "[costs]": (Costs,),
    }
    for title, found in records.items():
        section = page.partition(f"# {title}")[2].partition("\n#")[0]
        documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", section, flags=re.M))))
        keys = {field.encode_name for record in found for field in msgspec.structs.fields(record)}
        assert documented - {"key"} == keys - {"options", "data"}, title
