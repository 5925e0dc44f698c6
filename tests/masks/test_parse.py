"""Masks from text: the catalogue and nothing else."""

import re

import numpy as np
import pytest

import smalti
from smalti import masks
from smalti.masks.parse import MOST_DEEP, NAMES, parse

from . import brute

GRID = brute.GRIDS["7x9"]


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", masks.full()),
        ("causal", masks.causal()),
        (" causal() ", masks.causal()),
        ("causal(offset=-2)", masks.causal(-2)),
        ("sliding_window(3)", masks.sliding_window(3)),
        ("local(2, right=1)", masks.local(2, 1)),
        ("streaming(sinks=2, window=3)", masks.streaming(sinks=2, window=3)),
        ("prefix_lm(4)", masks.prefix_lm(4)),
        ("lengths(q=3, kv=5)", masks.lengths(q=3, kv=5)),
        ("document(lengths=[3, 4])", masks.document(lengths=[3, 4])),
        (
            "sliding_window(2) | prefix_lm(1) & ~causal",  # & binds before |
            masks.sliding_window(2) | (masks.prefix_lm(1) & ~masks.causal()),
        ),
        (
            "(sliding_window(2) | prefix_lm(1)) & ~lengths(kv=4)",
            (masks.sliding_window(2) | masks.prefix_lm(1)) & ~masks.lengths(kv=4),
        ),
    ],
)
def test_a_text_is_the_mask_it_names(text, mask):
    assert repr(parse(text)) == repr(mask)
    if "document" in text:
        return  # which wants as many queries as keys
    np.testing.assert_array_equal(brute.evaluate(parse(text), GRID), brute.evaluate(mask, GRID))


@pytest.mark.parametrize(
    "mask",
    [
        "causal()",
        "(sliding_window(3) & ~local(2, 1, offset=0))",
        "(document(lengths=[7, 2]) | causal())",
    ],
)
def test_what_a_mask_prints_can_be_read(mask):
    assert repr(parse(mask)) == mask


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "slidng_window(3)",
            "mask 'slidng_window(3)': no mask 'slidng_window' here; did you mean 'sliding_window'?",
        ),
        ("casual", "no mask 'casual' here; did you mean 'causal'?"),
        ("xyz(1)", f"no mask 'xyz' here; allowed are {', '.join(NAMES)}."),
        ("document(3)", "mask 'document(3)': write document(lengths=[100, 28]): how many tokens"),
        ("document", "write document(lengths=[100, 28])"),
        ("document()", "write document(lengths=[100, 28])"),
        ("document([3, 4])", "write document(lengths=[100, 28])"),
        ("document(lengths=7)", "write document(lengths=[100, 28])"),
        ("document(lengths=[3], ids=[3])", "write document(lengths=[100, 28])"),
        ("document(lengths=[])", "document: lengths: got []; it must be a list of ints"),
        ("document(lengths=[4, 0])", "document: lengths: got 0; it must be an int of at least 1."),
        ("document(lengths=[4, 'x'])", "is not a whole number."),
        ("causal([1, 2])", "'[1, 2]' is not a whole number."),
        (
            "causal(",
            "write it like 'streaming(sinks=4, window=512) & causal()'.",
        ),
        ("", "mask '' cannot be read"),
        (
            "causal() and full()",
            "'causal() and full()' is not allowed; use full, causal, sliding_window, local, "
            "streaming, prefix_lm, document, lengths, called with numbers and joined by &, | and ~ "
            "('and', 'or', 'not' do not combine masks).",
        ),
        ("not causal()", "'not causal()' is not allowed"),
        ("causal() + full()", "'causal() + full()' is not allowed"),
        ("masks.causal()", "'masks.causal()' is not allowed"),
        ("__import__('os')", "'\\'os\\'' is not a whole number."),
        (
            "sliding_window(0)",
            "mask 'sliding_window(0)': sliding_window: window: got 0; it must be an int",
        ),
        ("sliding_window(1.5)", "mask 'sliding_window(1.5)': '1.5' is not a whole number."),
        ("sliding_window(True)", "'True' is not a whole number."),
        ("sliding_window(1 + 2)", "'1 + 2' is not a whole number."),
        ("sliding_window(n)", "'n' is not a whole number."),
        ("sliding_window(*[3])", "'*[3]' is not a whole number."),
        ("sliding_window()", "write sliding_window(window=…, offset=…)."),
        (
            "streaming(4, 512)",
            "mask 'streaming(4, 512)': write streaming(sinks=…, window=…, offset=…).",
        ),
        ("streaming(sink=4, window=9)", "offset=…); did you mean 'sinks'?"),
        ("lengths()", "mask 'lengths()': lengths: give q=, kv= or both"),
        ("CAUSAL()", "no mask 'CAUSAL' here; did you mean 'causal'?"),
        ("streaming(SINK=4, window=9)", "offset=…); did you mean 'sinks'?"),
        ("\udcff", "mask '\\udcff' cannot be read ('utf-8' codec can't encode"),
        ("causal(\0)", "mask 'causal(\\x00)' cannot be read ("),
        (
            "causal(offset=1, offset=2)",
            "mask 'causal(offset=1, offset=2)': causal is given offset= 2 times; give it once.",
        ),
        ("document(lengths=[6], lengths=[6])", "document is given lengths= 2 times; give it once."),
        ("full() & lengths(q=1, q=2, kv=3)", "lengths is given q= 2 times; give it once."),
    ],
)
def test_what_cannot_be_read_says_why(text, error):
    error = error.replace("'\\'os\\''", "\"'os'\"")
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "~" * 600 + "causal()",
        "~" * 20_000 + "causal()",
        "&".join(["causal()"] * 900),
        "|".join(["causal"] * (MOST_DEEP + 2)),
        "causal(" + "-" * 900 + "1)",
        "+".join(["causal()"] * 900),
        "causal(a." + "b." * 900 + "c)",
    ],
)
def test_what_is_nested_too_deeply_is_refused(text):
    said = f"^mask {re.escape(repr(text[:79] + '…'))} is nested more than {MOST_DEEP} deep"
    with pytest.raises(ValueError, match=said):
        parse(text)


@pytest.mark.parametrize(
    "text", ["~" * MOST_DEEP + "causal()", "&".join(["causal()"] * (MOST_DEEP + 1))]
)
def test_what_is_nested_as_deeply_as_may_be_works_throughout(text):
    mask = parse(text)
    assert "causal()" in repr(mask)
    block_mask = masks.build_block_mask(mask, 1, 1, 8, 8, 4, 4)
    assert masks.count(block_mask).pairs_visible == 36
    q = np.ones((1, 8, 1, 4), np.float32)
    assert smalti.attention(q, q, q, mask=mask).shape == q.shape
