"""Masks inside of kernels: bands, and the same answer as the mask itself gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.attention.tpu import masking
from smalti.masks.mask_mod import as_mask

B, SQ, SK = 2, 11, 14


def brute(mask) -> np.ndarray:
    b, h, q, kv = np.ix_(range(B), range(1), range(SQ), range(SK))
    return np.broadcast_to(np.asarray(mask(b, h, q, kv)), (B, 1, SQ, SK))[:, 0]


def evaluated(mask) -> np.ndarray:
    """By `visible`, from the arrays that a kernel is given, one batch entry at a time."""
    form, operands = masking.form(mask), masking.arrays_of(mask)
    assert hash(form) == hash(masking.form(mask))
    found = []
    for b in range(B):
        numbers, ids = [], []
        if operands.numbers is not None:
            entry = b if operands.numbers.shape[1] > 1 else 0
            numbers = [x[entry] for x in operands.numbers]
        if operands.q_ids is not None:
            entry = b if operands.q_ids.shape[1] > 1 else 0
            ids = [
                (q[entry][None, :], kv[entry][:, None])
                for q, kv in zip(operands.q_ids, operands.kv_ids, strict=True)
            ]
        q_idx, kv_idx = jnp.arange(SQ)[None, :], jnp.arange(SK)[:, None]
        tile = masking.visible(form, numbers, ids, q_idx, kv_idx)  # [keys, queries], as in kernels
        assert not numbers
        assert not ids
        found.append(np.broadcast_to(tile, (SK, SQ)).T)
    return np.stack(found)


def leaves():
    number = st.integers(-6, 18)
    offset = st.none() | number | st.lists(number, min_size=B, max_size=B).map(np.array)
    size = st.integers(0, 9)
    length = number | st.lists(number, min_size=B, max_size=B).map(np.array)

    def ids(seed, batch):
        rng = np.random.default_rng(seed)
        return tuple(rng.integers(-1, 3, (batch, n)).astype(np.int32) for n in (SQ, SK))

    return st.one_of(
        st.just(masks.full()),
        st.builds(masks.causal, offset),
        st.builds(masks.sliding_window, st.integers(1, 9), offset),
        st.builds(masks.local, size, size, offset=number),
        st.builds(masks.streaming, sinks=size, window=st.integers(1, 9), offset=offset),
        st.builds(masks.prefix_lm, length, offset),
        st.builds(masks.lengths, q=st.none() | length, kv=length),
        st.builds(ids, st.integers(0, 99), st.sampled_from([1, B])).map(masks.document),
    )


COMBINED = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        inner.map(lambda a: ~a),
    ),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(mask=COMBINED)
def test_the_same_as_the_mask_itself(mask):
    mask = mask.bind(B, 1, SQ, SK)
    assert masking.unsupported(mask) is None
    expected = brute(mask)
    np.testing.assert_array_equal(evaluated(mask), expected)
    band = masking.band(mask)
    if band is not None:
        low, high = band
        difference = np.arange(SK)[None, :] - np.arange(SQ)[:, None]
        within = np.ones((SQ, SK), bool)
        within &= True if low is None else difference >= low
        within &= True if high is None else difference <= high
        np.testing.assert_array_equal(np.broadcast_to(within, expected.shape), expected)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.full(), (None, None)),
        (masks.causal(), (None, 3)),
        (masks.causal(offset=-2), (None, -2)),
        (masks.causal(offset=np.array([4, 4])), (None, 4)),
        (masks.sliding_window(4), (0, 3)),
        (masks.local(5, 2), (-5, 2)),
        (masks.causal() & masks.local(5, 20), (-5, 3)),
        (masks.full() & masks.sliding_window(4), (0, 3)),
        (masks.causal(offset=np.array([4, 5])), None),
        (masks.causal() | masks.local(5, 2), None),
        (~masks.causal(), None),
        (masks.causal() & masks.lengths(kv=4), None),
        (masks.streaming(sinks=1, window=2), None),
    ],
    ids=repr,
)
def test_bands(mask, expected):
    assert masking.band(mask.bind(B, 1, SQ, SK)) == expected


def test_a_traced_offset_is_no_known_band():
    found = []

    @jax.jit
    def trace(offset):
        found.append(masking.band(masks.causal(offset).bind(B, 1, SQ, SK)))

    trace(3)
    assert found == [None]


@pytest.mark.parametrize(
    "mask", [as_mask(np.ones((SQ, SK), bool)), as_mask(lambda b, h, q_idx, kv_idx: q_idx > kv_idx)]
)
def test_what_kernels_cannot_evaluate_is_found_inside_of_combinations(mask):
    assert masking.unsupported(mask) == repr(mask)
    assert masking.unsupported(masks.causal() & ~(masks.full() | mask)) == repr(mask)


def test_ids_are_padded_as_what_nobody_sees():
    operands = masking.arrays_of(masks.document((np.zeros(SQ, int), np.ones(SK, int))))
    padded = masking.padded(operands, 128, 256)
    assert padded.q_ids.shape == (1, 1, 128)
    assert padded.kv_ids.shape == (1, 1, 256)
    assert (padded.q_ids[..., SQ:] == -1).all()
    assert (padded.kv_ids[..., SK:] == -1).all()
    assert (padded.kv_ids[..., :SK] == 1).all()
    assert masking.padded(masking.NO_ARRAYS, 128, 256) == masking.NO_ARRAYS
