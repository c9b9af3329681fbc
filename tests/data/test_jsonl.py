"""Image-text JSON lines: what is learned, what the scan costs, and what it says about hostile input."""

import json

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from pipeweaver.data.dataset import load_part
from pipeweaver.data.images import from_patches
from pipeweaver.data.jsonl import JsonLinesDataset
from pipeweaver.data.loader import Loader
from pipeweaver.data.tokens import ByteTokenizer

SMALL = {"patch": 4, "merge": 2, "min_pixels": 64, "max_pixels": 1024}


def picture(path, width=32, height=16, color=(255, 0, 0)):
    Image.new("RGB", (width, height), color).save(path)


def write(folder, *lines):
    path = folder / "data.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines) + "\n")
    return path


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def read(dataset, record, module, names):
    sample = dataset.sample(record)
    items = [item for item in sample.items if item.module == module]
    return load_part({"main": dataset}, items, {"main/0": record}, names)


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "red.png")
    picture(tmp_path / "blue.jpg", 16, 24, (0, 0, 255))
    return tmp_path


def test_only_the_assistant_is_learned(folder):
    path = write(
        folder,
        {"images": ["red.png", "blue.jpg"], "messages": turns("<image>What?", "Red.", "And <image>", "Blue.")},
    )
    dataset = JsonLinesDataset(path, **SMALL)
    sample = dataset.sample(0)
    assert [item.sizes for item in sample.items[:2]] == [
        {"tokens": 32, "features": 8, "height": 4, "width": 8},
        {"tokens": 24, "features": 6, "height": 6, "width": 4},
    ]
    assert sample.links == ((0, 2), (1, 2))
    loaded = {name: one.numpy() for name, one in read(dataset, 0, "language", ("tokens", "labels", "spans")).items()}
    image, eos = ByteTokenizer.image, ByteTokenizer.eos
    expected = [
        256,
        *b"user: ",
        *[image] * 8,
        *b"What?",
        eos,
        *b"\nassistant: Red.",
        eos,
        *b"\nuser: And ",
        *[image] * 6,
        eos,
        *b"\nassistant: Blue.",
        eos,
        *b"\n",
    ]
    assert loaded["tokens"].tolist() == expected
    learned = loaded["labels"] != -100
    assert loaded["labels"][learned].tolist() == [*b"Red.", eos, *b"Blue.", eos]
    assert loaded["spans"][learned].tolist() == [0] * 5 + [1] * 6
    assert sample.items[2].sizes == {"tokens": len(expected), "supervised": 11}


def test_the_conversations_form_reads_the_same(folder):
    other = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}]
    path = write(
        folder,
        {"images": ["red.png"], "messages": turns("<image>What?", "Red.")},
        "",
        {"image": "red.png", "conversations": other},
        {"images": None, "messages": turns("No image.", "None.")},
    )
    dataset = JsonLinesDataset(path, **SMALL)
    assert dataset.num_records == 3
    assert dataset.describe(1) == f"{path}:3 (sample 1)"
    first, second = (read(dataset, record, "language", ("tokens", "labels")) for record in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert [item.module for item in dataset.sample(2).items] == ["language"]


def test_pixels_are_resized_and_scaled(folder):
    gradient = np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None].repeat(32, axis=0).repeat(3, axis=2)
    Image.fromarray(gradient).save(folder / "gradient.png")
    path = write(folder, {"images": ["gradient.png", "blue.jpg"], "messages": turns("<image><image>", "!")})
    dataset = JsonLinesDataset(path, **SMALL)
    (item, other, _) = dataset.sample(0).items
    assert (item.sizes["height"], item.sizes["width"]) == (4, 10)  # 22.6 x 45.3 pixels, down to multiples of 8
    pixels = read(dataset, 0, "vision", ("pixels",))["pixels"].numpy()
    assert pixels.shape == (40 + other.sizes["tokens"], 48) and pixels.dtype == np.float32
    drawn = from_patches(pixels[:40], 4, 4, 10)
    assert drawn.min() >= -1 and drawn.max() <= 1
    assert np.all(np.diff(drawn[0, 5]) > 0) and np.allclose(drawn[0], drawn[0, :1], atol=1e-6)
    assert np.allclose(pixels[40:].reshape(-1, 3, 16).mean(axis=(0, 2)), [-1, -1, 1], atol=0.02)


def test_scanning_decodes_no_pixels(folder, monkeypatch):
    path = write(folder, {"images": ["red.png", "blue.jpg"], "messages": turns("<image><image>", "!")})

    def refuse(*_):
        raise AssertionError("pixels were decoded")

    for image_class in (Image.Image, PngImagePlugin.PngImageFile, Image.Image):
        monkeypatch.setattr(image_class, "load", refuse)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    dataset = JsonLinesDataset(path, **SMALL)
    loader = Loader(dataset, backbone="language", tokens_per_microbatch=100, microbatches=1, epochs=1)
    assert len(next(loader).samples[0].items) == 3
    read(dataset, 0, "language", ("tokens", "labels"))
    with pytest.raises(ValueError, match="pixels were decoded"):
        read(dataset, 0, "vision", ("pixels",))


def test_the_scan_is_kept_until_content_or_settings_change(folder, monkeypatch):
    line = {"images": ["red.png"], "messages": turns("<image>", "Red.")}
    path = write(folder, line)
    first = JsonLinesDataset(path, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(JsonLinesDataset, "_scan_file", lambda self: pytest.fail("scanned again"))
        assert JsonLinesDataset(path, **SMALL).sample(0) == first.sample(0)
    assert len(list((folder / ".pipeweaver").iterdir())) == 1
    write(folder, line, line)
    assert JsonLinesDataset(path, **SMALL).num_records == 2
    coarse = JsonLinesDataset(path, **SMALL | {"max_pixels": 128})
    assert coarse.sample(0).items[0].sizes["tokens"] < first.sample(0).items[0].sizes["tokens"]
    assert len(list((folder / ".pipeweaver").iterdir())) == 3


def test_a_damaged_scan_is_made_again(folder):
    path = write(folder, {"messages": turns("Hi.", "Ho.")})
    JsonLinesDataset(path, **SMALL)
    (kept,) = (folder / ".pipeweaver").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.warns(UserWarning, match="scanning again"):
        assert JsonLinesDataset(path, **SMALL).num_records == 1
    assert JsonLinesDataset(path, **SMALL).num_records == 1


def test_where_no_scan_can_be_kept_it_says_so(folder):
    path = write(folder, {"messages": turns("Hi.", "Ho.")})
    (folder / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot keep the scan"):
        assert JsonLinesDataset(path, cache="file", **SMALL).num_records == 1
    assert JsonLinesDataset(path, cache=None, **SMALL).num_records == 1


GOOD = {"messages": turns("Hi.", "Ho.")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\x00\x01", "not JSON"),
        ("17", "an object is expected, this is int"),
        ("{}", "neither messages nor conversations; it has no keys"),
        ({"images": ["red.png"], "text": "x"}, "neither messages nor conversations; it has images, text"),
        ({"messages": []}, "messages must be a list of turns, and not empty"),
        ({"messages": "Hi."}, "messages must be a list"),
        ({"messages": ["Hi."]}, r"messages\[0\] must be an object, this is str"),
        ({"messages": [{"content": "Hi."}]}, r"messages\[0\] has role None"),
        ({"messages": [{"role": "oracle", "content": "Hi."}]}, r"role 'oracle'; known are system"),
        ({"messages": [{"role": ["user"], "content": "Hi."}]}, r"role \['user'\]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"has content \[\{.*a string is expected"),
        ({"messages": [{"role": "user", "content": None}]}, "has content None"),
        ({"images": "red.png", "messages": turns("<image>")}, "images must be a list of paths"),
        ({"images": [3], "messages": turns("<image>")}, "images must be a list of paths"),
        ({"images": ["red.png"], "messages": turns("Hi.")}, "0 <image> placeholders in the text, but 1 images"),
        ({"images": ["red.png"], "messages": turns("<image><image>")}, "2 <image> placeholders.*1 images"),
        ({"messages": turns("<image>")}, "1 <image> placeholders.*0 images"),
        ({"images": ["gone.png"], "messages": turns("<image>")}, r"image .*gone\.png is missing"),
        ({"images": ["broken.png"], "messages": turns("<image>")}, r"image .*broken\.png cannot be read"),
        ({"images": ["empty.png"], "messages": turns("<image>")}, r"image .*empty\.png cannot be read"),
        ({"images": ["."], "messages": turns("<image>")}, "cannot be read"),
        ({"images": ["a\x00b"], "messages": turns("<image>")}, "cannot be read"),
        ({"images": ["../red.png"], "messages": turns("<image>")}, r"\.\./red\.png is outside the folder"),
        ({"images": ["/etc/hostname"], "messages": turns("<image>")}, "/etc/hostname is outside the folder"),
    ],
)
def test_hostile_lines_are_named(folder, line, words):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    (folder / "empty.png").write_bytes(b"")
    path = write(folder, GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=words) as caught:
        JsonLinesDataset(path, **SMALL)
    assert str(caught.value).startswith(f"{path}:3 (sample 1): ")
    assert "\n" not in str(caught.value)


def test_many_bad_lines_are_reported_together(folder):
    path = write(folder, *["nonsense"] * 25)
    with pytest.raises(ValueError, match="and 15 more") as caught:
        JsonLinesDataset(path, **SMALL)
    assert str(caught.value).count("not JSON") == 10


def test_files_without_samples(folder):
    with pytest.raises(ValueError, match=r"data\.jsonl: no samples"):
        JsonLinesDataset(write(folder, "", ""), **SMALL)
    with pytest.raises(ValueError, match=r"absent\.jsonl: there is no such file"):
        JsonLinesDataset(folder / "absent.jsonl", **SMALL)


@pytest.mark.parametrize("name", ["red.png", "blue.jpg"])
def test_corrupt_pixels_are_named_when_loaded(folder, name):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / name)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    path = write(folder, GOOD, {"images": [name], "messages": turns("<image>", "?")})
    dataset = JsonLinesDataset(path, **SMALL)
    with pytest.raises(ValueError, match=rf"data\.jsonl:2 \(sample 1\): image .*{name} is corrupt"):
        read(dataset, 1, "vision", ("pixels",))


def test_images_that_changed_after_the_scan_are_named(folder):
    path = write(folder, {"images": ["red.png"], "messages": turns("<image>", "?")})
    dataset = JsonLinesDataset(path, **SMALL)
    picture(folder / "red.png", 64, 64)
    with pytest.raises(ValueError, match=r"data\.jsonl:1 .*red\.png has another size"):
        read(dataset, 0, "vision", ("pixels",))
    (folder / "red.png").unlink()
    with pytest.raises(ValueError, match=r"data\.jsonl:1 .*red\.png is missing"):
        read(dataset, 0, "vision", ("pixels",))


def test_images_may_lie_in_another_folder(folder, tmp_path_factory):
    lines = tmp_path_factory.mktemp("lines")
    path = write(lines, {"images": ["red.png"], "messages": turns("<image>", "?")})
    assert JsonLinesDataset(path, images=folder, **SMALL).sample(0).items[0].sizes["tokens"] == 32


@pytest.mark.filterwarnings("ignore:1 of 2 samples left out")
def test_too_long_samples_are_found_by_the_scan(folder):
    many = {"images": ["red.png"] * 5, "messages": turns("<image>" * 5, "five")}
    path = write(folder, GOOD, many)
    dataset = JsonLinesDataset(path, **SMALL)
    options = {"backbone": "language", "tokens_per_microbatch": 40, "microbatches": 1, "shuffle": False, "epochs": 1}
    with pytest.raises(ValueError, match=r"data\.jsonl:2 \(sample 1\) has \d+ language tokens, more than the 40"):
        Loader(dataset, **options)
    with pytest.warns(UserWarning, match="1 of 2 samples truncated") as caught:
        loader = Loader(dataset, too_long="truncate", **options)
    # What is left of the long one, images alone, has nothing to learn.
    assert any("1 of 2 samples left out" in str(one.message) for one in caught)
    assert [sample.record for batch in loader for sample in batch.samples] == [0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_pixels": 63}, "max_pixels = 63"),
        ({"min_pixels": 5000}, "at least min_pixels"),
        ({"patch": 0}, "patch = 0"),
        ({"mean": (0.5,)}, "three values, for red"),
        ({"std": (1.0, 0.0, 1.0)}, "three values above 0"),
    ],
)
def test_impossible_settings_are_named(folder, settings, words):
    with pytest.raises(ValueError, match=words):
        JsonLinesDataset(write(folder, GOOD), **SMALL | settings)
