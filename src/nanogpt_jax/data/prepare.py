"""Writing a corpus as a folder of `.bin` shards.

    train_000000.bin …, val_000000.bin …   tokens, see `shards`
    tokenizer.json                         how to read them
    manifest.json                          what there is, with checksums; written last

A folder without its manifest is unfinished, and `load` refuses it.
"""

import json
from collections.abc import Callable
from pathlib import Path

from nanogpt_jax.data.corpus import load_corpus
from nanogpt_jax.data.dataset import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    encode_corpus,
    is_prepared,
)
from nanogpt_jax.data.names import check_name
from nanogpt_jax.data.shards import MAX_TOKENS, write_atomic, write_shard
from nanogpt_jax.data.tokenizers import TOKENIZERS, make_tokenizer

SHARD_TOKENS = 10**8
"""As modded-nanogpt cuts its own."""


def prepare(
    source: str,
    tokenizer: str,
    out: Path,
    val_fraction: float = 0.1,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict:
    """Encodes `source` (see `load_corpus`) into the folder `out` and returns its manifest.

    progress: called with what is being done, and how many of how many tokens are.

    Raises ValueError for an `out` that holds shards already, unless `overwrite`, which removes
    them (`train_*.bin` and `val_*.bin`, no other file), and whatever the corpus and the tokenizer
    raise.
    """
    check_name("tokenizer", tokenizer, TOKENIZERS)
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise ValueError(
            f"shard_tokens: got {shard_tokens}, allowed is 1 to {MAX_TOKENS}; {SHARD_TOKENS} makes "
            "files of 200 MB"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: got the file {out}, allowed is a folder; choose another name")
    if is_prepared(out) and not overwrite:
        state = "" if (out / MANIFEST_FILE).exists() else " (unfinished, or of another tool)"
        raise ValueError(
            f"out: the folder {out} holds prepared data already{state}; use --overwrite to replace "
            "it, or choose another folder"
        )

    progress(f"reading {source}", 0, 0)
    corpus = load_corpus(source, val_fraction)
    characters = sum(len(document.text) for document in corpus.train + corpus.val)
    progress(f"encoding {characters} characters", 0, 0)
    made = make_tokenizer(tokenizer, (document.text for document in corpus.train + corpus.val))
    dataset = encode_corpus(corpus, made)

    out.mkdir(parents=True, exist_ok=True)
    # From here until the new manifest is there, the folder does not read as whole.
    write_atomic(out / TOKENIZER_FILE, [made.to_json().encode()])
    for old in [out / MANIFEST_FILE, *out.glob("train_*.bin"), *out.glob("val_*.bin")]:
        old.unlink(missing_ok=True)
    manifest: dict = {
        "source": source,
        "val_fraction": val_fraction,
        "characters": characters,
        "tokenizer": made.name,
        "vocab_size": made.vocab_size,
        "fingerprint": dataset.fingerprint,
    }
    total, done = len(dataset.train_tokens) + len(dataset.val_tokens), 0
    for split, tokens, documents in (
        ("train", dataset.train_tokens, dataset.train_documents),
        ("val", dataset.val_tokens, dataset.val_documents),
    ):
        names = []
        for start in range(0, len(tokens), shard_tokens):
            names.append(f"{split}_{len(names):06d}.bin")
            shard = tokens[start : start + shard_tokens]
            write_shard(out / names[-1], shard)
            done += len(shard)
            progress(f"writing {names[-1]}", done, total)
        manifest[split] = {
            "tokens": len(tokens),
            "sha256": dataset.fingerprint[f"{split}_sha256"],
            "shards": names,
            "documents": documents,
        }
    write_atomic(out / MANIFEST_FILE, [json.dumps(manifest, indent=2).encode() + b"\n"])
    return manifest
