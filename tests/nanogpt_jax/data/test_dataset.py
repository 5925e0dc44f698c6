import json

import numpy as np
import pytest

from nanogpt_jax.data.batches import Batches
from nanogpt_jax.data.corpus import read_plays
from nanogpt_jax.data.dataset import check_fingerprint, load
from nanogpt_jax.data.prepare import prepare
from nanogpt_jax.data.shards import write_shard
from nanogpt_jax.data.tokenizers import ByteTokenizer, CharTokenizer
from tests.nanogpt_jax.data.support import needs_gpt2, needs_plays, without_packages


def test_the_sample_needs_no_package(monkeypatch):
    without_packages(monkeypatch)
    data = load("sample")
    assert isinstance(data.tokenizer, CharTokenizer)
    assert data.train_tokens.dtype == data.val_tokens.dtype == np.uint16
    assert data.tokenizer.decode(data.train_tokens[:13]) == "THE FLOOR AND"
    assert data.train_documents == [("sample", 0)]


@needs_plays
def test_shakespeare_by_characters():
    data = load("shakespeare", "char")
    assert (len(data.train_tokens), len(data.val_tokens)) == (4_488_931, 498_762)
    assert data.tokenizer.vocab_size == 80
    texts = {play.name: play.text for play in read_plays()}
    for tokens, documents in (
        (data.train_tokens, data.train_documents),
        (data.val_tokens, data.val_documents),
    ):
        ends = [first for _, first in documents[1:]] + [len(tokens)]
        for (name, first), end in zip(documents, ends, strict=True):
            assert data.tokenizer.decode(tokens[first:end]) == texts[name], name
    position = Batches(data.train_tokens, 4, 64, documents=data.train_documents).positions(9)[2]
    assert position.document in dict(data.train_documents)


@needs_gpt2
def test_gpt2_documents_start_with_end_of_text(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("Hello world")
    data = load(tmp_path, "gpt2", 0.25)
    assert data.train_tokens.tolist() == [50256, 15496, 995] * 3
    assert data.val_tokens.tolist() == [50256, 15496, 995]
    assert data.train_documents == [("0.txt", 0), ("1.txt", 3), ("2.txt", 6)]


@pytest.mark.parametrize("tokenizer", ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)])
def test_shards_read_as_the_text_they_come_from(tmp_path, tokenizer):
    prepare("sample", tokenizer, tmp_path / "out", shard_tokens=1000)
    text, shards = load("sample", tokenizer), load(tmp_path / "out")
    assert shards.tokenizer == text.tokenizer
    assert shards.fingerprint == text.fingerprint
    assert shards.train_documents == text.train_documents
    np.testing.assert_array_equal(shards.train_tokens[:], text.train_tokens)
    np.testing.assert_array_equal(shards.val_tokens[:], text.val_tokens)


@pytest.fixture
def prepared(tmp_path):
    prepare("sample", "byte", tmp_path / "out", shard_tokens=4000)
    return tmp_path / "out"


def test_another_tokenizer_than_that_of_the_shards(prepared):
    with pytest.raises(ValueError, match=r"tokenizer: got 'char', but .* with 'byte'; use "):
        load(prepared, "char")


def test_a_changed_token_is_refused(prepared):
    shard = prepared / "train_000001.bin"
    raw = bytearray(shard.read_bytes())
    raw[1024] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match=r"not those of the .*manifest\.json: train_sha256: "):
        load(prepared)


def test_a_changed_tokenizer_is_refused(prepared):
    (prepared / "tokenizer.json").write_text(CharTokenizer("".join(map(chr, range(256)))).to_json())
    with pytest.raises(ValueError, match=r"tokenizer: byte in the .*, char now; tokenizer_sha256"):
        load(prepared)


@pytest.mark.parametrize("name", ["train_000000.bin", "tokenizer.json"])
def test_a_missing_file_is_named(prepared, name):
    (prepared / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        load(prepared)


def test_an_unfinished_folder_is_refused(prepared):
    (prepared / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json: its preparation was interrupted"):
        load(prepared)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"train": {"shards": []}}'])
def test_a_broken_manifest_is_refused(prepared, text):
    (prepared / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json: is not a manifest of"):
        load(prepared)


def test_a_manifest_of_other_counts_is_refused(prepared):
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["fingerprint"]["val_tokens"] += 1
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="val_tokens: "):
        load(prepared)


@needs_gpt2
def test_a_folder_of_modded_nanogpt(tmp_path):
    write_shard(tmp_path / "fineweb_train_000002.bin", np.array([4, 50256], np.uint16))
    write_shard(tmp_path / "fineweb_train_000001.bin", np.array([1, 2, 3], np.uint16))
    write_shard(tmp_path / "fineweb_val_000000.bin", np.array([9, 9], np.uint16))
    data = load(tmp_path)
    assert data.tokenizer.name == "gpt2"
    assert data.train_tokens[:].tolist() == [1, 2, 3, 4, 50256]
    assert data.val_tokens[:].tolist() == [9, 9]
    assert data.train_documents == [
        ("fineweb_train_000001.bin", 0),
        ("fineweb_train_000002.bin", 3),
    ]
    (tmp_path / "fineweb_val_000000.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"\*val\*\.bin: no such shard"):
        load(tmp_path)
    write_shard(tmp_path / "fineweb_val_000000.bin", np.array([9, 50257], np.uint16))
    with pytest.raises(ValueError, match=r"val_000000\.bin: token 1 \(byte 1026\) is 50257"):
        load(tmp_path)


def test_a_name_is_not_looked_up_as_a_folder(tmp_path, monkeypatch):
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample/train.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert load("sample").train_documents == [("sample", 0)]


def test_typos():
    with pytest.raises(ValueError, match=r"Did you mean 'char'"):
        load("sample", "chars")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'sample'"):
        load("smaple", "char")


def test_a_fingerprint_names_every_field_that_differs():
    a = load("sample", "char").fingerprint
    check_fingerprint(a, dict(a))
    with pytest.raises(ValueError, match=r"tokenizer: char in the checkpoint, byte now") as caught:
        check_fingerprint(a, load("sample", "byte").fingerprint)
    assert "vocab_size: 55 in the checkpoint, 256 now" in str(caught.value)
    assert "train_tokens" not in str(caught.value)
    with pytest.raises(ValueError, match=r"train_tokens: .*val_sha256: .*Set data\.corpus"):
        check_fingerprint(a, load("sample", "char", 0.3).fingerprint)


def test_the_fingerprint_is_of_tokens_and_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("ab\n\nab")
    (tmp_path / "b.txt").write_text("ac\n\nac")
    a, b = (load(tmp_path / name, "char", 0.4).fingerprint for name in ("a.txt", "b.txt"))
    assert a["train_sha256"] == b["train_sha256"]
    assert [f for f in a if a[f] != b[f]] == ["tokenizer_sha256"]
    assert ByteTokenizer().to_json() in {load(tmp_path / "a.txt", "byte", 0.4).tokenizer.to_json()}
