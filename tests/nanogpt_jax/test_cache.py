"""Which masks a cache of first and last tokens can express, and how large it is."""

import pytest

from nanogpt_jax.cache import CacheSizes, cache_sizes, sizes_of_mask

from .conftest import tiny_config


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        ("causal()", (0, 16)),
        ("sliding_window(5)", (0, 5)),
        ("sliding_window(1)", (0, 1)),
        ("local(4, 0)", (0, 5)),
        ("local(4, 4) & causal()", (0, 5)),
        ("streaming(sinks=2, window=5)", (2, 5)),
        ("streaming(sinks=2, window=1)", (2, 1)),
        ("sliding_window(5) | streaming(sinks=1, window=3)", (1, 5)),
        ("streaming(sinks=2, window=99)", (0, 16)),  # of 16 tokens nothing is hidden
        ("document(lengths=[16]) & causal()", (0, 16)),
        ("prefix_lm(4) & causal()", (0, 16)),
        ("document(lengths=[10, 6]) & causal()", None),
        ("document(lengths=[15, 1]) & causal()", None),
        ("causal() & ~sliding_window(3)", None),
        ("causal() & ~local(9, -5)", None),  # two gaps would be needed
        ("lengths(kv=8) & causal()", None),
        ("lengths(q=8) & causal()", None),
    ],
)
def test_sizes_of_masks(mask, sizes):
    assert sizes_of_mask(mask, 16, rows=5) == (sizes and CacheSizes(*sizes))


@pytest.mark.parametrize(
    ("sinks", "window", "expected"),
    [
        (2, 5, (2, 5)),
        (2, 99, (2, 14)),  # a window with all of the sequence leaves the sink tokens their place
        (99, 5, (15, 1)),
        (0, 5, (0, 5)),
    ],
)
def test_streaming_keeps_its_sink_tokens_and_no_more_than_a_sequence(sinks, window, expected):
    config = tiny_config(
        "attention.impl=streaming",
        f"attention.sink_tokens={sinks}",
        f"attention.window={window}",
    )
    assert cache_sizes(config) == CacheSizes(*expected)


def test_a_cache_says_what_it_holds():
    assert str(CacheSizes(4, 252)) == "the first 4 and the last 252 tokens"
    assert str(CacheSizes(0, 256)) == "the last 256 tokens"
