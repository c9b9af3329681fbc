"""Packing and the loader: no sample lost or repeated, positions restored exactly, nothing that cannot fit."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import DigitsDataset
from pipeweaver.data.items import Item, Sample
from pipeweaver.data.loader import Cursor, Loader
from pipeweaver.data.packing import Packing, pack

IMAGE = 7
"""The placeholder of the invented data sets below; other tokens are 0..5."""


class Invented:
    """One text per record: a list of image sizes (features) and plain tokens, None for a plain token."""

    def __init__(self, records, learned=True):
        self.records, self.learned = records, learned
        self.vocabulary, self.placeholders, self.widths = 8, {"vision": IMAGE}, {"pixels": 1}

    @property
    def num_records(self):
        return len(self.records)

    def describe(self, record):
        return f"record {record}"

    def _tokens(self, record):
        rows = [[IMAGE] * one if one else [position % 6] for position, one in enumerate(self.records[record])]
        return np.array([token for row in rows for token in row], dtype=np.int64)

    def _labels(self, record):
        after = np.append(self._tokens(record)[1:], IMAGE)
        return np.where((after == IMAGE) | (not self.learned), -100, after)

    def sample(self, record, *, task="main", draw=0):
        images = [one for one in self.records[record] if one]
        items = [
            Item(task=task, draw=draw, module="vision", position=i, sizes={"tokens": 4 * one, "features": one})
            for i, one in enumerate(images)
        ]
        labels = self._labels(record)
        sizes = {"tokens": len(labels), "supervised": int(np.count_nonzero(labels != -100))}
        items.append(Item(task=task, draw=draw, module="language", position=0, sizes=sizes))
        links = tuple((i, len(images)) for i in range(len(images)))
        return Sample(task=task, draw=draw, record=record, items=tuple(items), links=links)

    def load(self, record, item, names):
        if item.module == "vision":
            return {"pixels": np.full((item.sizes["tokens"], 1), item.position, dtype=np.float32)}
        labels = self._labels(record)
        return {"tokens": self._tokens(record), "labels": labels, "spans": np.where(labels == -100, -1, 0)}


def text(*lengths):
    return Invented([[None] * length for length in lengths])


def loader(dataset, tokens=10, microbatches=2, **options):
    return Loader(dataset, backbone="language", tokens_per_microbatch=tokens, microbatches=microbatches, **options)


def lengths(batch):
    return [[batch.samples[i].items[-1].sizes["tokens"] for i in members] for members in batch.microbatches]


def test_first_fit_as_in_the_docstring():
    batches = list(loader(text(6, 5, 3, 4, 2, 7), shuffle=False, epochs=1))
    assert [lengths(batch) for batch in batches] == [[[6, 3], [5, 4]], [[2, 7]]]
    assert [batch.step for batch in batches] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 10), min_size=1, max_size=40),
    microbatches=st.integers(1, 4),
    seed=st.integers(0, 100),
    epochs=st.integers(1, 3),
)
def test_every_sample_once_per_epoch_and_budgets_kept(sizes, microbatches, seed, epochs):
    batches = list(loader(text(*sizes), microbatches=microbatches, seed=seed, epochs=epochs))
    samples = [sample for batch in batches for sample in batch.samples]
    assert [sample.draw for sample in samples] == list(range(epochs * len(sizes)))
    for epoch in range(epochs):
        shown = samples[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(sample.record for sample in shown) == list(range(len(sizes)))
    for batch in batches:
        assert sorted(i for members in batch.microbatches for i in members) == list(range(len(batch.samples)))
        assert all(0 < sum(members) <= 10 for members in lengths(batch))
        assert all(batch.microbatches)
    for batch, behind in pairwise(batches):
        assert len(batch.microbatches) == microbatches
        opener = behind.samples[0].items[-1].sizes["tokens"]
        assert all(sum(members) + opener > 10 for members in lengths(batch))


def test_epochs_are_shuffled_differently_and_by_seed():
    def order(seed):
        return [s.record for batch in loader(text(*[5] * 30), seed=seed, epochs=2) for s in batch.samples]

    assert order(0) == order(0) != order(1)
    assert order(0)[:30] != order(0)[30:] and order(0)[:30] != list(range(30))


@pytest.mark.parametrize("dataset", [text(*range(2, 11)), DigitsDataset()], ids=["finite", "endless"])
def test_restored_loaders_go_on_exactly(dataset):
    def fresh():
        return loader(dataset, tokens=512 if dataset.num_records is None else 10, seed=4)

    whole = list(islice(fresh(), 9))
    for stop in (0, 1, 5):
        first = fresh()
        taken = list(islice(first, stop))
        first.peek(3)
        again = fresh()
        again.peek(1)
        again.restore(first.cursor)
        assert taken + list(islice(again, 9 - stop)) == whole


def test_peeking_changes_nothing():
    watched, other = loader(text(*range(2, 11))), loader(text(*range(2, 11)))
    ahead = [watched.peek(i) for i in (3, 0, 2, 1)]
    assert watched.cursor == other.cursor
    taken = list(islice(watched, 4))
    assert taken == list(islice(other, 4)) == [ahead[1], ahead[3], ahead[2], ahead[0]]


def test_peeking_behind_the_end_is_none():
    short = loader(text(5), epochs=1)
    assert short.peek(0) is not None and short.peek(1) is None
    next(short)
    assert short.peek() is None
    with pytest.raises(StopIteration):
        next(short)


def test_a_position_of_other_data_is_refused():
    with pytest.raises(ValueError, match="3 samples, this run has seed 0 and 2 samples"):
        loader(text(4, 5)).restore(Cursor(num_records=3))


def test_max_items_limits_a_microbatch():
    dataset = Invented([[1, None, 1, None], [1, None], [None, None]])
    batches = list(loader(dataset, max_items={"vision": 2}, shuffle=False, epochs=1))
    assert batches[0].microbatches == ((0, 2), (1,))


def test_pack_takes_one_more_sample_than_fits():
    source = iter([text(*[6] * 5).sample(record) for record in range(5)])
    samples, microbatches = pack(source, Packing(backbone="language", tokens=10, microbatches=2))
    assert (len(samples), microbatches, len(list(source))) == (2, ((0,), (1,)), 2)


# What does not fit.


def test_too_long_is_an_error_with_numbers_and_ways_out():
    with pytest.raises(ValueError, match=r"record 1 has 12 language tokens, more than the 10 .*2 of 3.*skip"):
        loader(text(5, 12, 11))


def test_too_long_can_be_skipped_with_a_count():
    with pytest.warns(UserWarning, match="2 of 3 samples skipped"):
        short = loader(text(5, 12, 11), too_long="skip", epochs=1)
    assert short.fitted.num_skipped == 2
    assert [sample.record for batch in short for sample in batch.samples] == [0]
    with pytest.raises(ValueError, match="2 of 2 samples do not fit"):
        loader(text(12, 11), too_long="skip")


ROWS = st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=1, max_size=12)


@pytest.mark.filterwarnings("ignore:.*samples")
@settings(max_examples=150, deadline=None)
@given(records=st.lists(ROWS, min_size=1, max_size=6), most=st.integers(1, 4))
def test_truncated_samples_are_consistent(records, most):
    dataset = Invented([[None, None, *rows] for rows in records])
    cut = loader(dataset, max_items={"vision": most}, too_long="truncate", shuffle=False, epochs=1)
    for sample in [sample for batch in cut for sample in batch.samples]:
        *images, item = sample.items
        number = {f"main/{sample.draw}": sample.record}
        loaded = load_part({"main": dataset}, [item], number, ("tokens", "labels"))
        tokens, labels = loaded["tokens"].numpy(), loaded["labels"].numpy()
        whole = dataset._tokens(sample.record)
        assert len(tokens) == item.sizes["tokens"] <= 10
        assert np.array_equal(tokens, whole[: len(tokens)])
        assert np.count_nonzero(tokens == IMAGE) == sum(image.sizes["features"] for image in images)
        assert len(images) <= most
        assert sample.links == tuple((i, len(images)) for i in range(len(images)))
        assert np.count_nonzero(labels != -100) == item.sizes["supervised"] > 0
        assert labels[-1] == -100
        if images:
            pixels = load_part({"main": dataset}, images, number, ("pixels",))["pixels"]
            assert len(pixels) == sum(image.sizes["tokens"] for image in images)
        # Nothing was cut away without need: the next row, or the next whole image, would not have fitted.
        if len(tokens) < len(whole):
            rest = [one for one in dataset.records[sample.record] if one][len(images) :]
            needed = rest[0] if whole[len(tokens)] == IMAGE else 1
            assert len(tokens) + needed > 10 or (whole[len(tokens)] == IMAGE and len(images) == most)


def test_too_many_images_alone_are_too_long_as_well():
    dataset = Invented([[None, 1, None, 1, None, 1, None]])
    with pytest.raises(ValueError, match="3 vision items, more than the 2 allowed"):
        loader(dataset, max_items={"vision": 2})


def test_endless_data_is_judged_by_its_bound():
    with pytest.raises(ValueError, match="can have 512 language tokens, more than the 256"):
        loader(DigitsDataset(), tokens=256)
    with pytest.raises(ValueError, match="16 vision items, more than the 4"):
        loader(DigitsDataset(), tokens=512, max_items={"vision": 4})
    batch = next(loader(DigitsDataset(), tokens=128, too_long="truncate"))
    assert all(sample.items[-1].sizes["tokens"] <= 128 for sample in batch.samples)
    with pytest.raises(ValueError, match="endless"):
        loader(DigitsDataset(), tokens=512, epochs=1)


def test_truncated_digits_load_with_whole_images():
    dataset = DigitsDataset()
    for batch in islice(loader(dataset, tokens=100, too_long="truncate"), 10):
        items = [item for sample in batch.samples for item in sample.items]
        records = {f"main/{sample.draw}": sample.record for sample in batch.samples}
        language = [item for item in items if item.module == "language"]
        loaded = load_part({"main": dataset}, language, records, ("tokens", "labels", "spans"))
        placeholders = int((loaded["tokens"] == 258).sum())
        assert placeholders == sum(item.sizes["features"] for item in items if item.module == "vision")
        assert int((loaded["labels"] != -100).sum()) == sum(item.sizes["supervised"] for item in language)
        assert bool((loaded["labels"][loaded["spans"] >= 0] >= 0).all())


# Data that cannot be learned from.


def test_no_samples_no_supervision_no_backbone():
    with pytest.raises(ValueError, match="no samples"):
        loader(Invented([]))
    with pytest.raises(ValueError, match="none of the 2 samples has supervised tokens"):
        loader(Invented([[None] * 3, [None] * 4], learned=False))
    with pytest.raises(ValueError, match=r"no item of module speech.*items of language"):
        Loader(text(3), backbone="speech", tokens_per_microbatch=10, microbatches=1)
    with pytest.raises(ValueError, match="no items of module speech"):
        Loader(DigitsDataset(), backbone="speech", tokens_per_microbatch=512, microbatches=1)
    with pytest.raises(ValueError, match="microbatches is 0"):
        loader(text(3), microbatches=0)


def test_samples_without_supervision_are_left_out_with_a_count():
    with pytest.warns(UserWarning, match="1 of 2 samples left out"):
        found = loader(Invented([[None], [None, None]]), epochs=1)
    assert [sample.record for batch in found for sample in batch.samples] == [1]


def test_content_that_contradicts_the_metadata_is_named():
    dataset = Invented([[None, 2, None, None]])
    sample = dataset.sample(0)
    records = {"main/0": 0}
    dataset.records[0] = [None, 2, None]
    with pytest.raises(ValueError, match=r"record 0.*main/0/language/0: tokens has 4 rows.*announced 5"):
        load_part({"main": dataset}, sample.items[-1:], records, ("tokens",))
    dataset.records[0] = [None, 2, None, None]
    dataset._tokens = lambda record: np.array([0, 7, 1, 2, 3])
    with pytest.raises(ValueError, match=r"1 placeholders of vision.*2 feature rows"):
        load_part({"main": dataset}, sample.items[-1:], records, ("tokens",))
    with pytest.raises(ValueError, match="loads no 'depth' for module vision"):
        load_part({"main": dataset}, sample.items[:1], records, ("depth",))
