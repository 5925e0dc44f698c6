import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_jax.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    from_json,
    make_tokenizer,
)
from tests.nanogpt_jax.data.support import needs_gpt2, quick

# Published with GPT-2's encoder or in its tokenizers' own tests.
KNOWN = {
    "Hello world": [15496, 995],
    "Hello, world!": [15496, 11, 995, 0],
    "The quick brown fox": [464, 2068, 7586, 21831],
    " the": [262],
    "I'll don't": [40, 1183, 836, 470],
    "      indented": [220, 220, 220, 220, 220, 773, 4714],
    "1234567": [10163, 2231, 3134],
    "\U0001f600": [47249, 222],
    "日本語": [33768, 98, 17312, 105, 45739, 252],
    "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
    "": [],
}


@needs_gpt2
@pytest.mark.parametrize("text", KNOWN)
def test_gpt2_encodes_as_published(text):
    ids = Gpt2Tokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == KNOWN[text]


@needs_gpt2
@quick
@given(st.text())
def test_gpt2_roundtrip(text):
    tokenizer = Gpt2Tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_gpt2
def test_gpt2_end_of_text():
    tokenizer = Gpt2Tokenizer()
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (50256, 50257)
    assert tokenizer.decode([50256, 15496]) == "<|endoftext|>Hello"
    with pytest.raises(ValueError, match=r"got 50257 at position 1.*ids 0 to 50256; mask"):
        tokenizer.decode([0, 50257])


@needs_gpt2
def test_gpt2_shows_a_cut_character():
    assert Gpt2Tokenizer().decode([47249]) == "\N{REPLACEMENT CHARACTER}"


@quick
@given(st.text())
def test_byte_roundtrip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


@pytest.mark.parametrize("make", [ByteTokenizer, pytest.param(Gpt2Tokenizer, marks=needs_gpt2)])
def test_lone_surrogates_are_refused(make):
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at position 2"):
        make().encode("ab\ud800")


@quick
@given(st.text(min_size=1))
def test_char_roundtrip(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text


def test_char_ids_follow_code_points():
    assert CharTokenizer("cab!").encode("!abc").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("unknown", ["é", "A", "\U0001f600", "\0"])
def test_char_names_the_unknown_character_and_its_position(unknown):
    code = rf"U\+{ord(unknown):04X}"
    with pytest.raises(ValueError, match=rf"\({code}\) at position 3, which is not one of the 3"):
        CharTokenizer("abc").encode("abc" + unknown)


def test_char_needs_characters():
    with pytest.raises(ValueError, match="has 0 distinct characters"):
        CharTokenizer("")


def test_ids_out_of_range_are_refused():
    with pytest.raises(ValueError, match="got -1 at position 1, the 'char' vocabulary"):
        CharTokenizer("abc").decode([0, -1])


@pytest.mark.parametrize("name", ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)])
def test_json_roundtrip(name):
    tokenizer = make_tokenizer(name, ["some ", 'text "é"'])
    again = from_json(tokenizer.to_json())
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    assert again.encode("some text").tolist() == tokenizer.encode("some text").tolist()


def test_other_vocabularies_are_unequal():
    assert CharTokenizer("abc") != CharTokenizer("abd")
    assert CharTokenizer("abc") != ByteTokenizer()
    assert CharTokenizer("cba") == CharTokenizer("abc")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"name": "byte"}'])
def test_foreign_json_is_refused(text):
    with pytest.raises(ValueError, match=r"allowed is what Tokenizer\.to_json writes"):
        from_json(text)


def test_edited_json_is_refused():
    state = json.loads(CharTokenizer("abc").to_json()) | {"chars": "ab"}
    with pytest.raises(ValueError, match="says vocab_size 3, 'char' with these characters has 2"):
        from_json(json.dumps(state))


def test_a_typo_suggests_the_tokenizer():
    with pytest.raises(ValueError, match=r"tokenizer: got 'bytes'.*Did you mean 'byte'\?"):
        make_tokenizer("bytes", [])
