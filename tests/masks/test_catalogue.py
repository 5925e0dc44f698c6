"""Each mask of the catalogue is its formula, element by element and tile by tile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.masks.arguments import MANY

from . import brute

NAMES = list(brute.catalogue_cases(brute.GRIDS["1x1"]))


@pytest.mark.parametrize("size", brute.GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_formula_at_every_element(name, size):
    grid = brute.GRIDS[size]
    case = brute.catalogue_cases(grid)[name]
    np.testing.assert_array_equal(brute.evaluate(case.mask, grid), case.visible)


@pytest.mark.parametrize("size", brute.GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_classification_is_exact(name, size):
    grid = brute.GRIDS[size]
    case = brute.catalogue_cases(grid)[name]
    some, every = brute.tiles_of(case.visible, grid)
    found_some, found_every = brute.states_of(case.mask, grid)
    np.testing.assert_array_equal(found_some, some)
    np.testing.assert_array_equal(found_every & found_some, every)


@pytest.mark.parametrize("size", ["7x9", "12x5"])
def test_traced_numbers_and_arrays_mean_what_known_ones_do(size):
    grid = brute.GRIDS[size]
    cases = brute.catalogue_cases(grid)
    given = {name: case.mask for name, case in cases.items()}

    @jax.jit  # an int is a leaf too: every offset, prefix, length and id is traced in here
    def traced(given):
        bound = {name: mask.bind(*brute.shape(grid)) for name, mask in given.items()}
        indices = [jnp.asarray(x) for x in brute.indices(grid)]
        return (
            {name: mask(*indices) for name, mask in bound.items()},
            {name: tuple(mask.classify(grid)) for name, mask in bound.items()},
        )

    visible, states = traced(given)
    for name, case in cases.items():
        np.testing.assert_array_equal(
            np.broadcast_to(visible[name], case.visible.shape), case.visible, err_msg=name
        )
        known = case.mask.bind(*brute.shape(grid)).classify(grid)
        for found, expected in zip(states[name], known, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_the_last_query_meets_the_last_key_by_default():
    for mask in (masks.causal(), masks.sliding_window(1), masks.streaming(sinks=0, window=1)):
        for q_len, kv_len in ((3, 8), (8, 3), (1, 1)):
            bound = mask.bind(1, 1, q_len, kv_len)
            assert bound(0, 0, q_len - 1, kv_len - 1)
            assert not bound(0, 0, q_len - 2, kv_len - 1)


def test_a_sliding_window_holds_exactly_its_number_of_keys():
    visible = masks.sliding_window(5).bind(1, 1, 40, 40)(
        0, 0, np.arange(40)[:, None], np.arange(40)
    )
    np.testing.assert_array_equal(visible.sum(1), np.minimum(np.arange(40) + 1, 5))


def test_documents_by_their_lengths_are_ids_in_order():
    ids = np.array([0, 0, 0, 1, 2, 2], np.int32)
    grid = brute.TileGrid(2, 1, 6, 6, 2, 2)
    found = brute.evaluate(masks.document(lengths=[3, 1, 2]), grid)
    np.testing.assert_array_equal(found, brute.evaluate(masks.document(ids), grid))
    with pytest.raises(
        ValueError, match="document: its lengths sum to 6; here they must sum to Sk = 7"
    ):
        masks.document(lengths=[3, 1, 2]).bind(1, 1, 6, 7)


@pytest.mark.parametrize("arguments", [{}, {"ids": np.zeros(3, np.int32), "lengths": [3]}])
def test_documents_are_given_in_one_way(arguments):
    with pytest.raises(ValueError, match="document: give ids, one for each token, or lengths=, bu"):
        masks.document(**arguments)


def test_negative_ids_see_nobody_and_are_seen_by_nobody():
    ids = np.array([[-1, 0, 0, -1, -7, 1]], np.int32)
    visible = brute.evaluate(masks.document(ids), brute.TileGrid(1, 1, 6, 6, 2, 2))[0, 0]
    assert not visible[ids[0] < 0].any()
    assert not visible[:, ids[0] < 0].any()
    assert visible[np.ix_([1, 2], [1, 2])].all()
    assert visible[5].tolist() == [False] * 5 + [True]


def _numbers(x) -> list:
    """Of each constructor what it made of an integer array ``[B]``, and of its first number."""
    made = []
    for value in (x, x[0]):
        made += [
            *(masks.causal(value).offset, masks.sliding_window(3, value).offset),
            *(masks.local(1, 2, value).offset, masks.prefix_lm(value, value).offset),
            masks.streaming(sinks=1, window=2, offset=value).offset,
            *(masks.prefix_lm(value).prefix, masks.lengths(q=value).q, masks.lengths(kv=value).kv),
        ]
    return made


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", [*INTEGERS, "int4", "uint4"])
def test_numbers_are_of_any_integers(dtype):
    """Those beyond `MANY` mean the same as it, however far beyond."""
    limits = jnp.iinfo(dtype)
    given = [5, 0, 7, int(limits.max), int(limits.min)]
    expected = np.array([max(-MANY, min(x, MANY)) for x in given])
    with jax.enable_x64("64" in dtype):
        for x in (np.array(given, dtype), jnp.array(given, dtype)):
            for numbers in (_numbers(x), jax.jit(_numbers)(jnp.array(given, dtype))):
                for got in numbers:
                    assert isinstance(got, int) or got.dtype == np.int32
                    np.testing.assert_array_equal(got, expected if np.ndim(got) else expected[0])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_are_of_any_integers(dtype):
    """Known ones that int32 does not hold are refused; traced ones never become other documents'
    of lesser numbers, nor padding a document."""
    limits, int32 = np.iinfo(dtype), np.iinfo(np.int32)
    given = [5, 0, 7, int(limits.max), int(limits.min)]
    expected = np.clip(np.array(given, object), int32.min, int32.max).astype(np.int32)
    fits = int32.min <= limits.min <= limits.max <= int32.max
    with jax.enable_x64("64" in dtype):
        for x in (np.array(given, dtype), jnp.array(given, dtype)):
            traced = jax.jit(lambda x: masks.document(x).q_ids)(jnp.asarray(x))
            assert traced.dtype == np.int32
            np.testing.assert_array_equal(traced[0], expected)
            if fits:
                np.testing.assert_array_equal(masks.document(x).kv_ids[0], expected)
            else:
                with pytest.raises(
                    ValueError, match=r"document: ids run from .* they must fit int32"
                ):
                    masks.document(x)
            np.testing.assert_array_equal(masks.document(x[:3]).kv_ids[0], given[:3])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_mask_of_any_integers_shows_the_same(dtype):
    grid = brute.GRIDS["7x9"]
    masks_of = {
        "causal": masks.causal,
        "prefix": lambda x: masks.prefix_lm(x, 0),
        "lengths": lambda x: masks.lengths(q=x, kv=x),
    }
    for name, make in masks_of.items():
        expected = brute.evaluate(make(np.array([2, 5], np.int32)), grid)
        with jax.enable_x64("64" in dtype):
            got = brute.evaluate(make(jnp.array([2, 5], dtype)), grid)
        np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.parametrize(
    ("mask", "varies"),
    [
        (masks.causal(), False),
        (masks.causal(np.array([1, 2])), True),
        (masks.causal(np.array([1])), False),
        (masks.prefix_lm(np.array([1, 2])), True),
        (masks.lengths(q=2, kv=np.array([1, 2])), True),
        (masks.document(np.zeros((1, 4), np.int32)), False),
        (masks.document(np.zeros((2, 4), np.int32)), True),
    ],
    ids=repr,
)
def test_varies_with_the_batch_entry_only_if_its_arrays_do(mask, varies):
    assert mask.varies() == (varies, False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.sliding_window(0), "window: got 0; it must be an int of at least 1."),
        (lambda: masks.sliding_window(1.5), "window: got 1.5; it must be an int of at least 1."),
        (lambda: masks.sliding_window(True), "window: got True; it must be an int of at least 1."),
        (lambda: masks.local(1.5, 0), "local: left: got 1.5; it must be an int."),
        (lambda: masks.local(0, "2"), "local: right: got '2'; it must be an int."),
        (lambda: masks.streaming(sinks=-1, window=1), "sinks: got -1; it must be an int of at"),
        (lambda: masks.streaming(sinks=1, window=0), "window: got 0; it must be an int of at"),
        (
            lambda: masks.causal(1.5),
            "causal: offset: got float64[]; it must be integers of shape a scalar or [B].",
        ),
        (
            lambda: masks.prefix_lm(np.zeros((2, 2), int)),
            "prefix: got int64[2, 2]; it must be integers of shape a scalar or [B].",
        ),
        (lambda: masks.lengths(), "lengths: give q=, kv= or both; with neither, use full()."),
        (lambda: masks.document(3), "document: ids are one number; give one id per token"),
        (
            lambda: masks.document(np.zeros((2, 4), np.float32)),
            "document: ids: got float32[2, 4]; it must be integers of shape [S] or [B, S].",
        ),
    ],
)
def test_a_wrong_argument_is_named(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            masks.causal(np.array([1, 2, 3])),
            "causal(offset=array[3]): offset has 3 entries; it must be one number or one for each "
            "of the 2 batch entries.",
        ),
        (masks.prefix_lm(np.arange(3)), "prefix_lm: prefix has 3 entries; it must be one number"),
        (masks.lengths(q=np.arange(3)), "lengths: q has 3 entries"),
        (masks.lengths(kv=np.arange(3)), "lengths: kv has 3 entries"),
        (
            masks.document(np.zeros((2, 5), np.int32)),
            "document: kv ids have shape [2, 5]; here they must be [2, 6] or [1, 6], an id for "
            "each token. Where Sq ≠ Sk give a tuple (q_ids, kv_ids); for lengths write",
        ),
        (masks.document(np.zeros((3, 5), np.int32)), "document: q ids have shape [3, 5]"),
    ],
    ids=repr,
)
def test_a_mask_that_does_not_fit_the_call_says_what_would(mask, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        mask.bind(2, 4, 5, 6)


def test_a_mask_by_itself_needs_its_offset():
    with pytest.raises(ValueError, match=re.escape("causal(): its offset is Sk − Sq of the call")):
        masks.causal()(0, 0, 0, 0)
    assert masks.causal(0)(0, 0, 3, 3)


def test_masks_are_written_as_they_are_called():
    assert repr(masks.streaming(sinks=4, window=9)) == "streaming(sinks=4, window=9)"
    assert repr(masks.causal(3)) == "causal(offset=3)"
    assert repr(masks.prefix_lm(np.array([1, 2]), 0)) == "prefix_lm(array[2], offset=0)"
    assert repr(masks.local(1, 2)) == "local(1, 2, offset=0)"
    assert repr(masks.lengths(kv=3)) == "lengths(q=None, kv=3)"
    assert repr(masks.document(np.zeros(4, np.int32))) == "document(ids [1, 4], [1, 4])"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            masks.sliding_window,
            "sliding_window: window: got the traced int32[]; it must be",
        ),
        (lambda n: masks.local(n, 0), "local: left: got the traced int32[]; it must be an int,"),
        (lambda n: masks.streaming(sinks=n, window=2), "streaming: sinks: got the traced"),
    ],
)
def test_a_traced_size_becomes_a_function(make, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        jax.jit(lambda n: (make(n), n)[1])(3)
    assert "write the mask as a function that captures it, such as mask=lambda" in str(raised.value)


def test_the_advice_for_a_traced_window_holds():
    def live(window):
        mask = lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx > q_idx - window)  # noqa: E731
        return tuple(masks.build_block_mask(mask, 1, 1, 9, 9, 2, 2).states())

    expected = masks.build_block_mask(masks.sliding_window(3), 1, 1, 9, 9, 2, 2).states()
    for found, wanted in zip(jax.jit(live)(3), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_traced_lengths_of_documents_become_ids():
    with pytest.raises(ValueError, match=r"document: lengths: got the traced .* become ids"):
        jax.jit(lambda n: (masks.document(lengths=[n, 3]), n)[1])(3)


def test_an_array_of_one_number_is_made_an_int():
    with pytest.raises(ValueError, match=r"window: got Array\(3, .*at least 1\. Give int"):
        masks.sliding_window(jnp.int32(3))
