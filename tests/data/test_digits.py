"""The built-in documents: what they are made of, and that content and metadata agree."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeweaver.data.dataset import load_part
from pipeweaver.data.digits import NAMES, DigitsDataset, _digits
from pipeweaver.data.images import from_patches
from pipeweaver.data.tokens import ByteTokenizer

TEXT = ("tokens", "labels", "spans")


def content(dataset, record):
    sample = dataset.sample(record)
    item = next(item for item in sample.items if item.module == "language")
    loaded = load_part({"main": dataset}, [item], {"main/0": record}, TEXT)
    return sample, item, {name: tensor.numpy() for name, tensor in loaded.items()}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), record=st.integers(0, 10**6), supervise=st.sampled_from(["text", "names"]))
def test_placeholders_equal_features_and_carry_no_loss(seed, record, supervise):
    dataset = DigitsDataset(seed=seed, supervise=supervise)
    sample, item, loaded = content(dataset, record)
    features = sum(one.sizes.get("features", 0) for one in sample.items)
    assert np.count_nonzero(loaded["tokens"] == ByteTokenizer.image) == features
    assert not np.any(loaded["labels"] == ByteTokenizer.image)
    learned = loaded["labels"] != -100
    assert np.count_nonzero(learned) == item.sizes["supervised"]
    assert not learned[-1]
    after = np.append(loaded["tokens"][1:], -1)
    assert np.array_equal(loaded["labels"][learned], after[learned])
    if supervise == "text":
        assert np.array_equal(learned[:-1], after[:-1] != ByteTokenizer.image)
    else:
        assert np.array_equal(learned, loaded["spans"] >= 0)


def test_spans_spell_the_names_of_the_images_shown():
    dataset = DigitsDataset(seed=3)
    seen = 0
    for record in range(30):
        _, _, loaded = content(dataset, record)
        for span, image in enumerate(dataset.image_numbers(record)):
            name = bytes(loaded["labels"][loaded["spans"] == span].astype(np.uint8)).decode()
            assert name == NAMES[_digits()[1][image]]
            seen += 1
        assert loaded["spans"].max() == len(dataset.image_numbers(record)) - 1
    assert seen > 50


def test_no_image_is_both_learned_and_held_out():
    train, held_out = DigitsDataset(seed=1), DigitsDataset(seed=1, split="held-out")
    shown = [{image for record in range(3000) for image in one.image_numbers(record)} for one in (train, held_out)]
    assert not shown[0] & shown[1]
    assert 1400 < len(shown[0]) <= 1797 - 359 and len(shown[1]) == 359


def test_numbers_of_images_follow_the_stated_distribution():
    dataset = DigitsDataset()
    counts = Counter(len(dataset.image_numbers(record)) for record in range(8000))
    probability = 1 / 4.5
    expected = {0: 0.25} | {k: 0.75 * probability * (1 - probability) ** (k - 1) for k in range(1, 16)}
    expected[16] = 1 - sum(expected.values())
    for k, share in expected.items():
        assert abs(counts[k] / 8000 - share) < 4 * (share / 8000) ** 0.5, k
    assert max(counts) == 16


def test_images_are_drawn_at_each_size_with_their_own_content():
    dataset = DigitsDataset(seed=5)
    sides = Counter()
    for record in range(40):
        sample = dataset.sample(record)
        for item, image in zip(sample.items, dataset.image_numbers(record), strict=False):
            loaded = load_part({"main": dataset}, [item], {"main/0": record}, ("pixels",))["pixels"]
            height, width = item.sizes["height"], item.sizes["width"]
            assert loaded.shape == (height * width, 16) and item.sizes["features"] * 4 == height * width
            drawn = from_patches(loaded.numpy(), 4, height, width)[0]
            step = drawn.shape[0] // 8
            means = drawn.reshape(8, step, 8, step).mean(axis=(1, 3))
            assert np.corrcoef(means.ravel(), _digits()[0][image].ravel())[0, 1] > 0.9
            sides[height * 4] += 1
    assert set(sides) == {24, 32, 40}


def test_a_record_is_a_pure_function_of_seed_and_number():
    first, second, other = DigitsDataset(seed=7), DigitsDataset(seed=7), DigitsDataset(seed=8)
    assert [first.sample(r) for r in (5, 1, 900)] == [second.sample(r) for r in (5, 1, 900)]
    assert [first.image_numbers(r) for r in range(50)] != [other.image_numbers(r) for r in range(50)]


@pytest.mark.parametrize("max_tokens", [37, 60, 512])
def test_no_document_is_longer_than_its_bound(max_tokens):
    dataset = DigitsDataset(max_tokens=max_tokens)
    lengths = [dataset.sample(record).items[-1].sizes["tokens"] for record in range(500)]
    assert max(lengths) <= max_tokens and dataset.bound("language").tokens == max_tokens


def test_sixteen_of_the_largest_images_fit_into_512_tokens():
    dataset = DigitsDataset(pixels=(40,))
    assert max(len(dataset.image_numbers(record)) for record in range(1000)) == 16


def test_text_only_has_no_vision_items():
    dataset = DigitsDataset(kind="text")
    assert all([item.module for item in dataset.sample(record).items] == ["language"] for record in range(50))


def test_text_to_image_links_the_caption_to_the_latents():
    dataset = DigitsDataset(kind="text-to-image", language="words", diffusion="painter")
    for record in range(20):
        sample = dataset.sample(record)
        caption, image = sample.items
        assert (caption.module, image.module, sample.links) == ("words", "painter", ((0, 1),))
        loaded = load_part({"main": dataset}, [image], {"main/0": record}, ("latents",))["latents"]
        assert loaded.numel() == image.sizes["elements"] and loaded.shape == (image.sizes["tokens"], 16)
        text = load_part({"main": dataset}, [caption], {"main/0": record}, ("tokens",))["tokens"]
        (number,) = dataset.image_numbers(record)
        assert NAMES[_digits()[1][number]] in ByteTokenizer().decode(text.tolist())


def test_modules_can_have_other_names():
    dataset = DigitsDataset(vision="eye", language="mouth")
    sample = next(s for s in map(dataset.sample, range(50)) if len(s.items) > 2)
    assert {item.module for item in sample.items} == {"eye", "mouth"} and dataset.placeholders == {"eye": 258}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pixels": (20,)}, "multiple of patch"),
        ({"pixels": ()}, "at least one size is needed"),
        ({"max_tokens": 20}, "max_tokens = 20: must be at least 33, what one record can need"),
        ({"max_images": 0}, "max_images = 0"),
        ({"num_records": 0}, "num_records = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"patch": 0}, "patch = 0"),
        ({"kind": "text-to-image", "max_tokens": 15}, "must be at least 16, what one record can need"),
        ({"split": "test"}, "no split 'test'"),
        ({"kind": "text", "supervise": "names"}, "without any loss"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        DigitsDataset(**settings)


def test_pairs_are_an_image_its_caption_and_their_class():
    dataset = DigitsDataset(kind="pairs", seed=2)
    seen = {}
    for record in range(200):
        sample = dataset.sample(record)
        assert [item.module for item in sample.items] == ["vision", "text", "match"] and sample.links == (
            (0, 2),
            (1, 2),
        )
        image, text, pair = (
            load_part({"main": dataset}, [item], {"main/0": record}, [name])[name].numpy()
            for item, name in zip(sample.items, ("pixels", "tokens", "classes"), strict=True)
        )
        assert image.shape == (sample.items[0].sizes["tokens"], 16) and pair.shape == (1,)
        caption = bytes(text[1:-1].astype(np.uint8)).decode()
        (number,) = dataset.image_numbers(record)
        assert NAMES[_digits()[1][number]] in caption
        assert seen.setdefault(int(pair[0]), caption) == caption, "one class, one caption"
    assert len(set(seen.values())) == len(seen) > 20
