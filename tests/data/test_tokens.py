"""Tokenizers: text survives the way there and back, and never turns into special ids by itself."""

import builtins
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeweaver.data.jsonl import JsonLinesDataset
from pipeweaver.data.tokens import ByteTokenizer, FileTokenizer


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and all(0 <= i < 256 for i in ids)
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.image, tokenizer.eos]) == text


@pytest.fixture
def file(tmp_path):
    """A byte-level BPE tokenizer with two merges and an end token."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"th": 256, "the": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_files_round_trip(file):
    tokenizer = FileTokenizer(file, eos="<end>")
    ids = tokenizer.encode("the end, è")
    assert ids[0] == 257 and tokenizer.decode([*ids, tokenizer.eos, tokenizer.image]) == "the end, è"
    assert (tokenizer.eos, tokenizer.image, tokenizer.bos, tokenizer.vocabulary) == (258, 259, None, 260)


def test_text_that_spells_a_special_token_stays_text(file):
    tokenizer = FileTokenizer(file, eos="<end>")
    for text in ("<image>", "<end>", "a<image>b<end>"):
        ids = tokenizer.encode(text)
        assert not {tokenizer.image, tokenizer.eos} & set(ids) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<end>the", special=True) == [258, 257]
    assert 258 not in tokenizer.encode("<end>")


def test_half_a_surrogate_pair_is_encoded(file):
    assert FileTokenizer(file, eos="<end>").encode("a\ud800") and ByteTokenizer().encode("a\ud800")


def test_special_names_come_from_the_configuration_beside(file):
    beside = file.with_name("tokenizer_config.json")
    beside.write_text(json.dumps({"eos_token": {"content": "<end>"}, "bos_token": "the"}))
    tokenizer = FileTokenizer(file)
    assert (tokenizer.eos, tokenizer.bos) == (258, 257)
    beside.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
        FileTokenizer(file)


def test_what_is_missing_is_named(file, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Set eos"):
        FileTokenizer(file)
    with pytest.raises(ValueError, match="no token '<stop>'"):
        FileTokenizer(file, eos="<stop>")
    with pytest.raises(ValueError, match=r"absent\.json: there is no such"):
        FileTokenizer(tmp_path / "absent.json", eos="<end>")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: not a tokenizer file"):
        FileTokenizer(tmp_path / "bad.json", eos="<end>")
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install pipeweaver\[tokenizers\]"):
        FileTokenizer(file, eos="<end>")


def test_a_file_tokenizer_reads_conversations(file):
    path = file.with_name("data.jsonl")
    turns = [{"role": "user", "content": "the?"}, {"role": "assistant", "content": "the!"}]
    path.write_text(json.dumps({"messages": turns}))
    tokenizer = FileTokenizer(file, eos="<end>")
    dataset = JsonLinesDataset(path, tokenizer=tokenizer, turn_start="{role}\n")
    (item,) = dataset.sample(0).items
    loaded = dataset.load(0, item, ("tokens", "labels"))
    assert loaded["labels"][loaded["labels"] >= 0].tolist() == [257, *tokenizer.encode("!"), 258]
    assert dataset.vocabulary == 260
    with pytest.raises(ValueError, match="must not contain the image token"):
        JsonLinesDataset(path, tokenizer=tokenizer, turn_start="<image>{role}")
