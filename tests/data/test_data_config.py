"""The data section of a config builds the data set that it describes."""

import json

import msgspec
import pytest

from pipeweaver.data.config import DATA, CustomData, DataConfig, DigitsData, JsonLinesData, build_dataset
from pipeweaver.data.digits import DigitsDataset


def read(text):
    return msgspec.toml.decode(text, type=DataConfig)


def test_digits():
    config = read('type = "digits"\nkind = "text-to-image"\nlanguage = "words"\nheld_out_records = 5')
    assert isinstance(config, DigitsData)
    train, held_out = (build_dataset(config, split, seed=3) for split in ("train", "held-out"))
    assert (train.num_records, held_out.num_records) == (None, 5)
    same = DigitsDataset(seed=3, kind="text-to-image", language="words")
    assert train.sample(4) == same.sample(4)
    assert train.image_numbers(0) != held_out.image_numbers(0)


def test_json_lines(tmp_path):
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "a.jsonl").write_text(line + "\n")
    (tmp_path / "b.jsonl").write_text(line + "\n" + line + "\n")
    config = read('type = "jsonl"\ntrain = "a.jsonl"\nheld_out = "b.jsonl"\npatch = 8\nmerge = 1')
    assert isinstance(config, JsonLinesData)
    counts = [build_dataset(config, split, folder=tmp_path).num_records for split in ("train", "held-out")]
    assert counts == [1, 2]
    without = read('type = "jsonl"\ntrain = "a.jsonl"')
    with pytest.raises(ValueError, match="no held-out samples: set held_out"):
        build_dataset(without, "held-out", folder=tmp_path)


def test_custom(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from pipeweaver.data.digits import DigitsDataset\n"
        "def build(split, seed, folder, count):\n"
        "    return DigitsDataset(split=split, seed=seed, num_records=count)\n"
        "def nothing(split, seed, folder):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = read('type = "custom"\nbuild = "mine:build"\noptions = { count = 7 }')
    assert isinstance(config, CustomData) and build_dataset(config, "train").num_records == 7
    for build, words in [
        ("mine:other", "module 'mine' has no attribute 'other'"),
        ("yours:build", "No module named 'yours'"),
        ("mine:nothing", "returned int, which has no num_records"),
        ("mine:build", "does not take the arguments that it is called with: missing a required argument: 'count'"),
        ("mine:__name__", "is no function, but a str"),
        ("mine.build", 'expected "package.module:function"'),
        ("a..b:c", 'expected "package.module:function"'),
    ]:
        with pytest.raises(ValueError, match=words):
            build_dataset(CustomData(build=build), "train")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('type = "digits"\npixel = [24]', "unknown field `pixel`"),
        ('type = "digits"\nkind = "sound"', "Invalid enum value 'sound'"),
        ('type = "digits"\npixels = [20]', r"pixels = \[20\]: each must be a multiple of patch \* merge = 8"),
        ('type = "digits"\npixels = []', r"pixels = \[\]: at least one size is needed"),
        ('type = "digits"\nheld_out_records = 0', "held_out_records = 0: must be 1 or more"),
        ('type = "jsonl"', "missing required field `train`"),
        ('type = "jsonl"\ntrain = "a"\nmax_pixels = 100', "max_pixels = 100: must be at least"),
        ('type = "jsonl"\ntrain = "a"\neos = "</s>"', "eos = </s>: names a token of a tokenizer file"),
        ('type = "custom"\nbuild = "mine"', 'build = mine: expected "package.module:function"'),
        ('type = "csv"', "Invalid value 'csv'"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(msgspec.ValidationError, match=words):
        read(text)


def test_records_convert_without_their_type_key():
    """As the reader of job files does, which looks the record up by the key itself."""
    for name, record in DATA.items():
        required = {"jsonl": {"train": "a"}, "custom": {"build": "a:b"}}.get(name, {})
        assert isinstance(msgspec.convert(required, record), record)
