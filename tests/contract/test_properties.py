"""Calls that nobody chose: shapes, masks and their combinations, features, dtypes, layouts."""

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smalti import masks
from tests.support.calls import Refused, check
from tests.support.cases import FEATURES
from tests.support.inputs import Sizes, draw

# Few sizes, all awkward: each is compiled anew, and what matters is what they are combined with.
LENGTHS = st.sampled_from([(1, 1), (3, 129), (130, 5), (129, 129), (64, 200)])
HEADS = st.sampled_from([(1, 1), (4, 2), (3, 1)])
DIMS = st.sampled_from([(8, 8), (3, 10)])


@st.composite
def sizes(draw) -> Sizes:
    (q_len, kv_len), (heads, kv_heads), (dim, v_dim) = draw(LENGTHS), draw(HEADS), draw(DIMS)
    return Sizes(draw(st.integers(1, 2)), q_len, kv_len, heads, kv_heads, dim, v_dim)


def leaf_masks(sizes: Sizes):
    offset = st.none() | st.integers(-sizes.Sq, sizes.Sk)
    small = st.integers(1, 150)
    ids = st.integers(0, 2**16).map(
        lambda seed: tuple(
            np.sort(np.random.default_rng(seed).integers(-1, 3, (sizes.B, n)), 1).astype(np.int32)
            for n in (sizes.Sq, sizes.Sk)
        )
    )
    per_batch = st.lists(st.integers(0, 200), min_size=sizes.B, max_size=sizes.B).map(np.array)
    return st.one_of(
        st.builds(masks.causal, offset),
        st.builds(masks.sliding_window, small, offset),
        st.builds(masks.local, small, small),
        st.builds(masks.streaming, sinks=small, window=small, offset=offset),
        st.builds(masks.prefix_lm, per_batch, offset),
        st.builds(masks.document, ids),
        st.builds(masks.lengths, q=per_batch, kv=per_batch),
        st.sampled_from([3, 5]).map(
            lambda n: masks.full() & (lambda b, h, q_idx, kv_idx: (q_idx + h) % n != kv_idx % n)
        ),
    )


def combined_masks(sizes: Sizes):
    return st.recursive(
        leaf_masks(sizes),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            inner.map(lambda a: ~a),
        ),
        max_leaves=3,
    )


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_call(implementation, data):
    shape = data.draw(sizes())
    mask = data.draw(combined_masks(shape))
    feature = data.draw(st.sampled_from(list(FEATURES)))
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    layout = data.draw(st.sampled_from(["BSHD", "BHSD"]))
    logits = data.draw(st.sampled_from(["normal", "sharp"]))
    inputs = draw(shape, dtype=dtype, layout=layout, logits=logits)
    with contextlib.suppress(Refused):
        check(implementation, inputs, layout=layout, mask=mask, **FEATURES[feature](shape))
