"""What training reads: two sequences of tokens, their tokenizer, and a fingerprint of it all."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanogpt_jax.data.batches import Documents, Tokens
from nanogpt_jax.data.corpus import CORPORA, Corpus, Document, load_corpus
from nanogpt_jax.data.names import check_name
from nanogpt_jax.data.shards import Shards, find_shards, sha256_of_tokens
from nanogpt_jax.data.tokenizers import TOKENIZERS, Tokenizer, from_json, make_tokenizer

TOKENIZER_FILE = "tokenizer.json"
MANIFEST_FILE = "manifest.json"
DEFAULT_TOKENIZER = "char"


@dataclass(frozen=True)
class Dataset:
    """Training and validation tokens, uint16 `[N]` each (an array, or `Shards` on disk).

    fingerprint: what a checkpoint stores, and `check_fingerprint` compares.
    train_documents, val_documents: name and first token of each, for `Batches.positions`.
    """

    train_tokens: Tokens
    val_tokens: Tokens
    tokenizer: Tokenizer
    train_documents: Documents
    val_documents: Documents
    fingerprint: dict[str, str | int]


def load(corpus: str | Path, tokenizer: str | None = None, val_fraction: float = 0.1) -> Dataset:
    """Reads a corpus, in memory, or a folder of shards, mapped.

    corpus: 'shakespeare', 'sample', a .txt or .md file or a folder of them (see `load_corpus`);
        or a folder of .bin shards, as `prepare` writes it or with modded-nanogpt's `*train*.bin`
        and `*val*.bin`, which hold GPT-2 tokens. The two names come first: a folder of yours
        called sample is './sample'.
    tokenizer: 'char', 'byte' or 'gpt2'. None takes that of the shards, or 'char' for text.
    val_fraction: how to split a text. Shards come split, and do not look at it.

    Raises ValueError, FileNotFoundError or ModuleNotFoundError, whose text says what to do. A
    tokenizer that is not that of the shards is a ValueError: they cannot be encoded again.
    """
    if tokenizer is not None:
        check_name("tokenizer", tokenizer, TOKENIZERS)
    if corpus not in CORPORA and is_prepared(Path(corpus)):
        return _open_folder(Path(corpus), tokenizer)
    text = load_corpus(corpus, val_fraction)
    made = make_tokenizer(
        tokenizer or DEFAULT_TOKENIZER, (document.text for document in text.train + text.val)
    )
    return encode_corpus(text, made)


def is_prepared(folder: Path) -> bool:
    """Whether this is a folder of shards (or the remains of one) rather than of texts."""
    return folder.is_dir() and (
        any(folder.glob("*.bin"))
        or (folder / MANIFEST_FILE).exists()
        or (folder / TOKENIZER_FILE).exists()
    )


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer) -> Dataset:
    """The tokens of a corpus, documents one after the other."""
    train_tokens, train_documents = _encode_documents(corpus.train, tokenizer)
    val_tokens, val_documents = _encode_documents(corpus.val, tokenizer)
    return Dataset(
        train_tokens,
        val_tokens,
        tokenizer,
        train_documents,
        val_documents,
        _fingerprint(
            tokenizer,
            (len(train_tokens), sha256_of_tokens(train_tokens)),
            (len(val_tokens), sha256_of_tokens(val_tokens)),
        ),
    )


def check_fingerprint(
    saved: Mapping[str, str | int], current: Mapping[str, str | int], where: str = "checkpoint"
) -> None:
    """Raises ValueError that names every field in which the saved data differ from the current."""
    fields = [f for f in {**saved, **current} if saved.get(f) != current.get(f)]
    if fields:
        differences = "; ".join(
            f"{f}: {saved.get(f)} in the {where}, {current.get(f)} now" for f in fields
        )
        raise ValueError(
            f"data: not those of the {where}: {differences}. Set data.corpus, data.tokenizer and "
            "data.val_fraction to what they were, or start a new run"
        )


def _encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[np.ndarray, list[tuple[str, int]]]:
    parts, firsts, total = [], [], 0
    for document in documents:
        ids = tokenizer.encode(document.text)
        if tokenizer.end_of_text is not None:
            ids = np.concatenate([np.array([tokenizer.end_of_text], np.uint16), ids])
        firsts.append((document.name, total))
        parts.append(ids)
        total += len(ids)
    return np.concatenate(parts), firsts


def _fingerprint(
    tokenizer: Tokenizer, train: tuple[int, str], val: tuple[int, str]
) -> dict[str, str | int]:
    """The same for the same tokens, whether they come from text or from shards."""
    return {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "train_tokens": train[0],
        "train_sha256": train[1],
        "val_tokens": val[0],
        "val_sha256": val[1],
    }


def _open_folder(folder: Path, tokenizer: str | None) -> Dataset:
    manifest_path, tokenizer_path = folder / MANIFEST_FILE, folder / TOKENIZER_FILE
    manifest = None
    if manifest_path.exists():
        manifest = read_manifest(folder)
        made = from_json(_read_text(tokenizer_path))
        train_paths = [folder / name for name in manifest["train"]["shards"]]
        val_paths = [folder / name for name in manifest["val"]["shards"]]
    elif tokenizer_path.exists():
        raise ValueError(
            f"{folder}: has {TOKENIZER_FILE} but no {MANIFEST_FILE}: its preparation was "
            "interrupted; run `python -m nanogpt_jax.data prepare` again with --overwrite"
        )
    else:
        made = make_tokenizer("gpt2", [])
        train_paths = find_shards(folder / "*train*.bin")
        val_paths = find_shards(folder / "*val*.bin")
    if tokenizer not in (None, made.name):
        raise ValueError(
            f"tokenizer: got {tokenizer!r}, but the shards of {folder} are written with "
            f"{made.name!r}; use tokenizer {made.name!r}, or prepare the text again"
        )
    train, val = Shards(train_paths, made.vocab_size), Shards(val_paths, made.vocab_size)
    fingerprint = _fingerprint(made, (len(train), train.sha256), (len(val), val.sha256))
    if manifest is None:
        return Dataset(train, val, made, _files(train), _files(val), fingerprint)
    check_fingerprint(manifest["fingerprint"], fingerprint, where=str(manifest_path))
    return Dataset(
        train,
        val,
        made,
        [(name, first) for name, first in manifest["train"]["documents"]],
        [(name, first) for name, first in manifest["val"]["documents"]],
        fingerprint,
    )


def read_manifest(folder: Path) -> dict:
    """The manifest that `prepare` wrote last; raises ValueError for anything else."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(_read_text(path))
        for split in ("train", "val"):
            if not manifest[split]["shards"] or not manifest[split]["documents"]:
                raise KeyError(split)
        manifest["fingerprint"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path}: is not a manifest of `python -m nanogpt_jax.data prepare`; prepare the data "
            "again with --overwrite"
        ) from None
    return manifest


def _read_text(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; prepare the data again with --overwrite")
    return path.read_text(encoding="utf-8")


def _files(shards: Shards) -> list[tuple[str, int]]:
    return [(p.name, int(s)) for p, s in zip(shards.paths, shards.starts[:-1], strict=True)]
