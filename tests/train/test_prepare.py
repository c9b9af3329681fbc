"""Sample batches: the first ones of the run, and whatever follows has items of the modules that they lack. And the
batches of steps, where task sets follow one another."""

import pytest

from pipeweaver.config import load
from pipeweaver.data.dataset import Bound
from pipeweaver.data.items import Item, Sample
from pipeweaver.data.loader import Loader
from pipeweaver.runtime import prepare
from pipeweaver.runtime.prepare import SAMPLE_BATCHES, SAMPLE_DRAWS, sample_batches
from tests.train.test_tasks import JOB


class Texts:
    """Texts of four tokens; only `pictured` records have an image."""

    vocabulary, placeholders, widths = 8, {}, {}

    def __init__(self, num_records, pictured):
        self.num_records, self.pictured = num_records, pictured

    def describe(self, record):
        return f"record {record}"

    def bound(self, module):
        return Bound(tokens=4, items=1)

    def sample(self, record, *, task="main", draw=0):
        sizes = {"tokens": 4, "supervised": 4, "features": 4}
        modules = ["vision", "language"] if record in self.pictured else ["language"]
        items = tuple(Item(task=task, draw=draw, module=module, position=0, sizes=sizes) for module in modules)
        return Sample(task=task, draw=draw, record=record, items=items, links=((0, 1),) * (len(items) - 1))


def loader(num_records, *pictured, shuffle=False):
    data = Texts(num_records, pictured)
    return Loader(data, backbone="language", tokens_per_microbatch=4, microbatches=2, shuffle=shuffle)


def images(batches):
    return [sum(item.module == "vision" for sample in batch.samples for item in sample.items) for batch in batches]


def test_the_first_batches_suffice_if_they_have_items_of_all_modules():
    found = sample_batches(loader(None, 3), ("vision", "language"))
    assert [batch.step for batch in found] == list(range(SAMPLE_BATCHES))


@pytest.mark.parametrize("num_records", [None, 500])
def test_the_first_batch_with_items_of_a_missing_module_comes_after_the_first_batches(num_records):
    batches = loader(num_records, 301)
    found = sample_batches(batches, ("vision", "language"))
    assert [batch.step for batch in found] == [*range(SAMPLE_BATCHES), 150]
    assert images(found) == [0] * SAMPLE_BATCHES + [1]
    assert batches.cursor.step == 0 and batches.peek().step == 0  # the run begins where it would have


def test_an_epoch_is_looked_through_to_its_end_whatever_its_order():
    assert images(sample_batches(loader(100, 40, shuffle=True), ("vision", "language")))[-1] == 1


@pytest.mark.parametrize(("num_records", "draws"), [(None, SAMPLE_DRAWS), (100, 100)])
def test_a_module_that_no_sample_has_an_item_for_is_told(num_records, draws):
    with pytest.raises(ValueError, match=rf"model.vision: none of {draws} samples has an item for it"):
        sample_batches(loader(num_records), ("vision", "language"))


@pytest.fixture
def job_of_sets(tmp_path):
    """Tasks caption and text for two steps, match and text for two, then paint, caption and match for one."""
    (tmp_path / "job.toml").write_text(JOB)
    return load(tmp_path / "job.toml")


def job_loaders(job):
    return prepare.job_loaders(job, prepare.job_datasets(job)["train"])


def test_the_batch_of_a_step_is_that_of_its_tasks_where_their_data_stand(job_of_sets):
    fresh = job_loaders(job_of_sets)
    for steps, drawn in (
        (range(1, 2), {"caption": 1, "text": 1}),
        (range(2, 3), {"match": 0, "text": 2}),
        (range(4, 5), {"paint": 0, "caption": 2, "match": 2}),
    ):
        (batch,) = prepare.step_batches(job_of_sets, job_loaders(job_of_sets), steps)
        assert batch.step == steps.start
        assert set(prepare.task_set_of(job_of_sets, steps).tasks) == set(drawn)
        expected = [fresh[task].peek(number) for task, number in drawn.items()]
        assert [s.items for s in batch.samples] == [s.items for one in expected for s in one.samples]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (range(5, 6), "there is no step 5: run.steps = 5, and steps count from 0"),
        (range(1, 3), "steps 1 and 2 belong to different sets of run.task_sets"),
    ],
)
def test_steps_that_no_task_set_has(job_of_sets, steps, words):
    with pytest.raises(ValueError, match=words):
        prepare.task_set_of(job_of_sets, steps)
